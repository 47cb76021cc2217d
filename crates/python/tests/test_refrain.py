"""The module, used as a program would use it: on the repository's tiny model, with a store of its own."""

import copy
import pickle
import subprocess
import sys
import time
import weakref
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import refrain
from conftest import MODEL, QUESTION, ROOT, smollm2

OTHER_TOKENIZER = ROOT / "tests/golden/tiny/phi3"


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
    # A chunk that is prefilled for a question was not reused.
    for prefilled in (1, 0):
        stats = engine.ask(QUESTION, [*documents, "Bearing 9 is new."], method="pie", max_tokens=2).stats
        assert (stats["prefilled_chunks"], stats["prefilled_tokens"] > 0) == (prefilled, prefilled > 0)


def test_the_time_between_two_tokens_is_the_readers(engine, documents):
    stream = engine.stream(QUESTION, documents, max_tokens=3, ignore_eos=True)
    for _token in stream:
        time.sleep(0.1)
    assert stream.answer.stats["tpot"] < 0.1


def test_blank_documents_are_left_out(engine):
    assert engine.ingest(["", " \n", refrain.Document("\t", title="Blank")])["documents"] == 0
    assert engine.documents() == []
    assert engine.ingest(["", "Bearing 4 runs."])["documents"] == 1
    assert len(engine.documents()) == 1


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
    for wrong in ("one text", documents[0], [3]):
        with pytest.raises(TypeError):
            engine.ask(QUESTION, wrong)


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
        report = engine.ingest(documents)
        assert report["computed"] > 0 == report["unpublished"]
        engine.flush()
        with pytest.raises(ValueError, match="timeout: "):
            engine.flush(timeout=-1)
    sent = [path for path in (tmp_path / "shared").rglob("*.safetensors") if path.is_file()]
    assert len(sent) == report["chunks"]
    # What another machine has ingested or removed is found by a search some seconds later, and at once after flush.
    with opened("other") as other:
        found = other.search(QUESTION, limit=1)
        with opened("one") as engine:
            engine.ingest(["Bearing 9 is new."])
            engine.flush()
            other.flush()
            assert len(other.documents()) == len(documents) + 1
            engine.remove(found[0].document)
        other.flush()
        assert found[0].document not in {document["id"] for document in other.documents()}
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
        assert same.ask(QUESTION, found, max_tokens=1).tokens and same.fingerprint == engine.fingerprint
    with refrain.Engine(OTHER_TOKENIZER, store=tmp_path / "other") as other:
        assert len(other.fingerprint) == 64 and other.fingerprint != engine.fingerprint
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


def test_answers_are_values(engine, documents):
    answer = engine.ask(QUESTION, documents, max_tokens=3, logprobs=2, temperature=0.7)
    for same in [copy.copy(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))]:  # noqa: S301
        assert same == answer and hash(same) == hash(answer)
        assert (same.text, same.tokens, same.logprobs) == (answer.text, answer.tokens, answer.logprobs)
        assert (same.finish_reason, same.stats, same.seed) == (answer.finish_reason, answer.stats, answer.seed)
    assert answer != engine.ask(QUESTION, documents, max_tokens=2)


def test_what_is_freed_leaves_its_weak_references(engine, documents):
    engine.ingest(documents)
    stream, answer = engine.stream(QUESTION, max_tokens=1), engine.ask(QUESTION, max_tokens=1)
    weak = [weakref.ref(of) for of in (engine, stream, answer, documents[0], engine.search(QUESTION)[0])]
    assert [of() is None for of in weak] == [False] * 4 + [True]
    del stream, answer
    assert [of() is None for of in weak] == [False, True, True, False, True]


def test_a_stream_ends_with_its_block(engine, documents):
    with engine.stream(QUESTION, documents, max_tokens=4, ignore_eos=True) as stream:
        assert next(stream).id is not None
    assert list(stream) == [] and stream.answer is None


def test_a_seed_is_drawn_where_tokens_are_sampled_without_one(engine, documents):
    def ask(**keywords):
        return engine.ask(QUESTION, documents, max_tokens=16, ignore_eos=True, **keywords)

    answers = [ask(temperature=1.5) for _ in range(4)]
    assert len({answer.seed for answer in answers}) == 4 and len({tuple(answer.tokens) for answer in answers}) > 1
    assert ask(temperature=1.5, seed=answers[0].seed).tokens == answers[0].tokens
    assert ask(temperature=1.5, seed=None).seed != ask(seed=None, temperature=1.5).seed
    negative = ask(temperature=1.5, seed=-2)
    assert negative.seed == 2**64 - 2 and ask(temperature=1.5, seed=2**64 - 2).tokens == negative.tokens
    assert ask(temperature=1.5, seed=-1).seed < 2**32, "-1 draws a seed"
    assert ask(seed=3).seed is ask().seed is None, "the likeliest tokens are taken"
    # The conventions of the server: 0 keeps the likeliest token alone, -1 keeps all.
    assert ask(temperature=1.5, top_p=0).tokens == ask().tokens
    assert ask(temperature=1.5, seed=5, top_k=-1).tokens == ask(temperature=1.5, seed=5).tokens


