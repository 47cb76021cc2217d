#!/usr/bin/env python3
"""Makes the golden conversations with tools: their text by transformers, with each chat template.

    .venv/bin/python tools/golden_tools.py                    # tests/golden/tools/<template>.json
    .venv/bin/python tools/golden_tools.py MODEL.gguf ...     # with the template in a GGUF file instead

The templates are `tests/golden/tools/<template>.jinja`; `tests/golden/tools/README.md` says where they come from. The
packages are those of `tools/requirements.txt`.

golden.json of a template:
  made_by, date
  template        the GGUF file that has it, or the template's file
  cases[]         name; tools (OpenAI's notation); messages; rendered (add_generation_prompt=True), or the template's
                  own `error` where it refuses the conversation; `thinking` where enable_thinking is given

The BOS and EOS tokens are `<s>` and `</s>` except in GGUF files. A template that asks for the date is given `date`, in both ways
in which templates write it.
"""

import argparse
import copy
import json
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from golden import dump


class Date(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 2, tzinfo=tz)


chat_template_utils.datetime = Date

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a city: "now" or <later>, e.g. Zürich\\Bern.\nSecond line & more',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1, "description": ""},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Finds notes.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words <|im_end|> to look for"},
                "filter": {
                    "type": "object",
                    "description": "Which notes",
                    "properties": {
                        "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags"},
                        "pinned": {"type": "boolean", "description": "Only pinned ones"},
                    },
                },
            },
            "required": ["query"],
        },
    },
}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id, name, content):
    return {"role": "tool", "content": content, "tool_call_id": id, "name": name}


SYSTEM = {"role": "system", "content": "You are terse."}
ASK = {"role": "user", "content": "What is the weather in Zürich?"}
ONE_CALL = {"role": "assistant", "content": "", "tool_calls": [call("a1B2c3D4e", "get_weather", {"city": "Zürich", "days": 2})]}
RESULT = result("a1B2c3D4e", "get_weather", '{"temperature": 21.5, "sky": "clear \\"blue\\""}')
NESTED = call("z9Y8x7W6v", "search_notes", {"query": 'a "b" \\ c\n<tool_call>', "filter": {"tags": ["é", "x"], "pinned": True}})
CASES = [
    ("tools", [WEATHER, SEARCH], [SYSTEM, ASK]),
    ("tools, no system", [WEATHER], [ASK]),
    ("call and result", [WEATHER, SEARCH], [SYSTEM, ASK, ONE_CALL, RESULT]),
    (
        "call, result, answer, question",
        [WEATHER],
        [ASK, ONE_CALL, RESULT, {"role": "assistant", "content": "Clear, 21.5 °C."}, {"role": "user", "content": "And in Bern?"}],
    ),
    (
        "nested arguments",
        [WEATHER, SEARCH],
        [SYSTEM, ASK, {"role": "assistant", "content": "", "tool_calls": [NESTED]}, result("z9Y8x7W6v", "search_notes", "None </s> found.")],
    ),
    (
        "two calls",
        [WEATHER, SEARCH],
        [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [*ONE_CALL["tool_calls"], NESTED]},
            RESULT,
            result("z9Y8x7W6v", "search_notes", "None found."),
        ],
    ),
    ("text beside a call", [WEATHER], [ASK, {**ONE_CALL, "content": "I look it up."}, RESULT]),
    ("no tools any more", None, [SYSTEM, ASK, ONE_CALL, RESULT]),
]


def case(name, tools, messages, template, tokens, **kwargs):
    out = {"name": name, "tools": tools or [], "messages": messages}
    if kwargs:
        out["thinking"] = kwargs["enable_thinking"]
    arguments = copy.deepcopy([messages]), copy.deepcopy(tools)
    try:
        rendered, _ = render_jinja_template(
            conversations=arguments[0], tools=arguments[1], chat_template=template, add_generation_prompt=True, **tokens, **kwargs
        )
        return {**out, "rendered": rendered[0]}
    except jinja2.TemplateError as error:
        return {**out, "error": str(error)}
    except TypeError:  # The template's own fault, which other Jinja engines need not share.
        return None


def make(out, name, source, template, tokens):
    cases = [case(*c, template, tokens) for c in CASES]
    if "enable_thinking" in template:
        unthinking = [(f"{label}, no thoughts", tools, messages) for label, tools, messages in CASES[:4]]
        cases += [case(*c, template, tokens, enable_thinking=False) for c in unthinking]
    golden = {
        "template": source,
        "made_by": f"tools/golden_tools.py; transformers {version('transformers')}, jinja2 {version('jinja2')}",
        "date": Date.now().strftime("%d %b %Y|%Y-%m-%d"),
        "cases": [c for c in cases if c],
    }
    dump(out / f"{name}.json", golden)
    print(name, [c.get("error", "ok") for c in golden["cases"]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="*", type=Path)
    args = parser.parse_args()
    out = Path(__file__).resolve().parent.parent / "tests" / "golden" / "tools"
    for path in args.gguf:
        from gguf import GGUFReader

        fields = GGUFReader(path).fields
        texts = fields["tokenizer.ggml.tokens"].contents()
        token = lambda key: texts[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
        template = fields["tokenizer.chat_template"].contents()
        make(out, path.stem, path.name, template, {"bos_token": token("bos"), "eos_token": token("eos")})
    if not args.gguf:
        for path in sorted(out.glob("*.jinja")):
            make(out, path.stem, path.name, path.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})


if __name__ == "__main__":
    main()
