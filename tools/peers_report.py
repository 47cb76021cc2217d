"""What tools/bench_peers.py writes: a summary of its raw runs as JSON, tables in Markdown, a picture in SVG."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import plot
from plot import amount, shown

MEASURES = ("prefill", "decode")
BUSY = 0.03  # share of the machine that other processes may take before the tables warn

# ---- summary ---------------------------------------------------------------------------------------


def seconds_of(run: Any, measure: str) -> float | None:
    return run.prefill_seconds if measure == "prefill" else run.seconds_per_token


def summary(engines: list[dict[str, Any]], runs: list[Any]) -> list[dict[str, Any]]:
    """One row a measure, number of tokens and engine: seconds of the better flash attention setting."""
    rows: list[dict[str, Any]] = []
    reference = next((engine["spec"] for engine in engines if engine["engine"] == "refrain"), None)
    for measure in MEASURES:
        for tokens in sorted({run.tokens for run in runs}):
            here = [run for run in runs if run.round and run.tokens == tokens and seconds_of(run, measure)]
            found = [row for e in engines if (row := best(e, measure, [r for r in here if r.engine == e["spec"]]))]
            base = next((row["median"] for row in found if row["engine"] == reference), None)
            for row in found:
                row |= {"measure": measure, "tokens": tokens, "of_refrain": base and row["median"] / base}
            rows += found
    return rows


def best(engine: dict[str, Any], measure: str, runs: list[Any]) -> dict[str, Any] | None:
    rows = []
    for flash in sorted({run.flash for run in runs}, key=str):
        times = [seconds_of(run, measure) for run in runs if run.flash == flash]
        rows.append(
            {
                "engine": engine["spec"],
                "label": engine["label"],
                "flash": flash,
                "median": statistics.median(times),
                "min": min(times),
                "max": max(times),
                "rounds": len(times),
            }
        )
    # A setting that was given up has few runs, one of which may be lucky.
    most = max((row["rounds"] for row in rows), default=0)
    return min((row for row in rows if row["rounds"] == most), key=lambda row: row["median"], default=None)


# ---- Markdown --------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]], words: set[int]) -> str:
    """A Markdown table; columns in `words` to the left, the others to the right."""
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i in words else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def mebibytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.0f} MiB"


def measured(rows: list[dict[str, Any]], unit: str, rounds: int) -> str:
    lines = []
    for row in rows:
        median, low, high = map(amount, shown(row))
        flash = {None: "", True: "on", False: "off"}[row["flash"]]
        fewer = f" ({row['rounds']} rounds)" if row["rounds"] < rounds else ""
        ratio = "–" if row["of_refrain"] is None else f"{row['of_refrain']:.2f}x"
        lines.append([str(row["tokens"]), row["label"] + fewer, flash, median, f"{low}–{high}", ratio])
    header = ["tokens", "engine", "flash", unit, "min–max", "time of Refrain's"]
    return table(header, lines, {1, 2})


def machine_line(about: dict[str, Any]) -> str:
    m = about["machine"]
    memory = f"{m['memory_bytes'] / 2**30:.0f} GiB"
    flags = f" ({', '.join(m['flags'])})" if m["flags"] else ""
    return f"{m['cpu']}{flags}, {m['cores']} cores, {memory}, {m['system']}"


def markdown(result: dict[str, Any], name: str) -> str:
    about, rows = result["about"], result["summary"]
    within = ", all kept to AVX2" if about["avx2"] else ""
    parts = [
        f"# Refrain beside other engines: {about['model']}{', AVX2' if about['avx2'] else ''}",
        f"{about['date']}, {machine_line(about)}; {about['threads']} threads each{within}, {about['file']}. "
        f"Median and range of {about['rounds']} rounds after one that does not count, all engines in turn, the same "
        f'token ids for all. "Time of Refrain\'s" above 1 means that Refrain is faster.',
        f"```sh\n{about['command']}\n```",
        f"![Bars of the tables below]({name}.svg)",
    ]
    busy = [run["others"] for run in result["runs"] if run["others"] is not None]
    if busy and (share := statistics.mean(busy)) > BUSY:
        warning = f"**The machine was not idle**: other processes took {100 * share:.0f} % of it."
        parts.append(f"{warning} These times are rough.")
    for measure, title, unit in (
        ("prefill", "Prefill of a prompt from an empty KV cache", "tokens/s"),
        ("decode", f"Decoding {about['steps']} tokens after a context", "ms a token"),
    ):
        chosen = [row for row in rows if row["measure"] == measure]
        if chosen:
            parts += [f"## {title}", measured(chosen, unit, about["rounds"])]
    if any(row["rounds"] < about["rounds"] for row in rows):
        slow = f"A run of more than {about['slow_seconds']:g} s was repeated {about['slow_rounds']} times only."
        parts.append(slow)
    parts += ["## Engines", engine_table(result["engines"])]
    parts += [f"{engine['label']}: {note}." for engine in result["engines"] for note in engine["notes"]]
    return "\n\n".join(parts) + "\n"


def engine_table(engines: list[dict[str, Any]]) -> str:
    lines = [
        [
            engine["label"],
            engine["version"],
            mebibytes(engine["weight_bytes"]),
            engine["kv"],
            f"{engine['kv_bytes_per_token']}",
            mebibytes(engine["peak_memory_bytes"]),
        ]
        for engine in engines
    ]
    header = ["engine", "version", "weights", "KV", "KV bytes a token", "peak memory"]
    return table(header, lines, {0, 1, 3})


# ---- files -----------------------------------------------------------------------------------------


def write(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    runs = [json.dumps(run) for run in result["runs"]]
    rest = json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1, ensure_ascii=False)
    # One raw run a line: short, and still to be read and compared.
    whole = rest.removesuffix("\n}") + ',\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"
    paths = [folder / f"{name}{suffix}" for suffix in (".md", ".json", ".svg")]
    for path, content in zip(paths, (markdown(result, name), whole), strict=False):
        path.write_text(content, encoding="utf-8")
    about = result["about"]
    plot.peers(paths[1], paths[2], f"{about['model']} with AVX2" if about["avx2"] else "")
    return paths
