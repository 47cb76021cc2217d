#!/usr/bin/env python3
"""Measures two refrain programs in turn, one before a change and one after it, and prints how they compare.

    python3 tools/compare_binaries.py before/refrain after/refrain
    python3 tools/compare_binaries.py before/refrain after/refrain --bench ttft --lengths 1024,4096 --rounds 7 --out new-loop

Measured are `bench ttft` (time to first token of each method and length), `bench decode` (time a token under each
eviction policy, beginning and end of the answer) and `bench serve` (clients of the server at once). Each measurement is
one process; the two programs take turns, and who begins changes every round, so that a machine that warms up or
slows down does so for both. Each program has a temporary store of its own for the whole comparison.

A row is the median over the rounds of each program and their ratio, after / before. Below 1 is better for seconds,
above 1 for rates. The range is that of the ratios of single rounds. With --within P the exit status is 1 where a row
is more than P percent worse.

The programs may name their options differently: those in OPTIONS are looked up in each program's own help. What is
named otherwise is given with --before-args and --after-args, and fields of the JSON are looked up in FIELDS.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SIDES = ("before", "after")
# What an option is for -> its names, of which a program's help has one.
OPTIONS = {
    "methods": ("--methods",),
    "lengths": ("--lengths", "--prompt-tokens", "--input-len"),
    "rounds": ("--runs", "--rounds", "--num-iters"),
    "policies": ("--policies", "--evictions"),
    "prompt": ("--prompt", "--prompt-tokens", "--input-len"),
    "answer": ("--tokens", "--max-tokens", "--output-len"),
    "short": ("--short", "--short-tokens"),
    "clients": ("--clients", "--concurrency", "--max-concurrency"),
    "duration": ("--seconds", "--duration"),
}
# What a figure is -> its names in the JSON of a program, of which a result has one.
FIELDS = {
    "ttft": ("ttft", "ttft_seconds"),
    "curve": ("curve", "tpot_curve"),
    "itl": ("between_tokens", "itl", "itl_seconds"),
    "clients": ("clients",),
    "output_rate": ("tokens_per_second", "output_tokens_per_second", "output_throughput"),
}


class Failed(Exception):
    """A program that cannot be run or read."""


@dataclass
class Program:
    """One of the two programs."""

    side: str
    path: Path
    store: Path
    common: list
    extra: dict = field(default_factory=dict)  # bench -> more words
    helps: dict = field(default_factory=dict)
    about: dict = field(default_factory=dict)

    def run(self, words):
        found = subprocess.run([self.path, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if found.returncode != 0:
            raise Failed(f"{self.side}: `refrain {shlex.join(map(str, words))}` failed\n{found.stderr.strip()}")
        return found.stdout

    def option(self, bench, what):
        """The program's own name of an option."""
        if bench not in self.helps:
            self.helps[bench] = set(re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)", self.run(["bench", bench, "--help"]), re.MULTILINE))
        for name in OPTIONS[what]:
            if name in self.helps[bench]:
                return name
        raise Failed(f"{self.side}: `bench {bench}` has none of {', '.join(OPTIONS[what])}; add its name to OPTIONS")

    def measure(self, bench, options):
        """Results of one benchmark."""
        words = ["bench", bench, "--json", "--store", self.store, *self.common]
        for what, value in options.items():
            # A list is the option several times: programs differ in what separates its members.
            for one in value if isinstance(value, list) else [value]:
                words += [self.option(bench, what), one]
        said = json.loads(self.run([*words, *self.extra.get(bench, [])]))
        self.about = said.get("about", {})
        return said["results"]


def figure(result, what):
    """A figure of a result. Quantiles and summaries give their median."""
    name = next((name for name in FIELDS[what] if name in result), None)
    if name is None:
        raise Failed(f"a result has none of {', '.join(FIELDS[what])}, only {', '.join(result)}; add its name to FIELDS")
    value = result[name]
    return value["median"] if isinstance(value, dict) and "median" in value else value


