"""Tests of tools/demo: answers are judged by words, and a wrong one fails the demo."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
TOOL = Path(__file__).resolve().parent / "demo"
LOADER = importlib.machinery.SourceFileLoader("demo", str(TOOL))
demo = importlib.util.module_from_spec(importlib.util.spec_from_loader("demo", LOADER))
LOADER.exec_module(demo)

FAKE = """#!/usr/bin/env python3
import json
row = lambda method, speedup: {"method": method, "speedup": speedup, "kl": 0.0, "stats": {"ttft": 0.1, "charged_ratio": 0.15}}
answer = lambda method, text: {"method": method, "text": text}
print(json.dumps({"answers": [answer("vanilla", "Some 300 km."), answer("drift", "%s")],
                  "comparison": [row("vanilla", 1.0), row("drift", 4.0)]}))
"""


class Demo(unittest.TestCase):
    def test_answers_are_judged_by_words(self):
        self.assertTrue(demo.is_right("A waxed chain runs some 300 km, dry.", "300 km"))
        self.assertFalse(demo.is_right("It runs 1300 km.", "300 km"))
        self.assertTrue(demo.is_right("Nine balls.", "9|nine"))
        self.assertFalse(demo.is_right("", "nine"))

    def test_every_task_has_documents_and_an_answer_that_stands_in_them(self):
        root = TOOL.parent.parent
        for task in json.loads((root / "examples/demo.json").read_text()):
            texts = " ".join(path.read_text() for path in (root / task["docs"]).iterdir())
            self.assertTrue(demo.is_right(texts, task["answer"]), task["question"])

    def run_with(self, answer):
        with tempfile.TemporaryDirectory() as folder:
            fake, tasks = Path(folder) / "refrain", Path(folder) / "tasks.json"
            fake.write_text(FAKE % answer)
            fake.chmod(0o755)
            tasks.write_text(json.dumps([{"docs": "d", "question": "q?", "answer": "300 km"}]))
            words = [sys.executable, TOOL, "--refrain", fake, "--model", "m", "--tasks", tasks]
            return subprocess.run(words, capture_output=True, text=True)

    def test_right_answers_pass_and_wrong_ones_fail(self):
        right = self.run_with("About 300 km")
        self.assertEqual(right.returncode, 0, right.stderr)
        self.assertIn("2 of 2 answers are right", right.stdout)
        self.assertIn("4.0 times as fast", right.stdout)
        wrong = self.run_with("About 30 km")
        self.assertNotEqual(wrong.returncode, 0)
        self.assertIn("WRONG", wrong.stdout)


if __name__ == "__main__":
    unittest.main()
