"""What tools/bench_peers.py writes: a summary of its raw runs, tables in Markdown, a picture in SVG."""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

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


def amount(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def mebibytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.0f} MiB"


def shown(row: dict[str, Any]) -> tuple[float, float, float]:
    """Median, least and most as they are shown: tokens a second, or milliseconds a token."""
    if row["measure"] == "prefill":
        return tuple(row["tokens"] / row[key] for key in ("median", "max", "min"))
    return tuple(1000 * row[key] for key in ("median", "min", "max"))


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
    parts = [
        f"# Refrain beside other engines: {about['model']}",
        f"{about['date']}, {machine_line(about)}; {about['threads']} threads each, {about['file']}. "
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


# ---- SVG -------------------------------------------------------------------------------------------

BAR, GAP, GROUP, PANEL, LABELS, VALUES, TOP = 17, 4, 22, 540, 160, 84, 96
PALETTE = {
    "refrain": ("#0f766e", "#2dd4bf"),
    "llama.cpp": ("#c2610c", "#e8954a", "#f2bd8d"),
    "transformers": ("#5b6b8c",),
}
INK, QUIET, RULE, PAPER = "#1c2430", "#5d6878", "#dfe4ea", "#ffffff"


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, more: str = "") -> str:
    fill = "" if "fill=" in more else f' fill="{INK}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{fill} {more}>{escape(words)}</text>'
    )


def colours(engines: list[dict[str, Any]]) -> dict[str, str]:
    """Shades of one colour for the variants of one engine."""
    used: dict[str, int] = {}
    chosen = {}
    for engine in engines:
        shades = PALETTE[engine["engine"]]
        chosen[engine["spec"]] = shades[min(used.get(engine["engine"], 0), len(shades) - 1)]
        used[engine["engine"]] = used.get(engine["engine"], 0) + 1
    return chosen


def step_of(most: float) -> float:
    """A round distance of grid lines: 4 to 8 of them."""
    power = 10.0 ** len(str(int(most))) / 100 if most >= 1 else 0.1
    return next(s * power for s in (1, 2, 2.5, 5, 10, 20) if most / (s * power) <= 7)


def height_of(rows: list[dict[str, Any]]) -> int:
    return len(rows) * (BAR + GAP) + len({row["tokens"] for row in rows}) * GROUP


def panel(rows: list[dict[str, Any]], left: float, title: str, unit: str, fills: dict[str, str]) -> list[str]:
    """Bars to the right, grouped by tokens, with their values and thin lines from least to most."""
    start, width, height = left + LABELS, PANEL - LABELS - VALUES, height_of(rows)
    most = max(shown(row)[2] for row in rows)
    scale, step = width / most, step_of(most)
    out = [text(left, TOP - 14, title, size=15, more='font-weight="600"')]
    for i in range(int(most / step) + 1):
        x = start + i * step * scale
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}" stroke="{RULE}"/>')
        out.append(text(x, TOP + height + 16, f"{i * step:g}", "middle", 11, f'fill="{QUIET}"'))
    out.append(text(start + width / 2, TOP + height + 34, unit, "middle", 12, f'fill="{QUIET}"'))
    y, tokens = float(TOP), None
    for row in rows:
        if row["tokens"] != tokens:
            tokens = row["tokens"]
            words = f"{tokens} tokens" if row["measure"] == "prefill" else f"after {tokens} tokens"
            out.append(text(start - 8, y + GROUP - 6, words, "end", 12, 'font-weight="600"'))
            y += GROUP
        median, low, high = shown(row)
        middle = y + BAR / 2
        fill = fills[row["engine"]]
        out.append(f'<rect x="{start}" y="{y:.1f}" width="{median * scale:.1f}" height="{BAR}" rx="2" fill="{fill}"/>')
        ends = f'x1="{start + low * scale:.1f}" x2="{start + high * scale:.1f}"'
        out.append(f'<line {ends} y1="{middle:.1f}" y2="{middle:.1f}" stroke="{INK}" stroke-width="1.5"/>')
        out.append(text(start - 8, middle + 4, row["label"], "end", 12))
        out.append(text(start + max(median, high) * scale + 6, middle + 4, amount(median), more='font-weight="600"'))
        y += BAR + GAP
    return out


def svg(result: dict[str, Any]) -> str:
    about, rows = result["about"], result["summary"]
    titles = {
        "prefill": ("Prefill, more is better", "tokens a second"),
        "decode": ("Decoding, less is better", "milliseconds a token"),
    }
    groups = [(m, [row for row in rows if row["measure"] == m]) for m in MEASURES]
    groups = [(m, chosen) for m, chosen in groups if chosen]
    height = TOP + max(height_of(chosen) for _, chosen in groups) + 52
    total = PANEL * len(groups) + 40
    fills = colours(result["engines"])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" viewBox="0 0 {total} {height}" '
        'font-family="Inter, Helvetica, Arial, sans-serif">',
        f'<rect width="{total}" height="{height}" fill="{PAPER}"/>',
        text(24, 28, f"{about['model']} on {about['threads']} threads", size=17, more='font-weight="700"'),
        text(24, 46, f"{about['date']}, {machine_line(about)}", size=11, more=f'fill="{QUIET}"'),
    ]
    for index, (measure, chosen) in enumerate(groups):
        out += panel(chosen, 24 + index * PANEL, *titles[measure], fills)
    return "\n".join([*out, "</svg>"]) + "\n"


# ---- files -----------------------------------------------------------------------------------------


def write(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    runs = [json.dumps(run) for run in result["runs"]]
    rest = json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1, ensure_ascii=False)
    # One raw run a line: short, and still to be read and compared.
    whole = rest.removesuffix("\n}") + ',\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"
    contents = {".md": markdown(result, name), ".json": whole, ".svg": svg(result)}
    paths = [folder / f"{name}{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths
