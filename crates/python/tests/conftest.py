"""The repository's tiny model, with a store of its own, and documents."""

import os
from pathlib import Path

import pytest
import refrain

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests/golden/tiny/llama"
MODELS = Path(os.environ.get("REFRAIN_MODELS") or Path.home() / ".cache/refrain/models")
QUESTION = "How far does bearing 2 run?"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return refrain.Engine(MODEL, store=tmp_path / "chunks")


@pytest.fixture
def documents():
    text = "Bearing {} runs {} km before it is greased again. "
    return [refrain.Document(text.format(i, 100 * i), title=f"Bearing {i}") for i in range(1, 4)]
