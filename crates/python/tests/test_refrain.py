"""The module, used as a program would use it: on the repository's tiny model, with a store of its own."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import refrain

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests/golden/tiny/llama"
OTHER_TOKENIZER = ROOT / "tests/golden/tiny/phi3"
QUESTION = "How far does bearing 2 run?"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return refrain.Engine(MODEL, store=tmp_path / "chunks")


@pytest.fixture
def documents():
    text = "Bearing {} runs {} km before it is greased again. "
    return [refrain.Document(text.format(i, 100 * i), title=f"Bearing {i}") for i in range(1, 4)]


def test_a_stream_is_the_whole_answer(engine, documents):
    answer = engine.ask(QUESTION, documents, method="a3:ratio=0.4", max_tokens=12)
    stream = engine.stream(QUESTION, documents, method="a3:ratio=0.4", max_tokens=12)
    assert stream.answer is None
    tokens = list(stream)
    assert "".join(token.text for token in tokens) == answer.text == str(answer)
    ids = [token.id for token in tokens if token.id is not None]
    assert ids == answer.tokens[: len(ids)] and len(answer.tokens) - len(ids) == (answer.finish_reason == "stop")
    assert stream.answer.tokens == answer.tokens
    assert answer.finish_reason in ("stop", "length")
    assert 0 < answer.stats["charged_ratio"] < 1


def test_a_model_without_thoughts_answers_the_same(engine, documents):
    answers = [engine.ask(QUESTION, documents, max_tokens=4, thinking=thinking).text for thinking in (False, True)]
    assert answers[0] == answers[1]


def test_ingested_documents_are_reused(engine, documents):
    told = []
    report = engine.ingest(documents, progress=lambda done, total: told.append((done, total)))
    assert report["documents"] == 3 and report["computed"] > 0
    assert told[-1][0] == told[-1][1]
    assert engine.ingest(documents)["computed"] == 0
    stats = engine.ask(QUESTION, documents, method="pie", max_tokens=2).stats
    assert stats["cached_tokens"] >= stats["document_tokens"] > 0 == stats["recomputed_tokens"]


def test_a_search_finds_chunks_that_are_reused(engine, documents, tmp_path):
    assert engine.search(QUESTION) == []
    engine.ingest(documents)
    found = engine.search("How far does bearing 2 run? 200 km", limit=2)
    assert len(found) == 2 and found[0].score >= found[1].score > 0
    first = found[0]
    assert (first.title, first.part, first.of) == ("Bearing 2", 0, 1)
    assert first.text.split("\n") == ["Bearing 2", documents[1].text.strip(), "", ""], "a chunk begins with its headings"
    assert 0 < len(first) < 64 and first.document.startswith("doc-")
    stats = engine.ask(QUESTION, found, method="pie", max_tokens=2).stats
    assert stats["document_tokens"] == sum(map(len, found)) > 0 == stats["recomputed_tokens"]
    # Chunks, documents and texts stand beside each other.
    mixed = engine.ask(QUESTION, [first, documents[0], "Bearing 9 is new."], method="pie", max_tokens=2).stats
    assert mixed["document_tokens"] > stats["document_tokens"]
    # A program keeps id and part, and asks for the chunk again.
    again = engine.chunks(first.document, [first.part])
    assert [(chunk.text, len(chunk)) for chunk in again] == [(first.text, len(first))]
    assert len(engine.chunks(first.document)) == first.of
    # Ingested documents are listed; a removed one is not found any more.
    listed = engine.documents()
    assert {document["title"] for document in listed} >= {"Bearing 2"}
    assert first.document in {document["id"] for document in listed}
    last = engine.search("How far does bearing 1 run?", limit=1)[0]
    engine.remove(last.document)
    assert last.document not in {document["id"] for document in engine.documents()}
    assert last.document not in {chunk.document for chunk in engine.search("How far does bearing 1 run?", limit=50)}
    with pytest.raises(refrain.RefrainError, match="no document"):
        engine.remove(last.document)
    with pytest.raises(refrain.RefrainError, match="has no part 7"):
        engine.chunks(first.document, [7])
    with pytest.raises(refrain.RefrainError, match="no document"):
        engine.chunks("doc-none")
    with pytest.raises(TypeError, match="prefilled already"):
        engine.ingest(found)
    # One engine at a time has the documents; another says so, and still ingests.
    other = refrain.Engine(MODEL, store=tmp_path / "chunks")
    with pytest.raises(refrain.RefrainError, match="another engine of this one"):
        other.search(QUESTION)
    with pytest.warns(UserWarning, match="search does not find"):
        assert other.ingest(documents)["computed"] == 1, "the chunk of the removed document"


def test_earlier_turns_stand_before_the_question(engine, documents):
    turns = [{"role": "user", "content": "Is it greased?"}, {"role": "assistant", "content": "It is."}]
    alone = engine.ask(QUESTION, documents, max_tokens=1).stats["prompt_tokens"]
    assert engine.ask(QUESTION, documents, history=turns, max_tokens=1).stats["prompt_tokens"] > alone
    with pytest.raises(ValueError, match="history: turn 1 has no 'content'"):
        engine.ask(QUESTION, documents, history=[turns[0], {"role": "user"}])


def test_a_method_of_whole_documents_gets_all_chunks(tmp_path):
    engine = refrain.Engine(MODEL, store=tmp_path / "chunks", chunk_tokens=32)
    text = " ".join(f"Bearing {i} runs {i}00 km." for i in range(1, 12))
    engine.ingest([refrain.Document(text, title="Bearings")], method="sam_kv")
    whole = engine.search("bearing 7", limit=1, method="sam_kv")
    assert len(whole) == whole[0].of > 1 == len(engine.search("bearing 7", limit=1, method="pie"))
    assert sum(chunk.score is not None for chunk in whole) == 1
    assert engine.ask("bearing 7", whole, method="sam_kv", max_tokens=2).tokens


def test_texts_and_files_are_documents(engine, documents, tmp_path):
    (tmp_path / "bearing.md").write_text("# Bearing\n\nIt runs.")
    assert refrain.read(tmp_path / "bearing.md")[0].text.endswith("It runs.")
    texts = [document.text for document in documents]
    assert engine.ask(QUESTION, texts, max_tokens=4).stats["document_tokens"] > 0
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        refrain.read(tmp_path / "no-such-file")
    for wrong in ("one text", documents[0], [3]):
        with pytest.raises(TypeError):
            engine.ask(QUESTION, wrong)


def test_files_that_cannot_be_read_are_warnings(tmp_path):
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (tmp_path / "fine.txt").write_text("It runs.")
    with pytest.warns(UserWarning, match="broken.pdf"):
        assert [document.text for document in refrain.read(tmp_path)] == ["It runs."]


def test_methods_are_compared(engine, documents):
    rows = engine.compare(QUESTION, documents, ["vanilla", "pie", "a3:ratio=1"], tokens=6)
    assert [row["method"] for row in rows] == ["vanilla", "pie", "a3:ratio=1"]
    assert rows[0]["kl"] == 0 and rows[1]["kl"] > rows[2]["kl"]
    auto = engine.compare(QUESTION, documents, ["auto"], tokens=2)[0]
    assert auto["method"] == "auto" and auto["stats"]["cached_tokens"] > 0


def test_keywords_reach_the_answer(engine, documents):
    def ask(**keywords):
        return engine.ask(QUESTION, documents, **keywords)

    assert len(ask(max_tokens=3, ignore_eos=True).tokens) == 3
    assert ask(temperature=1.5, seed=1, max_tokens=16).tokens != ask(temperature=1.5, seed=2, max_tokens=16).tokens
    assert ask(choice=["yes", "no"], max_tokens=16).text in ("yes", "no")
    assert ask(regex="[0-9]{3} km", max_tokens=16).text.endswith(" km")
    whole = ask(max_tokens=12).text
    assert len(ask(max_tokens=12, stop=whole[2:5]).text) < len(whole)
    capped = ask(evict="streaming_llm:capacity=32", max_tokens=8).stats
    assert capped["retained_tokens"] < capped["prompt_tokens"]
    assert ask(json_object=True, max_tokens=16).text.startswith("{")
    assert ask(grammar='start: "oil" | "wax"', max_tokens=16).text in ("oil", "wax")
    first = ask(max_tokens=1).tokens[0]
    assert ask(max_tokens=1, logit_bias={first: -100.0}).tokens[0] != first


def test_a_keyword_that_is_none_stands_for_its_default(engine, documents):
    names = ["temperature", "top_k", "seed", "stop", "logprobs", "logit_bias", "history", "thinking", "json_object"]
    names += ["json_schema", "regex", "choice", "grammar", "ignore_eos", "min_tokens", "speculative_tokens"]
    plain = engine.ask(QUESTION, documents, max_tokens=8)
    assert engine.ask(QUESTION, documents, max_tokens=8, **dict.fromkeys(names)).tokens == plain.tokens
    assert engine.ask(QUESTION, documents, max_tokens=8, choice=["yes"], regex=None).text == "yes"


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"max_token": 3}, TypeError, "max_token: there is no such keyword"),
        ({"max_token": None}, TypeError, "max_token: there is no such keyword"),
        ({"max_tokens": "three"}, TypeError, "max_tokens: "),
        ({"max_tokens": -3}, ValueError, "max_tokens: "),
        ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias: "),
        ({"stop": 3}, TypeError, "stop: "),
        ({"choice": "yes"}, TypeError, "choice: "),
        ({"json_schema": {"const": float("nan")}}, ValueError, "json_schema: .*JSON"),
        ({"json_schema": {}, "regex": "a"}, TypeError, "json_schema and regex exclude one another"),
        ({"choice": ["a"], "json_object": True}, TypeError, "choice and json_object exclude one another"),
        ({"logit_bias": {10**6: 1.0}}, refrain.RefrainError, "none of id 1000000"),
        ({"top_p": 2.0}, refrain.RefrainError, "top_p = 2"),
    ],
)
def test_errors_of_keywords_name_the_keyword(engine, keywords, error, message):
    with pytest.raises(error, match=message):
        engine.ask(QUESTION, **keywords)


def test_log_probabilities_are_of_the_answer_and_of_its_tokens(engine, documents):
    stream = engine.stream(QUESTION, documents, max_tokens=6, ignore_eos=True, logprobs=2)
    tokens = [token for token in stream if token.id is not None]
    assert [token.logprobs for token in tokens] == stream.answer.logprobs
    for token in tokens:
        (likeliest, logprob), (_, second) = token.logprobs.top
        assert (token.id, token.logprobs.logprob) == (likeliest, logprob) and 0 >= logprob >= second
    assert engine.ask(QUESTION, documents, max_tokens=6, ignore_eos=True, logprobs=2).logprobs == stream.answer.logprobs
    assert engine.ask(QUESTION, documents, max_tokens=2).logprobs == []


def test_a_prefix_cache_keeps_prompts_that_begin_alike(tmp_path, documents):
    with refrain.Engine(MODEL, store=tmp_path / "chunks", prefix_cache=1 << 24) as engine:
        computed, taken = (engine.ask(QUESTION, documents, method="vanilla", max_tokens=4) for _ in range(2))
    assert taken.tokens == computed.tokens
    assert computed.stats["prefix_tokens"] == 0 < taken.stats["prefix_tokens"]


def test_machines_share_chunks_by_an_object_store(tmp_path, documents):
    def opened(name):
        return refrain.Engine(MODEL, store=tmp_path / name, remote=f"file://{tmp_path}/shared")

    (tmp_path / "shared").mkdir()
    with opened("one") as engine:
        assert engine.ingest(documents)["computed"] > 0
        deadline = time.monotonic() + 30
        while not any((tmp_path / "shared").rglob("*")) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert any((tmp_path / "shared").rglob("*"))
    with pytest.raises(refrain.RefrainError, match="nowhere"):
        refrain.Engine(MODEL, store=tmp_path / "two", remote="nowhere://chunks")


def test_texts_are_encoded_and_decoded(engine):
    tokens = engine.encode("A waxed chain <s>.")
    assert engine.decode(tokens) == "A waxed chain <s>." and len(tokens) == engine.count_tokens("A waxed chain <s>.")


def test_a_closed_engine_is_free_and_says_so(tmp_path, documents):
    with refrain.Engine(MODEL, store=tmp_path / "chunks") as engine:
        engine.ingest(documents)
        assert engine.search(QUESTION)
        stream = engine.stream(QUESTION, documents, max_tokens=4, ignore_eos=True)
    for use in [lambda: engine.ask(QUESTION), lambda: engine.context, lambda: engine.search(QUESTION)]:
        with pytest.raises(ValueError, match="the engine is closed"):
            use()
    engine.close()
    assert repr(engine) == "Engine(closed)"
    # What is under way goes on, and the documents are free for another engine.
    assert next(stream).id is not None
    with refrain.Engine(MODEL, store=tmp_path / "chunks") as other:
        assert other.search(QUESTION)
    stream.close()
    assert list(stream) == [] and stream.answer is None


def test_chunks_of_another_tokenizer_are_refused(engine, documents, tmp_path):
    engine.ingest(documents)
    found = engine.search(QUESTION)
    with refrain.Engine(MODEL, store=tmp_path / "same", chunk_tokens=64) as same:
        assert same.ask(QUESTION, found, max_tokens=1).tokens
    with refrain.Engine(OTHER_TOKENIZER, store=tmp_path / "other") as other:
        with pytest.raises(ValueError, match="the chunk 'Bearing .' is of an engine with another tokenizer"):
            other.ask(QUESTION, found, max_tokens=1)


def test_documents_and_chunks_are_values(engine, documents):
    document = documents[0]
    for same in [copy.copy(document), copy.deepcopy(document), pickle.loads(pickle.dumps(document))]:  # noqa: S301
        assert same == document and hash(same) == hash(document)
    assert len({document, *documents}) == 3
    assert repr(refrain.Document("a", title="It's")) == """Document(title="It's", 1 characters)"""
    engine.ingest(documents)
    one, two = (engine.search(QUESTION, limit=1)[0] for _ in range(2))
    assert one == two == copy.deepcopy(one) and len({one, two}) == 1
    assert repr(one).startswith("Chunk('Bearing 2', score=")


def test_generate_answers_a_text_as_it_is(engine, documents):
    asked, generated = (work("Tell a story.", documents, max_tokens=4) for work in (engine.ask, engine.generate))
    assert asked.stats["prompt_tokens"] > generated.stats["prompt_tokens"]


def test_errors_are_exceptions_with_a_remedy(engine, documents, tmp_path):
    with pytest.raises(refrain.ModelNotFound, match="known names are .*smollm2-135m"):
        refrain.Engine("no-such-model", store=tmp_path)
    with pytest.raises(refrain.ModelNotFound, match=f"hf download .* --local-dir {tmp_path} .*refrain pull smollm2-135m"):
        refrain.Engine("smollm2-135m", store=tmp_path, models=tmp_path)
    with pytest.raises(refrain.ModelNotFound, match="hf download org/name file.gguf --revision v2 "):
        refrain.Engine("hf:org/name@v2:file.gguf", store=tmp_path)
    with pytest.raises(refrain.RefrainError, match="a3"):
        engine.ask(QUESTION, documents, method="a4")
    with pytest.raises(refrain.RefrainError):
        engine.ask("why " * 5000)
    with pytest.raises(ValueError, match="averaged"):
        refrain.Engine(MODEL, store=tmp_path, prefix="avergaed")
    with pytest.raises(ValueError, match="use cpu, cuda, cuda:N"):
        refrain.Engine(MODEL, store=tmp_path, device="gpu")
    with pytest.raises(refrain.RefrainError, match='cannot compute on cuda:99: .*\nhint: device="cpu" needs neither'):
        refrain.Engine(MODEL, store=tmp_path, device="cuda:99")


LONG = "Bearing 2 runs 200 km before it is greased again. " * 3000


@pytest.mark.parametrize(
    "work",
    [
        lambda engine: engine.ask(QUESTION, ["It runs."], method="vanilla", max_tokens=150, ignore_eos=True),
        lambda engine: engine.count_tokens(LONG),
        lambda engine: engine.decode(list(range(3, 200)) * 5000),
        lambda engine: engine.ask("", [LONG]),
    ],
    ids=["answer", "count_tokens", "decode", "documents"],
)
def test_other_threads_run_while_it_computes(engine, work):
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        began = time.monotonic()
        with contextlib.suppress(refrain.RefrainError):
            work(engine)
        ended = time.monotonic()
    finally:
        done.set()
        ticker.join()
    within = [at for at in ticks if began < at < ended]
    # The interpreter's own switches come every 5 ms at best; a held lock would leave the ticks of the beginning only.
    assert len(within) > 10 and within[-1] - began > (ended - began) / 2


def test_threads_share_an_engine(engine, documents):
    expected = engine.ask(QUESTION, documents, max_tokens=8).tokens
    answers = []
    asking = [
        threading.Thread(target=lambda: answers.append(engine.ask(QUESTION, documents, max_tokens=8).tokens))
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert answers == [expected] * 4


def test_ctrl_c_ends_an_answer(tmp_path):
    program = f"""