@pytest.mark.parametrize("keep", [True, False])
def test_packed_weights_are_kept_beside_the_model(keep, tmp_path):
    (tmp_path / "model.gguf").symlink_to(smollm2())
    with refrain.Engine(tmp_path / "model.gguf", store=tmp_path / "chunks", **({} if keep else {"keep_packed": False})):
        assert [path.suffix for path in tmp_path.glob("model.gguf.*")] == [".packed"] * keep


def test_generate_answers_a_text_as_it_is(engine, documents):
    asked, generated = (work("Tell a story.", documents, max_tokens=4) for work in (engine.ask, engine.generate))
    assert asked.stats["prompt_tokens"] > generated.stats["prompt_tokens"]


def test_what_is_known_is_listed():
    assert {model["name"] for model in refrain.models()} >= {"smollm2-135m", "qwen2.5-coder-0.5b"}
    assert {method["name"] for method in refrain.methods()} >= {"vanilla", "a3", "drift"}
    assert {policy["name"] for policy in refrain.policies()} >= {"full", "morph_kv"}
    assert refrain.__version__ and refrain.__doc__.startswith("Answers from documents")
    addresses = [model["address"] for model in refrain.models()]
    assert all(address.startswith("hf:") and address.endswith(".gguf") for address in addresses)


def test_the_wheel_has_its_licences():
    try:
        files = distribution("refrain").files
    except PackageNotFoundError:
        pytest.skip("the module is installed from no wheel: make wheel")
    names = {file.name for file in files if "licenses" in file.parts}
    assert names == {"LICENSE-APACHE", "LICENSE-MIT", "NOTICE-THIRD-PARTY.txt"}


def test_the_stub_is_of_this_module(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: make .python-tests/installed")
    # The extension module within the package has no stub of its own.
    (tmp_path / "allowed").write_text("refrain\\.refrain\n")
    words = [sys.executable, "-m", "mypy.stubtest", "refrain", "--allowlist", str(tmp_path / "allowed")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_stub_is_for_every_version_and_takes_what_the_module_takes(tmp_path, engine, documents):
    pytest.importorskip("mypy", reason="mypy is not installed: make .python-tests/installed")
    program = """
import refrain
def work(engine: refrain.Engine, documents: list[refrain.Document]) -> None:
    turns = ({"role": "user", "content": "Is it greased?"}, {"role": "assistant", "content": "It is."})
    engine.ask("why", tuple(documents), stop=("a", "b"), history=turns, max_tokens=1)
    engine.ask("why", choice=("yes", "no"), max_tokens=1)
    engine.compare("why", documents, ("vanilla", "pie"), tokens=1)
    engine.decode(tuple(engine.encode("why")))
    with engine.stream("why", max_tokens=1) as stream:
        list(stream)
def wrong(engine: refrain.Engine) -> None:
    engine.ask("why", max_token=1)  # type: ignore[call-arg]
"""
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.10", "program.py"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = {}
    exec(program, names)  # noqa: S102
    names["work"](engine, documents)


def test_the_store_is_that_of_the_programs_variable(tmp_path, monkeypatch, documents):
    monkeypatch.setenv("REFRAIN_STORE", str(tmp_path / "named"))
    with refrain.Engine(MODEL) as engine:
        assert engine.ingest(documents)["computed"] > 0
    with refrain.Engine(MODEL, store=tmp_path / "named") as engine:
        assert engine.ingest(documents)["computed"] == 0


def test_chunks_are_stored_in_the_type_that_is_asked_for(tmp_path, documents):
    def size(name, **options):
        with refrain.Engine(MODEL, store=tmp_path / name, **options) as engine:
            engine.ingest(documents)
        return sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors"))

    assert 0 < size("q8", store_dtype="q8") < 0.8 * size("exact")
    with pytest.raises(ValueError, match="q9"):
        refrain.Engine(MODEL, store=tmp_path / "q9", store_dtype="q9")
