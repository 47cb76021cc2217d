#!/usr/bin/env python3
"""Makes tests/golden/metrics.json: own sentences, scored by the libraries that the benchmarks' metrics are of.

    pip install rouge==1.0.1 rouge_score==0.1.2 jieba==0.42.1 fuzzywuzzy==0.18.0 Levenshtein
    python tools/golden_metrics.py METRICS

METRICS is LongBench/metrics.py of https://github.com/THUDM/LongBench at 2e00731. metrics.json has:
  longbench[]   scoring, prediction, answer, classes, score; of code also levenshtein, by python-Levenshtein in place of difflib
  needle[]      needle, response; ROUGE of rouge_score with its stemmer, and of kvpress (the rouge package)
"""

import difflib
import importlib.util
import json
import sys
from pathlib import Path

import Levenshtein
from rouge import Rouge
from rouge_score import rouge_scorer

ROOT = Path(__file__).resolve().parent.parent / "tests/golden"

ENGLISH = [
    ("The chain runs 300 km.", "the chain runs 300 km"),
    ("A waxed chain runs for 300 km between treatments, an oiled one 200 km.", "300 km"),
    ("It's Shimano's mineral oil - never DOT!", "mineral oil, never DOT"),
    ("yes", "no"),
    ("", "an empty answer"),
    ("the a an", "an the"),
    ("one one one two", "one two two"),
    ("Loose bolts.  Tight bolts.\nA stem bolt takes 5 Nm. It takes no more.", "A stem bolt takes 5 Nm. A crank bolt takes 40 Nm."),
    ("The rim is true. The rim is true. The rim is round.", "The rim is round. The rim is true."),
    ("naïve façade — “quoted” text…", "naive facade quoted text"),
    ("Zürich's 2nd tyre: 28-622 (700c).", "28-622"),
    ("word", "word " * 12),
    ("...", "!!!"),
]
CHINESE = [
    ("链条每三百公里上一次蜡。", "三百公里"),
    ("把座管夹拧到七牛米，不要更紧！", "座管夹拧到七牛米。"),
    ("刹车用矿物油，而不是DOT 4。", "矿物油"),
    ("今天 天气 很好", "今天天气很好"),
    ("北京大学的学生骑自行车去图书馆。", "学生们骑自行车去北京大学图书馆"),
    ("", "空"),
    ("！？。", "，；："),
    ("轮胎的气压是5.5 bar（前轮）和6 bar（后轮）。", "前轮5.5 bar，后轮6 bar"),
]
CLASSES = ["City", "State", "Other location", "Location", "Manner of an action"]
CLASSIFIED = [
    ("City", "City"),
    ("It is a State, or a City.", "City"),
    ("Other location", "Location"),
    ("Location", "Other location"),
    ("Other location and Location and State", "Other location"),
    ("manner of an action", "Manner of an action"),
    ("", "State"),
]
COUNTED = [("There are 7 passages, 7 of 12.", "7"), ("seven", "7"), ("07 7 7.0", "7"), ("", "3"), ("12", "1"), ("3\n\n3", "3")]
RETRIEVED = [("Paragraph 4", "Paragraph 4"), ("Paragraph 14 or 4, not 24", "Paragraph 4"), ("The fourth", "Paragraph 4"), ("4 4 5", "Paragraph 4")]
RETRIEVED_ZH = [("段落4", "段落4"), ("段落14，还是4？", "段落4"), ("第四段", "段落4"), ("4、5", "段落5")]
CODE = [
    ("    return total / count", "    return total / count"),
    ("\n\n    return sum / n\nnext line", "    return total / count"),
    ("# a comment\n// another\n`mark`\nfor (int i = 0; i < n; ++i) {", "for (int i = 0; i < n; i++) {"),
    ("# only a comment", "x = 1"),
    ("", "x = 1"),
    ("abcabcabc", "cbacbacba"),
    ("private static final String NAME = \"é\";", "private final static String NAME = \"e\";"),
    ("aaaaaaaab", "baaaaaaaa"),
    # More than 200 characters, where difflib leaves out popular ones.
    ("int value = " + " + ".join(f"field{i}" for i in range(30)) + ";", "int value = " + " + ".join(f"field{i * 2}" for i in range(30)) + ";"),
]
NEEDLE = "\nThe best way to clean a chain is with a brush and warm water on a dry evening.\n"
RESPONSES = [
    "with a brush and warm water on a dry evening",
    "The best way to clean a chain is with a brush and warm water on a dry evening.",
    "Cleaning chains: brushes, warmest waters, drier evenings.",
    "Nothing is said of it.",
    "A chain. A brush. A dry evening. A chain is best.",
    "The best way to clean a chain is with a BRUSH and 2 litres of warm water, on dry evenings; nationally, organisations vary.",
    "链条",
]


def main():
    spec = importlib.util.spec_from_file_location("metrics", sys.argv[1])
    metrics = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metrics)

    class Matcher:
        def __init__(self, _, a, b):
            self.a, self.b = a, b

        def ratio(self):
            return Levenshtein.ratio(self.a, self.b)

    def code(prediction, answer, matcher):
        metrics.fuzz.SequenceMatcher = matcher
        return metrics.code_sim_score(prediction, answer)

    scored = [
        ("qa_f1", metrics.qa_f1_score, ENGLISH),
        ("rouge_l", metrics.rouge_score, ENGLISH),
        ("qa_f1_zh", metrics.qa_f1_zh_score, CHINESE),
        ("rouge_l_zh", metrics.rouge_zh_score, CHINESE),
        ("classification", metrics.classification_score, CLASSIFIED),
        ("count", metrics.count_score, COUNTED),
        ("retrieval", metrics.retrieval_score, RETRIEVED),
        ("retrieval_zh", metrics.retrieval_zh_score, RETRIEVED_ZH),
        ("code_sim", lambda prediction, answer, **_: code(prediction, answer, difflib.SequenceMatcher), CODE),
    ]
    longbench = []
    for scoring, metric, pairs in scored:
        for prediction, answer in pairs:
            row = dict(scoring=scoring, prediction=prediction, answer=answer, classes=CLASSES if scoring == "classification" else [])
            row["score"] = float(metric(prediction, answer, all_classes=row["classes"]))
            if scoring == "code_sim":
                row["levenshtein"] = code(prediction, answer, Matcher)
            longbench.append(row)
    needle, google = [], rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    for response in RESPONSES:
        ours = google.score(NEEDLE, response)
        theirs = Rouge().get_scores(NEEDLE.strip(), response)[0]
        row = dict(needle=NEEDLE, response=response, rouge1_f=ours["rouge1"].fmeasure, rougeL_f=ours["rougeL"].fmeasure)
        row["needle_score_0_10"] = 10 * row["rouge1_f"]
        row |= {f"pltrdy_rouge{n}_f": theirs[f"rouge-{n.lower()}"]["f"] for n in "12L"}
        row |= {f"pltrdy_rougeL_{side}": theirs["rouge-l"][side] for side in "pr"}
        needle.append(row)
    golden = dict(longbench=longbench, needle=needle)
    (ROOT / "metrics.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(longbench)} pairs, {len(needle)} responses")


if __name__ == "__main__":
    main()
