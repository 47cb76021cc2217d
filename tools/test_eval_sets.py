"""Tests of eval_sets with made questions: which are taken, how they are written, and that the matrices of examples/eval name no other derived sets."""

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import eval_sets

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("REFRAIN_DATA", ROOT / "data"))


def musique(index, text):
    docs = [{"idx": 0, "title": "Bolts", "paragraph_text": text, "is_supporting": True}]
    return {"id": f"m{index}", "question": "How tight?", "paragraphs": docs, "answer": "5 Nm", "answer_aliases": ["five"]}


class Sets(unittest.TestCase):
    def test_two_of_three_questions_are_taken_shortest_first(self):
        questions = [musique(index, "x" * (60 - index)) for index in range(7)]
        taken = eval_sets.records("musique", questions)
        self.assertEqual([record["_id"] for record in taken], ["m6", "m4", "m3", "m1", "m0"])
        docs = [{"title": "Bolts", "text": "x" * 54, "supporting": True}]
        first = {"_id": "m6", "question": "How tight?", "answers": ["5 Nm", "five"], "docs": docs, "dataset": "musique"}
        self.assertEqual(taken[0], first)

    def test_hotpotqas_sentences_are_joined_and_written_as_longbench_does(self):
        context = [["Bolts", ["5 Nm.", " No more."]], ["Bells", ["Dull."]]]
        question = {"_id": "h", "question": "How tight?", "answer": "5 Nm", "supporting_facts": [["Bolts", 0]], "context": context}
        made = eval_sets.sets("hotpotqa", [question])
        record = json.loads(made["rag/hotpotqa_train100.jsonl"])
        self.assertEqual([doc["supporting"] for doc in record["docs"]], [True, False])
        written = json.loads(made["longbench_derived/hotpotqa_short.jsonl"])
        self.assertEqual(written["context"], "Passage 1:\nBolts\n5 Nm. No more.\n\nPassage 2:\nBells\nDull.")
        self.assertEqual((written["input"], written["answers"], written["length"]), ("How tight?", ["5 Nm"], 14))

    def refused(self, source):
        """What the tool says of a source that it refuses; it writes nothing."""
        with tempfile.TemporaryDirectory() as data:
            words = ["eval_sets.py", data, "--source", source.as_uri()]
            with mock.patch("sys.argv", words), contextlib.redirect_stdout(io.StringIO()), self.assertRaises(SystemExit) as ended:
                eval_sets.main()
            self.assertEqual(list(Path(data).iterdir()), [])
        return str(ended.exception)

    def test_other_questions_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            self.assertRegex(self.refused(source), "musique_train.json: .*No such file")
            (source / "musique_train.json").write_text(json.dumps([musique(0, "x")]))
            (source / "hotpotqa_train.json").write_text("<html>")
            self.assertRegex(self.refused(source), "hotpotqa_train.json: JSONDecodeError")
            (source / "hotpotqa_train.json").write_text("[]")
            self.assertRegex(self.refused(source), "rag/musique_train100.jsonl would not be the set of the measured results")

    def test_the_tool_makes_all_derived_sets_that_matrices_name(self):
        text = "".join(path.read_text() for path in (ROOT / "examples/eval").glob("*.toml"))
        named = set(re.findall(r'^name = "(rag/\w+|longbench/\w+_short)"', text, re.MULTILINE))
        made = {path.removesuffix(".jsonl").replace("longbench_derived/", "longbench/") for path in eval_sets.SETS}
        self.assertGreaterEqual(len(named), 3)
        self.assertLessEqual(named, made)

    @unittest.skipUnless((DATA / "longbench_derived").is_dir(), "REFRAIN_DATA names no folder with the derived sets")
    def test_the_sets_of_the_data_are_those_of_the_measured_results(self):
        for path, expected in eval_sets.SETS.items():
            self.assertEqual(hashlib.sha256((DATA / path).read_bytes()).hexdigest(), expected, path)


if __name__ == "__main__":
    unittest.main()
