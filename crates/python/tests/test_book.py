"""The Python of the book's chapter and of the READMEs runs as it stands there."""

import re
import shutil

import pytest
import refrain
from conftest import MODELS, ROOT, smollm2

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["docs/book/src/python.md", "crates/python/README.md", "README.md"])
def test_blocks_run(name, tmp_path, monkeypatch, capsys):
    smollm2()
    shutil.copytree(ROOT / "examples/docs", tmp_path / "examples/docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFRAIN_MODELS", str(MODELS))
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
