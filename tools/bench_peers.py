#!/usr/bin/env python3
"""Measures Refrain beside other engines on this machine: prefill, and decoding after a context.

    python tools/bench_peers.py --model smollm2-135m
    python tools/bench_peers.py --model model.gguf --engines refrain,llama.cpp:q8_0 --lengths 512,2048 --rounds 5

Engines are `refrain[:COMPUTE[:KV]]` (`refrain-bench worker`), `llama.cpp[:TYPE]` (llama-cpp-python on the same GGUF file,
or on it rewritten as bf16 or q8_0) and `transformers[:DTYPE]` (torch, sdpa attention, weights dequantised from the same
file). The first one of refrain is what the others are compared with.

Every engine is a process of its own that loads the model once. All get the same token ids, cut from real text. They
are measured in turn: for every round, for every length, every engine, with a pause between any two so that nobody's
threads still spin. The first round is not counted. llama.cpp runs with and without flash attention, and the better of
the two counts, length by length; a setting that is far behind after two rounds is not run again. A run that takes
longer than --slow seconds is repeated fewer times, and the table says so. So it does where other processes were busy.

One run answers two questions where a length is among --lengths and --contexts: prefill seconds, and seconds a token
of the greedy steps after it. Prefill is from an empty KV cache to the logits of the last token.

Written to --out: NAME.md (tables), NAME.json (every raw time, the machine, versions) and NAME.svg (a picture).
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers_report
from peers_engines import WARM_UP, Engine, check_avx2, cpu_flags, cpu_info, parse_engines, say

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_ENGINES = "refrain,llama.cpp,llama.cpp:bf16,llama.cpp:q8_0,transformers:bf16"
FAR_BEHIND = 1.25  # of the better flash attention setting's time


# ---- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A number of tokens, and what is measured there."""

    tokens: int
    prefill: bool
    decode: bool


@dataclass(frozen=True)
class Run:
    """One raw measurement. Round 0 is the warm-up."""

    engine: str
    flash: bool | None
    tokens: int
    round: int
    prefill_seconds: float | None
    seconds_per_token: float | None
    wall_seconds: float
    others: float | None  # share of the machine's cores that other processes took meanwhile


