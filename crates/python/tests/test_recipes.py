"""The recipes of `examples/python`, with the packages that they are for."""

import asyncio
import importlib
import importlib.util
import re
import sys
import threading

import pytest
import refrain
from conftest import MODEL, ROOT, skip

DOCUMENTS = ROOT / "examples/docs/drive"
QUESTION = "How far does a waxed chain run between treatments?"


def recipe(name, package):
    """A recipe's module; the test is skipped without its package."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        skip("recipes", f"{package} is not installed ({error}): make .python-recipes/installed")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/python/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(tmp_path):
    engine = refrain.Engine(MODEL, store=tmp_path / "chunks", chunk_tokens=48, method="pie")
    engine.ingest(refrain.read(DOCUMENTS))
    return engine


def check(engine, text, stats):
    """An answer equals that of the engine over the same chunks, and nothing of them was computed again."""
    expected = engine.ask(QUESTION, engine.search(QUESTION), max_tokens=8)
    assert text == expected.text
    assert stats["document_tokens"] == expected.stats["document_tokens"] > 0 == stats["recomputed_tokens"]
    assert stats["cached_tokens"] >= stats["document_tokens"]


def run(module, monkeypatch, capsys, tmp_path):
    """A recipe as a program, on a document that fits the tiny model."""
    (tmp_path / "chains.md").write_text("# Chains\n\nA waxed chain runs 300 km between treatments.")
    args = [str(tmp_path / "chains.md"), QUESTION, "--model", str(MODEL), "--store", str(tmp_path / "other"), "--max-tokens", "4"]
    monkeypatch.setattr(sys, "argv", [module.__name__, *args])
    module.main()
    assert re.search(r"\n\d+ of \d+ tokens reused, first token after", capsys.readouterr().out)


def test_langchain(engine, monkeypatch, capsys, tmp_path):
    module = recipe("langchain_rag", "langchain_core")
    from langchain_core.caches import InMemoryCache
    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    first, answer = (module.chain(engine, max_tokens=8).invoke(QUESTION) for _ in range(2))
    check(engine, answer.text, answer.response_metadata)
    # The first answer has prefilled the system part.
    read = [message.usage_metadata["input_token_details"]["cache_read"] for message in (first, answer)]
    assert 0 < read[0] < read[1] == answer.response_metadata["cached_tokens"]
    chat = module.ChatRefrain(engine=engine, max_tokens=8)
    found = module.RefrainRetriever(engine=engine).invoke(QUESTION)
    assert len(found) == 5 and found[0].metadata["score"] >= found[-1].metadata["score"]
    streamed = list(chat.stream(QUESTION, documents=found))
    assert "".join(chunk.text for chunk in streamed) == answer.text and len(streamed) > 1
    # Earlier turns, a system message, and a document that is not kept.
    turns = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hi."), HumanMessage(QUESTION)]
    longer = chat.invoke(turns, documents=[*found, Document("Wax is white.")]).response_metadata
    assert longer["prompt_tokens"] > answer.response_metadata["prompt_tokens"]
    usage = answer.usage_metadata
    assert usage["input_tokens"] == answer.response_metadata["prompt_tokens"] and usage["output_tokens"] > 0
    assert sum(streamed[1:], streamed[0]).usage_metadata == usage
    # Keywords reach the engine, and those that it does not have are refused.
    assert chat.invoke(QUESTION, documents=found, max_tokens=2).usage_metadata["output_tokens"] == 2
    with pytest.raises(TypeError, match="max_tokenz"):
        chat.invoke(QUESTION, documents=found, max_tokenz=2)
    with pytest.raises(ValueError, match="type 'tool'"):
        chat.invoke([HumanMessage("Hello."), ToolMessage("It is.", tool_call_id="1"), HumanMessage(QUESTION)])
    with pytest.raises(ValueError, match="the last message is of type 'ai'"):
        chat.invoke([HumanMessage(QUESTION), AIMessage("It")])
    # A cache tells apart what answers depend on.
    cache = InMemoryCache()
    with refrain.Engine(MODEL, store=tmp_path / "second", system="Be brief.") as second:
        chats = [
            module.ChatRefrain(engine=asked, max_tokens=most, method=method, cache=cache)
            for asked, most, method in [(engine, 2, None), (engine, 3, None), (engine, 2, "vanilla"), (second, 2, None)]
        ]
        for _ in range(2):
            stats = [chat.invoke(QUESTION).response_metadata for chat in chats]
            assert len(cache._cache) == len(chats) and stats[3]["prompt_tokens"] != stats[0]["prompt_tokens"]
    run(module, monkeypatch, capsys, tmp_path)


def test_llama_index(engine, monkeypatch, capsys, tmp_path):
    module = recipe("llama_index_rag", "llama_index.core")
    answer = module.query_engine(engine, max_tokens=8).query(QUESTION)
    check(engine, answer.response, answer.metadata)
    assert len(answer.source_nodes) == 5 and answer.source_nodes[0].text in engine.search(QUESTION)[0].text
    streamed = module.query_engine(engine, streaming=True, max_tokens=8).query(QUESTION)
    assert "".join(streamed.response_gen) == answer.response

    class RecordingEngine:
        threads = []

        def __getattr__(self, name):
            self.threads.append(threading.get_ident())
            return getattr(engine, name)

    # An event loop goes on meanwhile, since another thread computes.
    assert asyncio.run(module.query_engine(RecordingEngine(), max_tokens=8).aquery(QUESTION)).response == answer.response
    assert RecordingEngine.threads and threading.get_ident() not in RecordingEngine.threads
    run(module, monkeypatch, capsys, tmp_path)


def test_haystack(engine, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    module = recipe("haystack_rag", "haystack")
    asked = {"retriever": {"query": QUESTION}, "generator": {"query": QUESTION}}
    answer = module.pipeline(engine, max_tokens=8).run(asked)["generator"]
    check(engine, answer["replies"][0], answer["meta"][0])
    told = []
    module.pipeline(engine, streaming_callback=told.append, max_tokens=8).run(asked)
    assert "".join(chunk.content for chunk in told) == answer["replies"][0]
    run(module, monkeypatch, capsys, tmp_path)
