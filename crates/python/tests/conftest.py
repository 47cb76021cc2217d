"""The repository's tiny model, with a store of its own, and documents."""

import os
from pathlib import Path

import pytest
import refrain

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests/golden/tiny/llama"
MODELS = Path(os.environ.get("REFRAIN_MODELS") or Path.home() / ".cache/refrain/models")
QUESTION = "How far does bearing 2 run?"
# Variables that say how tests run; the others are the tester's own, as that of a store with documents.
KEPT = {"REFRAIN_MODELS", "REFRAIN_CPU", "REFRAIN_TEST_ALL"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of the test's own: no configuration, an empty store."""
    for name in [name for name in os.environ if name.startswith("REFRAIN_") and name not in KEPT]:
        monkeypatch.delenv(name)
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def skip(need, why):
    """Skips the running test for want of `need`, or fails it where REFRAIN_TEST_ALL, a list with commas, names that."""
    end = pytest.fail if need in os.environ.get("REFRAIN_TEST_ALL", "").split(",") else pytest.skip
    end(why)


def smollm2():
    """The file of SmolLM2; the test is skipped where it was not fetched."""
    found = sorted(MODELS.glob("SmolLM2-135M-Instruct*.gguf"))
    return found[0] if found else skip("smollm2", f"SmolLM2 is not in {MODELS}; run: refrain pull smollm2-135m")


@pytest.fixture
def engine(tmp_path):
    return refrain.Engine(MODEL, store=tmp_path / "chunks")


@pytest.fixture
def documents():
    text = "Bearing {} runs {} km before it is greased again. "
    return [refrain.Document(text.format(i, 100 * i), title=f"Bearing {i}") for i in range(1, 4)]