class Clock:
    """Time that passes, and how much of the machine other processes than one take meanwhile."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.started, self.busy, self.own = time.monotonic(), *self.ticks()

    def ticks(self) -> tuple[int, int]:
        """Ticks that all processes, and the one, have run; zero where the system does not tell."""
        try:
            machine = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
            own = Path(f"/proc/{self.process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return 0, 0
        user, nice, system, _, _, irq, soft, *_ = map(int, machine)
        return user + nice + system + irq + soft, int(own[11]) + int(own[12])

    def read(self) -> tuple[float, float | None]:
        wall = time.monotonic() - self.started
        busy, own = self.ticks()
        if not busy or wall < 0.2:  # a tick is 10 ms: less time says nothing
            return wall, None
        others = (busy - self.busy) - (own - self.own)
        return wall, round(max(0.0, others / os.sysconf("SC_CLK_TCK") / wall / (os.cpu_count() or 1)), 3)


def text_ids(engines: list[Engine], paths: list[Path], count: int) -> tuple[list[int], str]:
    """Ids of the text by one engine's tokenizer, repeated up to `count`."""
    order = ["llama.cpp", "transformers", "refrain"]
    by = min(engines, key=lambda engine: order.index(engine.spec.partition(":")[0]))
    files = [p for path in paths for p in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = by.worker.ask(op="tokenize", text=text)["ids"]
    if not ids:
        raise SystemExit(f"no text to measure with in {', '.join(map(str, paths))}")
    return (ids * (count // len(ids) + 1))[:count], by.spec


def one_run(engine: Engine, variant: dict[str, Any], case: Case, ids: list[int], steps: int, round: int) -> Run:
    context = ids[: case.tokens]
    clock = Clock(engine.worker.process.pid)
    if case.decode:
        reply = engine.worker.ask(op="decode", context=context, tokens=steps, **variant)
    else:
        reply = {"prefill_seconds": engine.worker.ask(op="prefill", ids=context, **variant)["seconds"]}
    wall, others = clock.read()
    return Run(
        engine=engine.spec,
        flash=variant.get("flash"),
        tokens=case.tokens,
        round=round,
        prefill_seconds=reply["prefill_seconds"] if case.prefill else None,
        seconds_per_token=reply.get("seconds_per_token"),
        wall_seconds=wall,
        others=others,
    )


def far_behind(mine: list[Run], others: list[Run]) -> bool:
    """Whether another setting of the same engine beats this one clearly in everything, its best run by its best."""

    def least(runs: list[Run], seconds: str) -> float:
        return min(getattr(run, seconds) or 0.0 for run in runs)

    kinds = ("prefill_seconds", "seconds_per_token")
    pairs = [(least(mine, kind), least(others, kind)) for kind in kinds] if mine and others else []
    return bool(pairs) and all(a > FAR_BEHIND * b for a, b in pairs if b)


def measure(args: argparse.Namespace, engines: list[Engine], cases: list[Case], ids: list[int]) -> list[Run]:
    runs: list[Run] = []
    for round in range(args.rounds + 1):
        for case in cases:
            for engine in engines:
                first = [r for r in runs if (r.engine, r.tokens) == (engine.spec, case.tokens) and r.round < 2]
                for variant in engine.variants:
                    mine = [r for r in first if r.flash == variant.get("flash")]
                    slow = any(run.wall_seconds > args.slow for run in mine)
                    if slow and round > args.slow_rounds:
                        continue
                    if round > 1 and far_behind(mine, [r for r in first if r not in mine]):
                        continue
                    time.sleep(args.pause)
                    run = one_run(engine, variant, case, ids, args.steps, round)
                    runs.append(run)
                    say(progress(run, args.rounds, engine.label))
    return runs


def progress(run: Run, rounds: int, label: str) -> str:
    flash = "" if run.flash is None else f" (flash attention {'on' if run.flash else 'off'})"
    prefill = f"  {run.tokens / run.prefill_seconds:.0f} tokens/s" if run.prefill_seconds else ""
    decode = f"  {1000 * run.seconds_per_token:.2f} ms a token" if run.seconds_per_token else ""
    round = f"round {run.round}/{rounds}" if run.round else "warm-up"
    busy = f"  (others took {100 * run.others:.0f} % of the machine)" if (run.others or 0) > 0.05 else ""
    return f"[{round}] {run.tokens:>6} tokens  {label}{flash}{prefill}{decode}{busy}"


# ---- what was measured, on what --------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "flags": cpu_flags(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def settings(args: argparse.Namespace, model: Path, tokenizer: str) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "tools/bench_peers.py", *args.words]),
        "model": args.model if args.model != str(model) else model.name,
        "file": model.name,
        "file_bytes": model.stat().st_size,
        "threads": args.threads,
        "avx2": args.avx2,
        "rounds": args.rounds,
        "steps": args.steps,
        "slow_seconds": args.slow,
        "slow_rounds": args.slow_rounds,
        "tokenizer": tokenizer,
        "refrain_revision": revision(),
        "machine": args.machine,
    }


def described(engine: Engine) -> dict[str, Any]:
    return {
        "spec": engine.spec,
        "label": engine.label,
        **engine.info,
        "peak_memory_bytes": engine.worker.peak_memory(),
        "notes": engine.notes,
    }


# ---- the command line ------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",") if word})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 512,2048") from error


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no number of at least {least}")
        return int(text)

    return number


def resolve_model(refrain: Path, name: str) -> Path:
    if Path(name).exists():
        return Path(name).resolve()
    found = subprocess.run([str(refrain), "pull", name], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"{name} is no file and no model that refrain can pull")
    return Path(found.stdout.strip().splitlines()[-1])


def built(program: str) -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / program


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a GGUF file, or a name that `refrain pull` knows")
    add("--engines", default=DEFAULT_ENGINES, help=f"default {DEFAULT_ENGINES}")
    add("--lengths", type=numbers, default="512,2048,4096,8000", help="tokens of prefills (default 512,2048,4096,8000)")
    add("--contexts", type=numbers, default="0,2048,4096", help="tokens before decoding (default 0,2048,4096)")
    add("--steps", type=at_least(1), default=32, help="tokens decoded (default 32)")
    add("--rounds", type=at_least(1), default=5, help="rounds that count, after one that does not (default 5)")
    add("--threads", type=at_least(1), default=2, help="threads of every engine (default 2)")
    add("--avx2", action="store_true", help="keeps every engine to AVX2, as on a CPU that has no more")
    add("--slow", type=float, default=60, metavar="SECONDS", help="a longer run is repeated less (default 60)")
    add("--slow-rounds", type=at_least(1), default=3, help="how often such a run counts (default 3)")
    add("--pause", type=float, default=0.3, metavar="SECONDS", help="between any two runs (default 0.3)")
    texts = [ROOT / "examples" / "docs", ROOT / "docs"]
    add("--text", type=Path, nargs="+", default=texts, help="files, or folders of .md (default: this repository's)")
    add("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results (default docs/results)")
    add("--name", help="name of the result files (default peers-MODEL)")
    add("--refrain", type=Path, default=built("refrain"), help="fetches models (default target/release/refrain)")
    add("--worker", type=Path, default=built("refrain-bench"), help="is measured (default target/release/refrain-bench)")
    for peer in ("llama", "transformers"):
        variable = f"BENCH_{peer.upper()}_PYTHON"
        default = os.environ.get(variable) or sys.executable
        add(f"--{peer}-python", default=default, help=f"Python that has it (default ${variable}, or this one)")
    args = parser.parse_args()
    args.words = sys.argv[1:]
    return args


def cases_of(lengths: list[int], contexts: list[int], steps: int, most: int) -> list[Case]:
    cases = [Case(n, n > 0 and n in lengths, n in contexts) for n in sorted({*lengths, *contexts})]
    fitting = [case for case in cases if case.tokens + (steps if case.decode else 0) <= most]
    for case in cases:
        if case not in fitting:
            say(f"{case.tokens} tokens are left out: the model's context is {most}")
    fitting = [case for case in fitting if case.prefill or case.decode]
    if not fitting:
        raise SystemExit("nothing to measure: choose --lengths and --contexts within the model's context")
    return fitting


def main() -> None:
    args = parse()
    for program in (args.refrain, args.worker):
        if not program.is_file():
            raise SystemExit(f"{program} is not there; build both with `cargo build --release`, or name it by its option")
    args.machine = machine()
    if args.machine["load_before"] > 0.5:
        say(f"warning: the load of this machine is {args.machine['load_before']} already; times will be off")
    model = resolve_model(args.refrain, args.model)
    room = max([*args.lengths, *args.contexts, WARM_UP]) + args.steps + 1
    engines = parse_engines(args, model, room)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))
        for engine in engines:
            say(f"starting {engine.spec}")
            engine.start(scratch)
            stack.callback(engine.worker.close)
            for note in engine.notes:
                say(f"{engine.spec}: {note}")
            if args.avx2:
                check_avx2(engine)
        most = min(engine.info["context"] for engine in engines)
        cases = cases_of(args.lengths, args.contexts, args.steps, most)
        ids, tokenizer = text_ids(engines, args.text, cases[-1].tokens)
        runs = measure(args, engines, cases, ids)
        result = {"about": settings(args, model, tokenizer), "engines": [described(engine) for engine in engines]}
    result["summary"] = peers_report.summary(result["engines"], runs)
    result["runs"] = [vars(run) for run in runs]
    # Known names have dots in them.
    name = args.name or f"peers-{Path(args.model).name.removesuffix('.gguf').lower()}"
    for path in peers_report.write(result, args.out, name):
        say(f"wrote {path}")
    print(peers_report.markdown(result, name))


if __name__ == "__main__":
    main()
