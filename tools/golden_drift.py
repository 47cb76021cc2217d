#!/usr/bin/env python3
"""Makes tests/golden/drift.json: scout and drift (docs/methods.md) on a tiny model, by an implementation of its own.

Everything is float64 and dense: chunks are prefilled behind a prefix, their keys kept before RoPE, stitched, and chosen rows
computed over the whole cache. It needs numpy alone:

    python tools/golden_drift.py

drift.json:
  model             folder under tests/golden/tiny
  system, chunks, question, answer   token ids; the answer's tokens are forced
  cases[]           prefix (ids that chunks are prefilled behind; of a model without BOS where there are none), method, rows (chosen positions), logits (of the prompt's last row
                    and of each answer token)
"""

import json
import struct
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent / "tests/golden"
MODEL = "qwen2"


def weights(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    for name, info in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + at for at in info["data_offsets"])
        assert info["dtype"] == "BF16", "bf16 is the upper half of an f32"
        bits = np.frombuffer(raw[start:end], "<u2").astype(np.uint32) << 16
        yield name, bits.view(np.float32).astype(np.float64).reshape(info["shape"])


class Model:
    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        self.w = dict(weights(folder / "model.safetensors"))
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.d = config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-np.arange(0, self.d, 2) / self.d)
        self.has_rope = config.get("no_rope_layers", [1] * self.layers)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def project(self, layer, x):
        """Queries, keys and values of rows, not rotated: rows x heads x d."""
        y = self.norm(x, f"model.layers.{layer}.input_layernorm.weight")

        def of(side, heads):
            at = f"model.layers.{layer}.self_attn.{side}_proj."
            return (y @ self.w[at + "weight"].T + self.w.get(at + "bias", 0)).reshape(len(x), heads, self.d)

        return of("q", self.heads), of("k", self.kv_heads), of("v", self.kv_heads)

    def rotate(self, layer, x, positions):
        if not self.has_rope[layer]:
            return x
        angle = np.asarray(positions)[:, None] * self.frequencies
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., : self.d // 2], x[..., self.d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def weigh(self, q, q_positions, k, k_positions):
        """Softmax weights, heads x rows x keys, of rotated queries and keys."""
        k = k.repeat(self.heads // self.kv_heads, 1)
        z = np.einsum("jhd,thd->hjt", q, k) / np.sqrt(self.d)
        z = np.where(np.asarray(k_positions)[None, None] <= np.asarray(q_positions)[None, :, None], z, -np.inf)
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def attend(self, layer, q, q_positions, k, k_positions):
        """Softmax weights of queries and keys before RoPE."""
        q, k = self.rotate(layer, q, q_positions), self.rotate(layer, k, k_positions)
        return self.weigh(q, q_positions, k, k_positions)

    def finish(self, layer, x, p, v):
        o = np.einsum("hjt,thd->jhd", p, v.repeat(self.heads // self.kv_heads, 1)).reshape(len(x), -1)
        at = f"model.layers.{layer}."
        x = x + o @ self.w[at + "self_attn.o_proj.weight"].T
        y = self.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ self.w[at + f"mlp.{side}_proj.weight"].T for side in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.w[at + "mlp.down_proj.weight"].T

    def logits(self, x):
        return self.norm(x, "model.norm.weight") @ self.w["model.embed_tokens.weight"].T

    def prefill(self, ids, dropped=0):
        """Keys before RoPE and values by layer, without the first rows."""
        x, positions, kept = self.w["model.embed_tokens.weight"][ids], range(len(ids)), []
        for layer in range(self.layers):
            q, k, v = self.project(layer, x)
            kept.append((k[dropped:], v[dropped:]))
            p = self.attend(layer, q, positions, k, positions)
            x = self.finish(layer, x, p, v)
        return kept


def between(start, end, layers):
    """The layers of Scout's options `from` and `to`."""
    first = int(start * layers + 1e-9)
    return range(first, max(first + 1, round(end * layers)))


def answer(model, ids, cache, rows, exact, drift=None, see=None, skip=0, select=None):
    """Logits of the last len(answer)+1 rows of `ids`; `cache` holds keys before RoPE and values of the first rows. Drift's sums
    leave out the first `skip` rows of each chunk. `select` says which of a layer's document rows go on from it, or None."""
    spans, last = ids["spans"], ids["question"]
    every = ids["all"]
    n, first_question = len(every), last[0]
    active = np.array(sorted(rows) + list(range(first_question, n)))
    x = model.w["model.embed_tokens.weight"][[every[i] for i in active]]
    seen = []
    for layer in range(model.layers):
        q, k, v = model.project(layer, x)
        keys = np.zeros((n, model.kv_heads, model.d))
        values = np.zeros_like(keys)
        keys[:first_question], values[:first_question] = cache[layer]
        if drift and layer > 0 and rows:
            chosen = active[: len(rows)]
            for fresh, all_rows in ((k, keys), (v, values)):
                d = fresh[: len(rows)] - all_rows[chosen]
                counted = [i for i, row in enumerate(chosen) if not any(row in span[:skip] for span in spans)]
                mean = d[counted].mean(0)
                for span, is_exact in zip(spans, exact):
                    if is_exact:
                        continue
                    own = [i for i in counted if chosen[i] in span]
                    m = (d[own].sum(0) + drift["lambda"] * mean) / (len(own) + drift["lambda"])
                    all_rows[span.start : span.stop] += drift["alpha"] * m
        keys[active], values[active] = k, v
        if select and (chosen := select(layer, q, keys, values, active)) is not None:
            stay = np.isin(active, chosen) | (active >= first_question)
            x, q, active = x[stay], q[stay], active[stay]
        p = model.attend(layer, q, active, keys, range(n))
        if see:
            question = [i for i, row in enumerate(active) if row in range(*last)]
            seen.append(p[:, question, spans[0].start : spans[-1].stop])
        x = model.finish(layer, x, p, values)
    return seen if see else (active, model.logits(x[-(n - last[1] + 1) :]))


def choose(model, seen, spans, exact, last, options):
    """Positions that Scout recomputes."""
    layers = between(options["from"], options["to"], model.layers)
    scores = 0
    for layer in layers:
        a = seen[layer]  # heads x rows x documents
        if options["rows"] == "last":
            a = a[:, -1:]
        if options["aggregation"] == "mean":
            scores = scores + a.mean((0, 1))
        elif options["aggregation"] == "l2":
            scores = scores + np.sqrt((a.mean(0) ** 2).sum(0))
        else:
            groups = a.reshape(model.kv_heads, -1, *a.shape[1:]).mean(1)
            scores = scores + groups.max((0, 1))
    start = spans[0].start
    documents = spans[-1].stop - start
    budget = options["charge"] * documents * model.layers - layers.stop * (last[1] - last[0])
    count = int(budget / model.layers + 1e-9)
    heads = [t for span, e in zip(spans, exact) if not e for t in span[: options["seam"]]]
    candidates = [t for span, e in zip(spans, exact) if not e for t in span]
    even = int(options["spread"] * (count - len(heads)) + 1e-9)
    for t in heads + [candidates[(2 * i + 1) * len(candidates) // (2 * even)] for i in range(even)]:
        scores[t - start] = np.inf
    best = sorted(candidates, key=lambda t: (-scores[t - start], t))[:count]
    return sorted(best)


def main():
    model = Model(ROOT / "tiny" / MODEL)
    random = np.random.default_rng(20)
    draw = lambda count: [int(i) for i in random.integers(3, 256, count)]
    system, question, forced = draw(6), draw(5), draw(4)
    chunks = [draw(40), draw(64), draw(23)]
    other = draw(9)
    bos = [1]
    defaults = dict(charge=0.4, rows="last", **{"from": 0.4, "to": 0.95}, aggregation="mean", seam=0, spread=0.0)
    asked = [
        ("scout:charge=0.4", bos, {}, None),
        ("drift:charge=0.4", bos, {}, {"alpha": 0.5, "lambda": 4.0}),
        ("drift:charge=0.25,alpha=0.7,lambda=1.5,seam=2", bos, {"charge": 0.25, "seam": 2}, {"alpha": 0.7, "lambda": 1.5}),
        (
            "scout:charge=0.3,rows=question,aggregation=l2,from=0.3,to=0.7",
            bos,
            {"charge": 0.3, "rows": "question", "aggregation": "l2", "from": 0.3, "to": 0.7},
            None,
        ),
        (
            "scout:charge=0.3,rows=question,aggregation=max",
            bos,
            {"charge": 0.3, "rows": "question", "aggregation": "max"},
            None,
        ),
        ("drift:charge=0.4", system, {}, {"alpha": 0.5, "lambda": 4.0}),
        ("drift:charge=0.4", other, {}, {"alpha": 0.5, "lambda": 4.0}),
        ("drift:charge=0.4,spread=0.5", bos, {"spread": 0.5}, {"alpha": 0.5, "lambda": 4.0}),
        ("drift:charge=0.4,spread=0", system, {"spread": 0.0}, {"alpha": 0.5, "lambda": 4.0}),
        ("drift:charge=0.4,seam=1", [], {"seam": 1}, {"alpha": 0.5, "lambda": 4.0}),
    ]
    spans, start = [], len(system)
    for chunk in chunks:
        spans.append(range(start, start + len(chunk)))
        start += len(chunk)
    every = system + sum(chunks, []) + question
    last = (start, len(every))
    ids = dict(all=every + forced, spans=spans, question=last)
    true_prefix = model.prefill(system)
    cases = []
    for method, prefix, options, drift in asked:
        alone = [model.prefill(prefix + chunk, len(prefix)) for chunk in chunks]
        cache = [
            tuple(np.concatenate([true_prefix[layer][side], *(chunk[layer][side] for chunk in alone)]) for side in (0, 1))
            for layer in range(model.layers)
        ]
        exact = [prefix == system] + [False] * (len(chunks) - 1)
        options = {**defaults, "spread": 0.1 if drift else 0.0, **options}
        prompt = dict(ids, all=every)
        seen = answer(model, prompt, cache, [], exact, see=True)
        rows = choose(model, seen, spans, exact, last, options)
        _, logits = answer(model, ids, cache, rows, exact, drift, skip=0 if prefix else 4)
        rounded = [[float(f"{x:.6g}") for x in row] for row in logits]
        cases.append(dict(prefix=prefix, method=method, rows=rows, logits=rounded))
        print(f"{method:60} prefix {len(prefix)}: {len(rows)} rows")
    golden = dict(model=MODEL, system=system, chunks=chunks, question=question, answer=forced, cases=cases)
    (ROOT / "drift.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
