#!/usr/bin/env python3
"""Makes tests/golden/kvpress/*.json: which tokens NVIDIA's kvpress keeps, given queries and keys.

    python -m venv target/kvpress && target/kvpress/bin/pip install -r tools/requirements-kvpress.txt
    target/kvpress/bin/python tools/golden_kvpress.py

The packages are those of tools/requirements-kvpress.txt, not of tools/requirements.txt: kvpress wants an
older transformers.

kvpress's own classes choose; only queries, keys and attention weights are made here, in float64. A file
holds `made_by` and `cases`, one a line:
  heads, kv_heads, head_dim, tokens   shape; head h attends to KV head h // (heads / kv_heads)
  capacity                            tokens kept in each KV head
  window, kernel                      of snap_kv
  sinks                               of streaming_llm
  q                                   rotated queries (rows, heads, head_dim), flat; the rows are the last
                                      `window` tokens (snap_kv) or all tokens (observed_attention)
  k                                   rotated keys (kv_heads, tokens, head_dim), flat
  kept                                for each KV head the tokens kept, ascending
streaming_llm has neither q nor k. Numbers have 3 decimals. No choice hangs on a near tie: the worst kept
score of a KV head lies above its best dropped one by MARGIN of itself.
"""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from kvpress import ObservedAttentionPress, SnapKVPress, StreamingLLMPress

OUT = Path(__file__).resolve().parent.parent / "tests/golden/kvpress"
SPREAD = 1.5  # standard deviation of queries and keys: attention far from flat
MARGIN = 1e-4


def case(heads, kv_heads, head_dim, tokens, **options):
    return dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, **options)


SNAP_KV = [
    case(4, 4, 8, 40, capacity=12, window=4, kernel=1),
    case(4, 2, 16, 96, capacity=32, window=8, kernel=5),
    case(8, 2, 8, 120, capacity=40, window=16, kernel=7),
    case(14, 2, 8, 73, capacity=25, window=8, kernel=5),
    case(7, 1, 16, 57, capacity=20, window=5, kernel=3),
    case(4, 1, 16, 101, capacity=60, window=12, kernel=3),
    case(2, 2, 8, 64, capacity=17, window=16, kernel=7),
    case(6, 3, 8, 48, capacity=47, window=8, kernel=5),
]
STREAMING_LLM = [
    case(4, 2, 8, 60, capacity=20, sinks=4),
    case(4, 4, 8, 41, capacity=13, sinks=0),
    case(2, 1, 16, 100, capacity=3, sinks=2),
    case(6, 2, 8, 50, capacity=49, sinks=4),
]
OBSERVED_ATTENTION = [
    case(2, 2, 8, 40, capacity=13),
    case(4, 2, 16, 60, capacity=20),
    case(6, 2, 8, 72, capacity=30),
    case(3, 1, 16, 50, capacity=49),
]


def normal(rng, *shape):
    """Numbers of 3 decimals, none of them -0."""
    return torch.from_numpy(np.round(SPREAD * rng.standard_normal(shape), 3) + 0.0)


def attention(q, k):
    """(1, heads, tokens, tokens) from the last queries (rows, heads, head_dim) and all keys
    (kv_heads, tokens, head_dim). Rows of earlier queries are NaN: nothing may read them."""
    (rows, heads, head_dim), (kv_heads, tokens, _) = q.shape, k.shape
    scores = torch.einsum("rhd,htd->hrt", q, k.repeat_interleave(heads // kv_heads, 0)) / head_dim**0.5
    future = torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1)
    weights = torch.full((1, heads, tokens, tokens), torch.nan, dtype=torch.float64)
    weights[0, :, tokens - rows :] = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights


def choose(press, case, k, weights):
    """What the press keeps, (kv_heads, capacity), and how far its choice is from a tie."""
    tokens, capacity = case["tokens"], case["capacity"]
    config = SimpleNamespace(num_attention_heads=case["heads"], num_key_value_heads=case["kv_heads"])
    module = SimpleNamespace(config=config, head_dim=case["head_dim"])
    # As values the tokens' own numbers, so that what compress returns tells which it kept.
    values = torch.arange(tokens).view(1, 1, tokens, 1).expand(1, *k.shape)
    args = module, torch.zeros(1, tokens, 1), k[None], values, weights, {}
    kept = press.compress(*args)[1][0, :, :, 0].sort().values
    assert kept.shape == (case["kv_heads"], capacity), kept.shape
    best = press.score(*args)[0].sort(descending=True).values
    return kept, (1 - best[:, capacity] / best[:, capacity - 1]).min().item()


def golden(name, index, case):
    # Half a token more than the capacity: rounding cannot take one away.
    ratio = 1 - (case["capacity"] + 0.5) / case["tokens"]
    if name == "streaming_llm":
        press = StreamingLLMPress(ratio, n_sink=case["sinks"])
        kept, _ = choose(press, case, torch.zeros(case["kv_heads"], case["tokens"], case["head_dim"]), None)
        return case | {"kept": kept.tolist()}
    snap = name == "snap_kv"
    press = SnapKVPress(ratio, case["window"], case["kernel"]) if snap else ObservedAttentionPress(ratio)
    rows = case["window"] if snap else case["tokens"]
    for draw in range(100):
        rng = np.random.default_rng([index, draw])
        q = normal(rng, rows, case["heads"], case["head_dim"])
        k = normal(rng, case["kv_heads"], case["tokens"], case["head_dim"])
        kept, margin = choose(press, case, k, attention(q, k))
        if margin >= MARGIN:
            return case | {"q": q.flatten().tolist(), "k": k.flatten().tolist(), "kept": kept.tolist()}
    raise SystemExit(f"{name}: case {index} is always near a tie")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    made_by = f"tools/golden_kvpress.py with kvpress {version('kvpress')}, torch {version('torch')}"
    files = {"snap_kv": SNAP_KV, "streaming_llm": STREAMING_LLM, "observed_attention": OBSERVED_ATTENTION}
    for name, cases in files.items():
        lines = (json.dumps(golden(name, i, c), separators=(",", ":")) for i, c in enumerate(cases))
        path = OUT / f"{name}.json"
        path.write_text(f'{{"made_by":"{made_by}","cases":[\n' + ",\n".join(lines) + "\n]}\n")
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
