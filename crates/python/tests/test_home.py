"""Tests leave the tester's own store and configuration alone."""

import os
import subprocess
import sys

import refrain
from conftest import MODEL


def test_an_engine_keeps_chunks_in_the_home_of_its_test(tmp_path, documents):
    with refrain.Engine(MODEL) as engine:
        engine.ingest(documents)
    assert any((tmp_path / "XDG_DATA_HOME").rglob("*.safetensors"))


def test_a_store_that_the_tester_names_is_not_used(tmp_path):
    store, inner = tmp_path / "store", f"{__file__}::test_an_engine_keeps_chunks_in_the_home_of_its_test"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, "REFRAIN_STORE": str(store)})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not store.exists()
