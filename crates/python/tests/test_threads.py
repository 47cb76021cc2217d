"""Threads, signals and processes beside an engine."""

import _thread
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import refrain
from conftest import MODEL, MODELS, QUESTION, smollm2

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
    smollm2()
    program = f"""
import _thread, refrain, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
engine = refrain.Engine("smollm2-135m", store={str(tmp_path)!r}, models={str(MODELS)!r}, prefix="none")
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


def test_the_interpreter_is_asked_for_at_intervals_and_not_after_each_step(engine, documents):
    """Signals are handled when the interpreter is asked for: their handler counts how often that is."""
    handled = []
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        for work in (
            lambda: engine.ask(QUESTION, documents, max_tokens=200, ignore_eos=True),
            lambda: engine.ingest([f"{LONG[:3000]} {index}" for index in range(8)]),
        ):
            began = time.monotonic()
            work()
            ended = time.monotonic()
            within = [at for at in handled if began < at < ended]
            # Steps go on for 50 ms before the interpreter is asked for again; some more calls stand before and behind them. Steps are hundreds.
            assert len(within) <= (ended - began) / 0.05 + 40
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("work", [refrain.read, partial(refrain.Engine, str(MODEL))], ids=["read", "open"])
def test_ctrl_c_ends_reading_and_opening(work, tmp_path):
    (tmp_path / "bearing.txt").write_text("It runs.")

    def interrupt(*_):
        raise KeyboardInterrupt

    done = []
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # The interpreter looks for no signal between the two calls, nor before it keeps the second one's result.
        calls = [partial(_thread.interrupt_main, signal.SIGALRM), partial(work, str(tmp_path))]
        with pytest.raises(KeyboardInterrupt):
            done.extend(map(partial.__call__, calls))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == [None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_is_told_to_open_an_engine_of_its_own(engine, documents, tmp_path):
    engine.ingest(documents)
    stream = engine.stream(QUESTION, documents, max_tokens=4)
    next(stream)

    def forked():
        told = []
        works = [lambda: engine.ingest(documents), lambda: engine.search(QUESTION), lambda: engine.ask(QUESTION), lambda: next(stream)]
        for work in works:
            try:
                work()
            except refrain.RefrainError as error:
                told.append(str(error))
        stream.close()
        engine.close()
        with refrain.Engine(MODEL, store=tmp_path / "own") as own:
            own.ingest(documents)
            told.append(own.ask(QUESTION, documents, max_tokens=1).finish_reason)
        return told

    with multiprocessing.get_context("fork").Pool(1, initializer=FORKED.append, initargs=[forked]) as pool:
        told = pool.apply_async(call_forked).get(timeout=60)
    assert len(told) == 5 and all("before the process was forked" in text for text in told[:4])
    # The engine is whole in this process.
    assert len(list(stream)) > 0 and engine.ask(QUESTION, documents, max_tokens=1).tokens


FORKED = []


def call_forked():
    return FORKED[0]()


def test_a_relative_store_stays_where_it_was_opened(tmp_path, documents, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with refrain.Engine(MODEL, store="chunks") as engine:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert engine.ingest(documents)["not_stored"] is None
        assert engine.search(QUESTION)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with refrain.Engine(MODEL, store=tmp_path / "chunks") as engine:
        assert engine.ingest(documents)["computed"] == 0 < len(engine.search(QUESTION))
