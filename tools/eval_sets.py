#!/usr/bin/env python3
"""Makes the sets of examples/eval that no benchmark publishes, from 100 questions each of MuSiQue's and HotpotQA's training halves.

    tools/eval_sets.py DATA

HippoRAG's repository has the questions with their documents. By the length of titles and texts, shortest first, every third question is left out,
beginning with the second; the other 67 are `rag/NAME_train100.jsonl` in the folder DATA. The first 40 of them, as LongBench writes a record,
are `longbench_derived/NAME_short.jsonl`. Nothing is drawn at random. Sets that are not those of the measured results are not written.
Needs nothing but Python. The texts keep their licences: CC BY 4.0 (MuSiQue), CC BY-SA 4.0 (HotpotQA).
"""

import argparse
import hashlib
import http.client
import json
import sys
import urllib.request
from pathlib import Path

SOURCE = "https://raw.githubusercontent.com/OSU-NLP-Group/HippoRAG/3d95d255a8db0c1699b853cfb4fbe5056708162d/data"
SHORT = 40
# SHA-256 of each set.
SETS = {
    "rag/musique_train100.jsonl": "492efc4e824bce5254f3634e406c83cb32cb6245f94e8ae1e806502c7c977c59",
    "rag/hotpotqa_train100.jsonl": "643c47b4ce80e8729755b4b31a4b7cc56d4026dd0a0fd5f521ffc6ea73ed5faa",
    "longbench_derived/musique_short.jsonl": "5072f8d7afed77fe4f0e60811f06eff828590ec42ff681381ca3da686d2f76f1",
    "longbench_derived/hotpotqa_short.jsonl": "13c7b3e19468111433747168e7d596978f13a5e22b9acaf83fc12a40a6124b53",
}


def musique(question):
    docs = [{"title": doc["title"], "text": doc["paragraph_text"], "supporting": doc["is_supporting"]} for doc in question["paragraphs"]]
    return question["id"], [question["answer"], *question["answer_aliases"]], docs


def hotpotqa(question):
    supporting = {title for title, _ in question["supporting_facts"]}
    docs = [{"title": title, "text": "".join(sentences), "supporting": title in supporting} for title, sentences in question["context"]]
    return question["_id"], [question["answer"]], docs


READERS = {"musique": musique, "hotpotqa": hotpotqa}


def size(record):
    """Characters of a record's titles and texts."""
    return sum(len(doc["title"]) + len(doc["text"]) for doc in record["docs"])


def records(name, questions):
    """Questions as records of `rag/NAME_train100`: two of three, shortest first."""
    found = []
    for question in questions:
        of, answers, docs = READERS[name](question)
        found.append({"_id": of, "question": question["question"], "answers": answers, "docs": docs, "dataset": name})
    return [record for index, record in enumerate(sorted(found, key=size)) if index % 3 != 1]


def short(name, record):
    """A record of `rag/NAME_train100` in LongBench's form."""
    passages = (f"Passage {index}:\n{doc['title']}\n{doc['text']}" for index, doc in enumerate(record["docs"], 1))
    context, question = "\n\n".join(passages), record["question"]
    return {
        "input": question,
        "context": context,
        "answers": record["answers"],
        "length": len(context.split()) + len(question.split()) + 1,
        "dataset": f"{name}_short",
        "language": "en",
        "all_classes": None,
        "_id": record["_id"],
    }


def sets(name, questions):
    """The sets of a benchmark's questions: path in the data's folder, and bytes."""
    long = records(name, questions)
    lines = {
        f"rag/{name}_train100.jsonl": long,
        f"longbench_derived/{name}_short.jsonl": [short(name, record) for record in long[:SHORT]],
    }
    return {path: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in of).encode() for path, of in lines.items()}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("data", type=Path, help="the folder that `refrain eval run --data` is given")
    arguments.add_argument("--source", default=SOURCE, help="address of the folder with NAME_train.json, file:///FOLDER for files at hand")
    given = arguments.parse_args()
    made = {}
    for name in READERS:
        address = f"{given.source}/{name}_train.json"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                made |= sets(name, json.load(answer))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            sys.exit(f"error: {address}: {error!r}; give a folder with HippoRAG's data/{name}_train.json as --source file:///FOLDER")
    for path, content in made.items():
        if hashlib.sha256(content).hexdigest() != SETS[path]:
            sys.exit(f"error: {path} would not be the set of the measured results; take the source's files as they were at {SOURCE}")
    for path, content in made.items():
        place = given.data / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        except OSError as error:
            sys.exit(f"error: {error}")
        print(place)


if __name__ == "__main__":
    main()
