"""Drives a running server with the official `openai` package and a LangChain chat model.

    clients.py URL [KEY]

Ends with status 77 where one of them is not installed.
"""

import sys

try:
    import openai
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

URL, KEY = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
TORQUE = {"title": "Torque", "text": "A stem bolt is tightened to 5 Nm. Carbon bars want paste on the clamp."}
QUESTION = [{"role": "user", "content": "How tight is a stem bolt?"}]

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


def errors():
    for kind, call in [
        (openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-4o", messages=QUESTION)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=QUESTION, n=2)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[])),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=QUESTION, top_p=0)),
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


whole = chat()
for check in (lambda: stream(whole), documents, likelihoods, errors, langchain):
    check()
print("ok")