import _thread, refrain, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with SIGINT ignored
engine = refrain.Engine({str(MODEL)!r}, store={str(tmp_path)!r})
threading.Timer(0.3, _thread.interrupt_main).start()
while True:
    engine.ask("why", max_tokens=64, ignore_eos=True)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    "work",
    [
        'engine.ask("why", [text], method="vanilla", max_tokens=1)',
        'engine.ask("why", [text], method="pie", max_tokens=1)',
        'next(engine.stream("why", [text], method="pie"))',
        'engine.compare("why", [text], ["pie"], tokens=1)',
    ],
    ids=["prompt", "missing documents", "stream", "compare"],
)
def test_ctrl_c_ends_a_prefill_after_a_layer(work, tmp_path):
    models = Path(os.environ.get("REFRAIN_MODELS") or Path.home() / ".cache/refrain/models")
    if not any(models.glob("SmolLM2-135M-Instruct*")):
        pytest.skip(f"SmolLM2 is not in {models}; run: refrain pull smollm2-135m")
    program = f"""
import _thread, refrain, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = refrain.Engine("smollm2-135m", store={str(tmp_path)!r}, models={str(models)!r}, prefix="none")
text = " ".join(f"Bearing {{n}} runs 200 km before it is greased again." for n in range(300))
threading.Timer(1.0, _thread.interrupt_main).start()
began = time.monotonic()
try:
    {work}
except KeyboardInterrupt:
    print(time.monotonic() - began)
"""
    # Portable kernels take a quarter of a minute and more for all of it, also where a processor's own take less than a second.
    environment = {**os.environ, "REFRAIN_CPU": "portable"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.stdout and 0.9 < float(ran.stdout) < 8, ran.stdout + ran.stderr


def test_what_is_known_is_listed():
    assert {model["name"] for model in refrain.models()} >= {"smollm2-135m", "qwen2.5-coder-0.5b"}
    assert {method["name"] for method in refrain.methods()} >= {"vanilla", "a3", "drift"}
    assert {policy["name"] for policy in refrain.policies()} >= {"full", "morph_kv"}
    assert refrain.__version__ and refrain.__doc__.startswith("Answers from documents")
    addresses = [model["address"] for model in refrain.models()]
    assert all(address.startswith("hf:") and address.endswith(".gguf") for address in addresses)


def test_the_stub_is_of_this_module(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: make .python-tests/installed")
    # The extension module within the package has no stub of its own.
    (tmp_path / "allowed").write_text("refrain\\.refrain\n")
    words = [sys.executable, "-m", "mypy.stubtest", "refrain", "--allowlist", str(tmp_path / "allowed")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
