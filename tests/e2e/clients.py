"""Drives a running server with the official `openai` package and a LangChain chat model.

    clients.py URL [KEY]

Among them are calls of tools, forced and free, answers of a schema, and `/v1/responses`. Ends with status 77 where one of them is not installed.
"""

import json
import sys
from typing import Literal

try:
    import openai
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, ConfigDict, Field
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

URL, KEY = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
TORQUE = {"title": "Torque", "text": "A stem bolt is tightened to 5 Nm. Carbon bars want paste on the clamp."}
QUESTION = [{"role": "user", "content": "How tight is a stem bolt?"}]

PARAMETERS = {
    "type": "object", "additionalProperties": False, "required": ["bolt", "unit"],
    "properties": {"bolt": {"type": "string", "enum": ["stem", "seat", "crank"]}, "unit": {"enum": ["Nm", "ft-lb"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "torque", "description": "Torque of a bolt.", "strict": True, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "spokes", "description": "Counts spokes.", "strict": True, "parameters": {
        "type": "object", "properties": {"wheel": {"enum": ["front", "rear"]}}, "required": ["wheel"],
        "additionalProperties": False}}},
]


class Bolt(BaseModel):
    """A bolt of a bicycle."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["stem", "seat"]
    newton_metres: int = Field(ge=0, le=99)


client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
model = client.models.list().data[0].id


def chat():
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0, seed=1, extra_body={"documents": [TORQUE]}
    )
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 20 and answer.usage.completion_tokens <= 12
    return answer


def stream(whole):
    parts = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"documents": [TORQUE]},
    )
    text, usage, stats = "", None, None
    for part in parts:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
        stats = (part.model_extra or {}).get("refrain") or stats
    assert text == whole.choices[0].message.content, (text, whole)
    # The second time the document comes from the cache.
    assert usage.prompt_tokens_details.cached_tokens > 0 and usage.total_tokens == whole.usage.total_tokens
    assert stats["stats"]["prefilled_chunks"] == 0 and stats["documents"][0]["title"] == "Torque"


def documents():
    kept = client.post("/documents", cast_to=object, body=TORQUE)["data"][0]
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, extra_body={"documents": [{"id": kept["id"]}], "refrain": {"method": "pie"}}
    )
    assert answer.refrain["method"] == "pie" and answer.refrain["documents"][0]["id"] == kept["id"]
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, extra_body={"documents": "search"}
    )
    assert kept["id"] in [source["id"] for source in answer.refrain["documents"]]


def likelihoods():
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    tokens = answer.choices[0].logprobs.content
    assert 1 <= len(tokens) <= 3 and tokens[0].top_logprobs[0].token == tokens[0].token
    assert answer.choices[0].message.content.startswith(bytes(tokens[0].bytes).decode())
    text = client.completions.create(model=model, prompt="One, two, three,", max_tokens=4, stop=["\n"])
    assert text.object == "text_completion" and text.choices[0].text


def call_of(called):
    """The name and arguments of a call, whose arguments fit its tool."""
    arguments = json.loads(called.function.arguments)
    properties = next(t["function"]["parameters"]["properties"] for t in TOOLS if t["function"]["name"] == called.function.name)
    assert arguments.keys() == properties.keys(), called
    assert all(value in properties[name]["enum"] for name, value in arguments.items()), called
    return called.function.name, arguments


def tools():
    ask = {"model": model, "messages": QUESTION, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    named = {"type": "function", "function": {"name": "spokes"}}
    for choice, names in [(named, ["spokes"]), ("required", ["torque", "spokes"])]:
        forced = {**ask, "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**forced).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
        (called,) = whole.message.tool_calls
        assert call_of(called)[0] in names and called.type == "function" and called.id
        with client.chat.completions.stream(**forced) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds, kinds
        assert streamed.finish_reason == "tool_calls" and streamed.message.content is None
        assert call_of(streamed.message.tool_calls[0]) == call_of(called)
    several = client.chat.completions.create(**{**forced, "temperature": 1, "seed": 4}, n=2)
    assert [call_of(choice.message.tool_calls[0])[0] in names for choice in several.choices] == [True, True]
    # Without a need to call, the answer is text or calls.
    for parts in (client.chat.completions.create(**ask, tool_choice="auto", stream=True), client.chat.completions.create(**ask, stream=True)):
        deltas = [choice.delta for part in parts for choice in part.choices]
        assert any(delta.content or delta.tool_calls for delta in deltas)
    # The call goes back with its result.
    messages = [*QUESTION, whole.message, {"role": "tool", "tool_call_id": called.id, "content": "5 Nm"}]
    answer = client.chat.completions.create(**{**ask, "messages": messages, "tool_choice": "none", "max_tokens": 8})
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def formats():
    schema = {"type": "json_schema", "json_schema": {"name": "bolt", "strict": True, "schema": Bolt.model_json_schema()}}
    text = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=60, response_format=schema)
    assert Bolt.model_validate_json(text.choices[0].message.content)
    parsed = client.chat.completions.parse(model=model, messages=QUESTION, max_tokens=60, response_format=Bolt)
    assert isinstance(parsed.choices[0].message.parsed, Bolt)
    # With tools, the answer is either of the format or a call.
    either = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=60, response_format=schema, tools=TOOLS, parallel_tool_calls=False
    )
    message = either.choices[0].message
    assert call_of(message.tool_calls[0]) if message.tool_calls else Bolt.model_validate_json(message.content)


def sampling():
    several = client.chat.completions.create(
        model=model, messages=QUESTION, n=3, max_tokens=6, temperature=1.2, seed=3, frequency_penalty=0.5, presence_penalty=0.5
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    token = client.post(f"{URL}/tokenize", cast_to=object, body={"prompt": "yes", "add_special_tokens": False})["tokens"][0]
    biased = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=2, temperature=0, logit_bias={str(token): 100}
    )
    assert "yes" in biased.choices[0].message.content, biased


def responses():
    ask = {"model": model, "instructions": "Be brief.", "input": "How tight is a stem bolt?", "max_output_tokens": 60,
           "temperature": 0, "extra_body": {"documents": [TORQUE]}}
    whole = client.responses.create(**ask)
    assert whole.output_text and whole.usage.output_tokens <= 60 and whole.status in ("completed", "incomplete")
    text, kinds = "", []
    for event in client.responses.create(**ask, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text and kinds[0] == "response.created", (text, whole)
    assert event.response.usage.input_tokens_details.cached_tokens > 0
    assert event.response.refrain["documents"][0]["title"] == "Torque"
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == text
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    forced = {**ask, "tools": flat, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**forced).output
    assert call.type == "function_call" and json.loads(call.arguments) and call.call_id
    with client.responses.stream(**forced) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds and streamed.arguments == call.arguments
    items = [{"role": "user", "content": ask["input"]}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "5 Nm"}]
    assert client.responses.create(**{**ask, "input": items, "tools": flat, "tool_choice": "none"}).output_text
    bolt = client.responses.parse(**ask, text_format=Bolt).output_parsed
    assert isinstance(bolt, Bolt)
    try:
        client.responses.create(**ask, previous_response_id="resp_1")
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id"
    else:
        raise AssertionError("a response that was never stored was found")


def turns():
    """A second turn over documents of some thousand tokens takes over nearly all of its prompt."""
    text = " ".join(f"Bolt {i} of the frame is tightened to {i % 40 + 2} Nm, and greased every {i % 7 + 1} years." for i in range(45))
    options = {"model": model, "max_tokens": 8, "temperature": 0, "extra_body": {"documents": [{"title": "Frame", "text": text}]}}
    first = client.chat.completions.create(messages=QUESTION, **options)
    further = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And bolt 3?"}]
    usage = client.chat.completions.create(messages=further, **options).usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens > 1000 and cached >= 0.95 * usage.prompt_tokens, usage


def errors():
    for kind, call in [
        (openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-4o", messages=QUESTION)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=QUESTION, n=0)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[])),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=QUESTION, top_p=1.5)),
        (openai.NotFoundError, lambda: client.get("/documents/doc-0", cast_to=object)),
    ]:
        try:
            call()
        except kind as error:
            assert error.body and error.body["message"], error
        else:
            raise AssertionError(f"no {kind.__name__}")
    if KEY != "none":
        stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="sk-refrain-0", max_retries=0)
        try:
            stranger.models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a stranger was let in")


def langchain():
    llm = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=model, max_tokens=8, temperature=0,
                     extra_body={"documents": [TORQUE]})
    messages = [SystemMessage("Be brief."), HumanMessage("How tight is a stem bolt?")]
    whole = llm.invoke(messages)
    assert whole.content and whole.usage_metadata["input_tokens"] > 20
    assert "".join(part.content for part in llm.stream(messages)) == whole.content
    assert [answer.content for answer in llm.batch([messages] * 3)] == [whole.content] * 3

    tools_and_schemas(ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=model, max_tokens=60, temperature=0))


def tools_and_schemas(llm):
    @tool
    def torque(bolt: Literal["stem", "seat"]) -> str:
        """Torque of a bolt."""
        return f"{bolt}: 5 Nm"

    bound = llm.bind_tools([torque], tool_choice="torque", parallel_tool_calls=False)
    answer = bound.invoke([HumanMessage("How tight is a stem bolt?")])
    (called,) = answer.tool_calls
    assert called["name"] == "torque" and called["args"]["bolt"] in ("stem", "seat"), answer
    parts = None
    for part in bound.stream([HumanMessage("How tight is a stem bolt?")]):
        parts = part if parts is None else parts + part
    assert parts.tool_calls[0]["args"] == called["args"], parts
    result = torque.invoke(called)
    assert isinstance(result, ToolMessage)
    assert llm.invoke([HumanMessage("How tight is a stem bolt?"), answer, result]).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Bolt, method=method).invoke("Which bolt?"), Bolt)


whole = chat()
for check in (lambda: stream(whole), documents, likelihoods, tools, formats, sampling, responses, turns, errors, langchain):
    check()
print("ok")
