#!/usr/bin/env python3
"""Draws what Refrain's measurements write, as SVG, PNG or PDF by the name of --out.

    refrain bench decode --csv decode.csv      # or bench memory
    python3 tools/plot.py curves decode.csv --title "Decoding under eviction policies" --out decode.svg

    cargo run --release -p refrain-bench -- kernels --json kernels.json
    python3 tools/plot.py roofline kernels.json --out kernels.svg

    python3 tools/plot.py peers docs/results/peers-smollm2-135m.json --out peers.svg

Needs matplotlib (tools/requirements-plot.txt).
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 9,
        "grid.color": "#e4e7eb",
        "legend.frameon": False,
        # The same data give the same bytes.
        "svg.hashsalt": "refrain",
        # Text stays text.
        "svg.fonttype": "none",
        # Colours that colour-blind people tell apart (Okabe and Ito).
        "axes.prop_cycle": matplotlib.cycler(
            color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"]
        ),
    }
)
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator  # noqa: E402

MARKERS = "osv^Dp"


def save(figure: Any, out: Path) -> None:
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, bbox_inches="tight", metadata=metadata)
    plt.close(figure)


def binary(value: float, _: object = None) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


class BinaryLocator(MaxNLocator):
    """Ticks at whole numbers of bytes' binary units."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        unit = 1
        while unit * 1024 <= max(abs(vmin), abs(vmax)):
            unit *= 1024
        return super().tick_values(vmin / unit, vmax / unit) * unit


