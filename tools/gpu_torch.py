#!/usr/bin/env python3
"""Times of torch on a GPU for the calls of `refrain-bench kernels --device cuda` that it has: products, without the norms before them, and attention.

Writes JSON with the names and shapes of that program, for `refrain-bench targets --torch`. `--tiny` takes the small shapes, on the CPU. Exits with
3 where torch is missing or sees no GPU.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

MISSING = 3
LLAMA = {"hidden": 4096, "heads": 32, "kv": 8, "dim": 128, "inside": 14336, "rows": [1, 8, 512, 4096], "keys": 4096,
         "row_keys": [4096, 32768], "selected_of": 6144}
TINY = {"hidden": 64, "heads": 4, "kv": 2, "dim": 64, "inside": 96, "rows": [1, 2, 17, 33], "keys": 40, "row_keys": [40, 70],
        "selected_of": 60}


class Bench:
    """Medians of calls on a device. Operands rotate, so that no call finds its own in a cache."""

    def __init__(self, torch, device, runs):
        self.torch, self.device, self.runs = torch, device, runs
        self.rotation = 512 << 20 if device == "cuda" else 1
        self.results = []

    def random(self, *shape):
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.float32).to(self.torch.bfloat16)

    def copies(self, make, size, few):
        return [make() for _ in range(max(1, -(-self.rotation // size)) if few else 1)]

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def time(self, kernel, shape, call, operands):
        """Runs of as many calls as take ten milliseconds."""
        calls = 1
        while True:
            begun = time.perf_counter()
            for turn in range(calls):
                call(*operands[turn % len(operands)])
            self.wait()
            if time.perf_counter() - begun > 1e-2 or self.device != "cuda":
                break
            calls *= 2
        times = []
        for _ in range(self.runs):
            begun = time.perf_counter()
            for turn in range(calls):
                call(*operands[turn % len(operands)])
            self.wait()
            times.append((time.perf_counter() - begun) / calls)
        self.results.append({"kernel": kernel, "shape": shape, "median_seconds": statistics.median(times)})


def products(bench, sizes):
    hidden, inside = sizes["hidden"], sizes["inside"]
    q, kv = sizes["heads"] * sizes["dim"], sizes["kv"] * sizes["dim"]
    linear = bench.torch.nn.functional.linear
    silu = bench.torch.nn.functional.silu
    for rows in sizes["rows"]:
        x = bench.random(rows, hidden)
        weights = bench.copies(lambda: (bench.random(q + 2 * kv, hidden),), 2 * (q + 2 * kv) * hidden, rows <= 16)
        bench.time("product, q k v", f"{rows}×{hidden}×{q + 2 * kv}", lambda w, x=x: linear(x, w), weights)
        attended = bench.random(rows, q)

        def layer():
            return (bench.random(hidden, q), bench.random(2 * inside, hidden), bench.random(hidden, inside))

        def tail(output, gate_up, down, x=x, attended=attended):
            y = x + linear(attended, output)
            gate, up = linear(y, gate_up).chunk(2, -1)
            return y + linear(silu(gate) * up, down)

        weights = bench.copies(layer, 2 * (hidden * q + 3 * hidden * inside), rows <= 16)
        bench.time("products, output and MLP", f"{rows}×{hidden}, {inside} inside", tail, weights)


def attention(bench, sizes):
    attend = bench.torch.nn.functional.scaled_dot_product_attention
    heads, kv = sizes["heads"], sizes["kv"]

    # Heads of a group share keys and values where this version of torch can; else each has its own copy.
    try:
        attend(bench.random(1, 2, 8, 64), bench.random(1, 1, 8, 64), bench.random(1, 1, 8, 64), enable_gqa=True)
        copies, shared = 1, {"enable_gqa": True}
    except (TypeError, RuntimeError):
        copies, shared = heads // kv, {}

    def case(kernel, rows, keys, dim, few=False, **options):
        query = bench.random(1, heads, rows, dim)
        options |= shared

        def pair():
            return [bench.random(1, kv, keys, dim).repeat_interleave(copies, 1) for _ in range(2)]

        operands = bench.copies(pair, 4 * copies * kv * keys * dim, few)
        shape = f"{rows}×{keys}, {heads}/{kv} heads of {dim}"
        bench.time(kernel, shape, lambda k, v: attend(query, k, v, **options), operands)

    for dim in (64, 128):
        case("attention, prefill", sizes["keys"], sizes["keys"], dim, is_causal=True)
    for keys in sizes["row_keys"]:
        case("attention, one row", 1, keys, sizes["dim"], few=True)
    prompt = sizes["selected_of"]
    count = prompt * 15 // 100
    ends = bench.torch.tensor([row * prompt // count for row in range(1, count + 1)], device=bench.device)
    mask = bench.torch.arange(prompt, device=bench.device)[None, :] < ends[:, None]
    case("attention, 15 % of rows", count, prompt, sizes["dim"], attn_mask=mask)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file that is written")
    parser.add_argument("--runs", type=int, default=9, help="runs of each call [%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gpu_torch: torch is not installed", file=sys.stderr)
        return MISSING
    if not args.tiny and not torch.cuda.is_available():
        print("gpu_torch: torch sees no GPU", file=sys.stderr)
        return MISSING
    bench = Bench(torch, "cpu" if args.tiny else "cuda", args.runs)
    sizes = TINY if args.tiny else LLAMA
    with torch.inference_mode():
        products(bench, sizes)
        attention(bench, sizes)
    device = "cpu" if args.tiny else torch.cuda.get_device_name()
    report = {"about": {"torch": torch.__version__, "device": device, "runs": args.runs}, "results": bench.results}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