def expect(results, count):
    if len(results) != count:
        raise Failed(f"{len(results)} results where {count} were expected")
    return results


# ---- what is measured --------------------------------------------------------------------------------


@dataclass
class Case:
    """What one process measures: a benchmark, its options, and how its results become rows."""

    name: str
    bench: str
    options: dict
    rows: object  # function of the results: (row, unit, value) for each


def ttft_case(args, length):
    def rows(results):
        for method, result in zip(args.methods, expect(results, len(args.methods))):
            yield f"ttft {method} {length}", "s", figure(result, "ttft")

    options = {"methods": args.methods, "lengths": str(length), "rounds": "1"}
    return Case(f"ttft {length}", "ttft", options, rows)


def decode_case(args):
    def rows(results):
        for policy, result in zip(args.policies, expect(results, len(args.policies))):
            seconds = [seconds for _, seconds in figure(result, "curve")]
            quarter = max(1, len(seconds) // 4)
            yield f"decode {policy} ttft", "s", figure(result, "ttft")
            yield f"decode {policy} tpot, first quarter", "s", statistics.median(seconds[:quarter])
            yield f"decode {policy} tpot, last quarter", "s", statistics.median(seconds[-quarter:])

    options = {
        "policies": args.policies,
        "prompt": str(args.decode_prompt),
        "answer": str(args.decode_tokens),
        "short": "10",
        "rounds": "1",
    }
    return Case("decode", "decode", options, rows)


def serve_case(args):
    def rows(results):
        expect(results, len(args.serve_methods) * len(args.clients))
        for clients in args.clients:
            # Results of as many clients come in the order of the methods, whose options a program may write in its own way.
            same = [result for result in results if figure(result, "clients") == clients]
            for method, result in zip(args.serve_methods, expect(same, len(args.serve_methods))):
                name = f"serve {method} {clients} clients"
                yield f"{name} output", "tokens/s", figure(result, "output_rate")
                yield f"{name} ttft", "s", figure(result, "ttft")[0]
                yield f"{name} itl", "s", figure(result, "itl")[0]

    options = {
        "methods": args.serve_methods,
        "clients": ",".join(map(str, args.clients)),
        "duration": args.serve_duration,
    }
    return Case("serve", "serve", options, rows)


def cases_of(args):
    cases = []
    if "ttft" in args.bench:
        cases += [ttft_case(args, length) for length in args.lengths]
    if "decode" in args.bench:
        cases.append(decode_case(args))
    if "serve" in args.bench:
        cases.append(serve_case(args))
    return cases


def measure(args, programs):
    """(row, unit) -> side -> value of every round."""
    measured = {}
    for round in range(args.rounds):
        for case in cases_of(args):
            for program in programs if round % 2 == 0 else programs[::-1]:
                print(f"[{round + 1}/{args.rounds}] {case.name}: {program.side}", file=sys.stderr)
                for row, unit, value in case.rows(program.measure(case.bench, case.options)):
                    measured.setdefault((row, unit), {side: [] for side in SIDES})[program.side].append(value)
    return measured


# ---- what is printed ---------------------------------------------------------------------------------


def summary(measured):
    rows = []
    for (row, unit), values in measured.items():
        medians = {side: statistics.median(values[side]) for side in SIDES}
        ratios = [after / before for before, after in zip(values["before"], values["after"])]
        rows.append(
            {
                "row": row,
                "unit": unit,
                **medians,
                "ratio": medians["after"] / medians["before"],
                "lowest_ratio": min(ratios),
                "highest_ratio": max(ratios),
                "values": values,
            }
        )
    return rows


def is_worse(row, percent):
    loss = 1 / row["ratio"] if row["unit"] == "tokens/s" else row["ratio"]
    return loss > 1 + percent / 100


def shown(value, unit):
    return f"{1000 * value:.2f} ms" if unit == "s" else f"{value:.1f} {unit}"


def markdown(rows, about, rounds):
    machine = ", ".join(str(about[key]) for key in ("model", "device", "cpu", "isa", "compute", "kv") if about.get(key))
    lines = [
        f"Medians of {rounds} rounds, the two programs in turn ({machine}, {about.get('threads', '?')} threads).",
        "",
        "| | before | after | after / before | range |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        before, after = shown(row["before"], row["unit"]), shown(row["after"], row["unit"])
        spread = f"{row['lowest_ratio']:.3f}–{row['highest_ratio']:.3f}"
        lines.append(f"| {row['row']} | {before} | {after} | {row['ratio']:.3f} | {spread} |")
    return "\n".join(lines) + "\n"


# ---- the command line --------------------------------------------------------------------------------


def names(text):
    return [word for word in text.split(",") if word]


def numbers(text):
    try:
        return [int(word) for word in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 1024,2048") from error


def extra_words(given):
    """`serve=--x 1` -> {"serve": ["--x", "1"]}."""
    found = {}
    for text in given:
        bench, is_given, words = text.partition("=")
        if not is_given:
            raise SystemExit(f"'{text}' does not read BENCH=WORDS, such as 'serve=--max-num-seqs 8'")
        found.setdefault(bench, []).extend(shlex.split(words))
    return found


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the program before")
    parser.add_argument("after", type=Path, help="the program after")
    parser.add_argument("--bench", type=names, default=["ttft", "decode", "serve"], help="which of ttft,decode,serve")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--models", help="folder of the models, where it is not the default one")
    parser.add_argument("--threads", type=int, default=0, help="0 for one a core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096, 8000], help="prompt lengths of ttft")
    parser.add_argument("--methods", type=names, default=["vanilla", "pie", "lego_link", "cache_blend", "a3", "sam_kv"])
    parser.add_argument("--policies", type=names, default=["full", "morph_kv"], help="eviction policies of decode")
    parser.add_argument("--decode-prompt", type=int, default=512, help="prompt tokens of decode")
    parser.add_argument("--decode-tokens", type=int, default=1000, help="answer tokens of decode")
    parser.add_argument("--serve-methods", type=names, default=["vanilla", "a3"])
    parser.add_argument("--clients", type=numbers, default=[1, 8])
    parser.add_argument("--serve-duration", default="20s", help="how long each number of clients is kept up")
    parser.add_argument("--before-args", action="append", default=[], metavar="BENCH=WORDS", help="more words for one benchmark")
    parser.add_argument("--after-args", action="append", default=[], metavar="BENCH=WORDS")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json as well")
    parser.add_argument("--within", type=float, metavar="P", help="fail where a row is more than P percent worse")
    args = parser.parse_args()
    unknown = set(args.bench) - {"ttft", "decode", "serve"}
    if unknown or args.rounds < 1:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}" if unknown else "at least one round is needed")
    return args


def compare(args, folder):
    common = ["--model", args.model, "--threads", str(args.threads)]
    common += ["--models", args.models] if args.models else []
    programs = [
        Program("before", args.before.resolve(), folder / "before", common, extra_words(args.before_args)),
        Program("after", args.after.resolve(), folder / "after", common, extra_words(args.after_args)),
    ]
    rows = summary(measure(args, programs))
    about = {key: value for program in programs for key, value in program.about.items() if key != "command"}
    table = markdown(rows, {**about, "model": args.model}, args.rounds)
    print(table, end="")
    if args.out:
        args.out.with_suffix(".md").write_text(table, encoding="utf-8")
        said = {"rounds": args.rounds, "about": about, "rows": rows}
        args.out.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return rows


def main():
    args = parse()
    with tempfile.TemporaryDirectory(prefix="refrain-compare-") as folder:
        try:
            rows = compare(args, Path(folder))
        except (Failed, OSError, json.JSONDecodeError) as error:
            return f"compare_binaries: {error}"
    worse = [row["row"] for row in rows if args.within is not None and is_worse(row, args.within)]
    if worse:
        return f"compare_binaries: more than {args.within:g} % worse: {'; '.join(worse)}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