def label_axis(axis: Any, label: str) -> None:
    """Labels an axis; a label that ends with `(bytes)` or `(s)` gives the figures their unit."""
    name, _, unit = label.partition(" (")
    if unit == "bytes)":
        axis.set_major_locator(BinaryLocator(steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(binary))
    elif unit == "s)":
        axis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_label_text(name if unit in ("bytes)", "s)") else label)


# ---- curves of bench decode and bench memory -------------------------------------------------------


def read_curves(path: Path) -> dict[str, dict[str, Any]]:
    """Charts by title: labels of x and y, and points by series. A line fills one column of x and one of y."""
    charts: dict[str, dict[str, Any]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chart, series = row.pop("chart"), row.pop("series")
            (x, x_value), (y, y_value) = [(axis, float(value)) for axis, value in row.items() if value]
            found = charts.setdefault(chart, {"x": x, "y": y, "series": {}})
            found["series"].setdefault(series, []).append((x_value, y_value))
    return charts


def curves(path: Path, out: Path, title: str) -> None:
    charts = read_curves(path)
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.1 * rows), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for chart in charts.values() for name in chart["series"]))
    for panel, (heading, chart) in zip(panels.flat, charts.items(), strict=False):
        for name, points in chart["series"].items():
            # Full attention is dashed: what the policies are compared with.
            style = "--" if name.startswith("full") else "-"
            marker = "o" if len(points) <= 12 else None
            panel.plot(*zip(*points, strict=True), style, color=f"C{names.index(name)}", marker=marker, ms=4, label=name)
        xs = sorted({x for points in chart["series"].values() for x, _ in points})
        if len(xs) <= 6 and xs[0] > 0 and xs[-1] >= 8 * xs[0]:
            panel.set_xscale("log")
            panel.set_xticks(xs, [f"{x:g}" for x in xs])
            panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(heading, loc="left", fontsize=10)
        label_axis(panel.xaxis, chart["x"])
        label_axis(panel.yaxis, chart["y"])
    for panel in panels.flat[len(charts) :]:
        panel.set_axis_off()
    handles = {label: handle for p in panels.flat for handle, label in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    save(figure, out)


# ---- kernels under the machine's roofs -------------------------------------------------------------


def roofline(path: Path, out: Path, title: str) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    about, rows = result["about"], [row for row in result["results"] if not row["one_thread"]]
    peaks = result["peaks"]["all_threads"]
    figure, panel = plt.subplots(figsize=(9, 6))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for index, kernel in enumerate(kernels):
        own = [row for row in rows if row["kernel"] == kernel]
        marker = MARKERS[index % len(MARKERS)]
        panel.scatter([r["intensity"] for r in own], [r["flops"] for r in own], marker=marker, label=kernel, zorder=3)
    for number, row in enumerate(rows, 1):
        at = (row["intensity"], row["flops"])
        panel.annotate(str(number), at, (4, 3), textcoords="offset points", fontsize=7)
    shapes = "\n".join(f"{number:2} {row['kernel']} {row['shape']}" for number, row in enumerate(rows, 1))
    panel.text(1.02, 1, shapes, transform=panel.transAxes, va="top", fontsize=7, linespacing=1.6)
    low = min([row["intensity"] for row in rows], default=1) / 2
    high = 4 * max([row["intensity"] for row in rows] + [peaks["bf16_flops"] / peaks["read_bytes"]])
    for name, peak in (("f32", peaks["f32_flops"]), ("bf16", peaks["bf16_flops"])):
        ridge = peak / peaks["read_bytes"]
        panel.plot([low, ridge, high], [low * peaks["read_bytes"], peak, peak], color="#616e7c", lw=1)
        panel.annotate(f"{name} {peak / 1e9:.0f} GFLOP/s", (high, peak), (0, 3), textcoords="offset points", ha="right")
    note = f"memory read {peaks['read_bytes'] / 1e9:.0f} GB/s"
    panel.annotate(note, (low, low * peaks["read_bytes"]), (8, 2), textcoords="offset points")
    panel.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    panel.set_title(f"{title}\n{about['cpu']}, {about['threads']} threads, {about['isa']}", loc="left")
    panel.legend(loc="lower right")
    save(figure, out)


# ---- Refrain beside other engines ------------------------------------------------------------------

SHADES = {
    "refrain": ["#0f766e", "#2dd4bf"],
    "llama.cpp": ["#c2610c", "#e8954a", "#f2bd8d"],
    "transformers": ["#5b6b8c"],
}
PANELS = {
    "prefill": ("Prefill, more is better", "tokens a second", "{} tokens"),
    "decode": ("Decoding, less is better", "milliseconds a token", "after {} tokens"),
}


def shown(row: dict[str, Any]) -> tuple[float, float, float]:
    """Median, least and most as people read them: tokens a second, or milliseconds a token."""
    if row["measure"] == "prefill":
        return tuple(row["tokens"] / row[key] for key in ("median", "max", "min"))
    return tuple(1000 * row[key] for key in ("median", "min", "max"))


def amount(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def peers(path: Path, out: Path, title: str) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    about, rows = result["about"], result["summary"]
    colours: dict[str, str] = {}
    for engine in result["engines"]:
        used = sum(known.partition(":")[0] == engine["engine"] for known in colours)
        shades = SHADES[engine["engine"]]
        colours[engine["spec"]] = shades[min(used, len(shades) - 1)]
    measured = [measure for measure in PANELS if any(row["measure"] == measure for row in rows)]
    most = max(sum(row["measure"] == measure for row in rows) for measure in measured)
    figure, panels = plt.subplots(
        1, len(measured), figsize=(6 * len(measured), 1.2 + 0.28 * most), squeeze=False, layout="constrained"
    )
    for panel, measure in zip(panels.flat, measured, strict=True):
        heading, unit, group = PANELS[measure]
        own = [row for row in rows if row["measure"] == measure]
        at, labels, lengths = 0.0, [], None
        for row in own:
            if row["tokens"] != lengths:
                lengths = row["tokens"]
                labels.append((at, group.format(lengths)))
                at += 1
            median, low, high = shown(row)
            panel.barh(at, median, height=0.8, color=colours[row["engine"]])
            panel.plot([low, high], [at, at], color="#1c2430", lw=1)
            panel.annotate(amount(median), (max(median, high), at), (4, -3), textcoords="offset points", fontsize=8)
            labels.append((at, row["label"]))
            at += 1
        panel.set_yticks(*zip(*labels, strict=True))
        for tick, (_, label) in zip(panel.get_yticklabels(), labels, strict=True):
            tick.set_fontweight("bold" if "tokens" in label else "normal")
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_title(heading, loc="left")
        panel.set_xlabel(unit)
    figure.suptitle(f"{title or about['model']} on {about['threads']} threads, {about['date']}, {about['machine']['cpu']}")
    save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for draw, help, title in (
        (curves, "CSV of refrain bench decode or memory", ""),
        (roofline, "JSON of refrain-bench kernels", "Kernels under the machine's roofs"),
        (peers, "JSON of tools/bench_peers.py", ""),
    ):
        kind = kinds.add_parser(draw.__name__, help=help)
        kind.add_argument("data", type=Path)
        kind.add_argument("--out", type=Path, required=True, help="a file .svg, .png or .pdf")
        kind.add_argument("--title", default=title)
        kind.set_defaults(draw=draw)
    args = parser.parse_args()
    args.draw(args.data, args.out, args.title)


if __name__ == "__main__":
    main()
