"""Errors as exceptions and warnings."""

import errno
import os

import pytest
import refrain
from conftest import MODEL, QUESTION


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
        ({"logit_bias": {10**6: 1.0}}, ValueError, "none of id 1000000"),
        ({"top_p": 2.0}, ValueError, "top_p = 2"),
        ({"max_tokens": 0}, ValueError, "max_tokens = 0"),
        ({"top_k": -2}, ValueError, "top_k = -2"),
        ({"seed": 2**64}, ValueError, "seed: "),
        ({"stop": "a \ud800"}, ValueError, "stop: .*surrogates not allowed"),
    ],
)
def test_errors_of_keywords_name_the_keyword(engine, keywords, error, message):
    with pytest.raises(error, match=message):
        engine.ask(QUESTION, **keywords)


def test_errors_are_exceptions_with_a_remedy(engine, documents, tmp_path):
    with pytest.raises(refrain.ModelNotFound, match="known names are .*smollm2-135m"):
        refrain.Engine("no-such-model", store=tmp_path)
    with pytest.raises(refrain.ModelNotFound, match=f"hf download .* --local-dir {tmp_path} .*refrain pull smollm2-135m"):
        refrain.Engine("smollm2-135m", store=tmp_path, models=tmp_path)
    with pytest.raises(refrain.ModelNotFound, match="hf download org/name file.gguf --revision v2 "):
        refrain.Engine("hf:org/name@v2:file.gguf", store=tmp_path)
    with pytest.raises(refrain.RefrainError, match="a3"):
        engine.ask(QUESTION, documents, method="a4")
    with pytest.raises(refrain.PromptTooLong, match="the model's context is") as raised:
        engine.ask("why " * 5000, max_tokens=7)
    error = raised.value
    assert error.context == engine.context < error.prompt_tokens and error.max_tokens == 7
    with pytest.raises(ValueError, match="averaged"):
        refrain.Engine(MODEL, store=tmp_path, prefix="avergaed")
    with pytest.raises(ValueError, match="use cpu, cuda, cuda:N"):
        refrain.Engine(MODEL, store=tmp_path, device="gpu")
    with pytest.raises(refrain.RefrainError, match='cannot compute on cuda:99: .*\nhint: device="cpu" needs neither'):
        refrain.Engine(MODEL, store=tmp_path, device="cuda:99")


def test_numbers_out_of_range_name_their_argument(engine, documents, tmp_path):
    for name in ("threads", "memory", "disk", "chunk_tokens", "prefix_cache"):
        with pytest.raises(ValueError, match=f"{name} = -1 is out of range"):
            refrain.Engine(MODEL, store=tmp_path, **{name: -1})
    with pytest.raises(ValueError, match="limit = -1 is out of range"):
        engine.search(QUESTION, limit=-1)
    with pytest.raises(ValueError, match="tokens = -1 is out of range"):
        engine.compare(QUESTION, documents, ["pie"], tokens=-1)


def test_arguments_of_a_wrong_kind_are_named(engine, documents):
    engine.ingest(documents)
    with pytest.raises(ValueError, match="^tokens: "):
        engine.decode([-1])
    with pytest.raises(TypeError, match="^tokens: "):
        engine.decode("text")
    with pytest.raises(ValueError, match="^parts: "):
        engine.chunks(engine.documents()[0]["id"], [-1])
    with pytest.raises(ValueError, match="^tokens = 0 is out of range"):
        engine.compare(QUESTION, documents, ["pie"], tokens=0)
    with pytest.raises(TypeError, match="^methods is a list of methods"):
        engine.compare(QUESTION, documents, "pie")
    with pytest.raises(TypeError, match="^methods: "):
        engine.compare(QUESTION, documents, [3])


def test_texts_that_are_no_unicode_say_so(engine):
    for given in (["a \ud800"], [refrain.Document("fine"), "\udfff"]):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            engine.ask(QUESTION, given)


def test_a_file_that_cannot_be_read_is_an_exception(tmp_path):
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (tmp_path / "latin1.txt").write_bytes("Öl".encode("latin-1"))
    (tmp_path / "fine.txt").write_text("It runs.")
    for name, reason in [("broken.pdf", "well-formed PDF"), ("latin1.txt", "not UTF-8 at byte 0")]:
        with pytest.raises(refrain.RefrainError, match=f"{name}: {reason}|{name}: not a {reason}"):
            refrain.read(tmp_path / name)
    # Those of a folder are warnings.
    with pytest.warns(UserWarning) as warned:
        assert [document.text for document in refrain.read(tmp_path)] == ["It runs."]
    assert sorted(str(warning.message).split(": ")[0] for warning in warned) == [
        str(tmp_path / name) for name in ("broken.pdf", "latin1.txt")
    ]
    with pytest.raises(FileNotFoundError, match="no-such-file") as raised:
        refrain.read(tmp_path / "no-such-file")
    assert (raised.value.errno, raised.value.strerror) == (errno.ENOENT, os.strerror(errno.ENOENT))
    assert raised.value.filename == str(tmp_path / "no-such-file")


def test_what_is_not_stored_or_shared_is_a_warning(tmp_path, documents, monkeypatch):
    # Folders of chunks are named by two digits: a file of each such name leaves no place for one.
    (tmp_path / "full").mkdir()
    for name in range(256):
        (tmp_path / f"full/{name:02x}").touch()
    with refrain.Engine(MODEL, store=tmp_path / "full") as engine:
        with pytest.warns(UserWarning, match="not all chunks are in the store"):
            assert engine.ingest(documents)["not_stored"]
        engine.flush()
    # Nothing listens at the port of discarded bytes.
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with refrain.Engine(MODEL, store=tmp_path / "chunks", remote="s3://bucket/chunks") as engine:
        with pytest.warns(UserWarning, match="other machines do not find yet: 3"):
            assert engine.ingest(documents)["unpublished"] == 3
        with pytest.raises(refrain.RefrainError, match="not in the object store yet: 3"):
            engine.flush()
