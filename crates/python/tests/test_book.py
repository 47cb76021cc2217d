"""The Python of the book's chapter and of the READMEs runs as it stands there."""

import re
import shutil

import pytest
import refrain
from conftest import MODELS, ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["docs/book/src/python.md", "crates/python/README.md", "README.md"])
def test_blocks_run(name, tmp_path, monkeypatch, capsys):
    if not any(MODELS.glob("SmolLM2-135M-Instruct*")):
        pytest.skip(f"SmolLM2 is not in {MODELS}; run: refrain pull smollm2-135m")
    shutil.copytree(ROOT / "examples/docs", tmp_path / "examples/docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFRAIN_MODELS", str(MODELS))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "README.md":
        text = text.split("\n## In a program\n")[1].split("\n## ")[0]
    blocks = BLOCK.findall(text)
    assert blocks
    names = {"refrain": refrain}
    for block in blocks:
        exec(compile(block, name, "exec"), names)  # noqa: S102
        assert capsys.readouterr().out.strip() or "print" not in block
    assert names["engine"].context > 0
