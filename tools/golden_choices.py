#!/usr/bin/env python3
"""Makes tests/golden/choices.json: what A3, CacheBlend, ProphetKV, InfoFlow, RelaxKV and SamKV choose on tiny models, and what follows.

It evaluates the equations of docs/methods.md in float64 with the model of golden_drift.py. It needs numpy alone:

    python tools/golden_choices.py

choices.json is a list of prompts as drift.json has one; their cases have besides:
  layer_rows   document rows computed at each layer
  kept         of SamKV: [start, end] of the document tokens that the question sees, for each layer
  ambiguous    of SamKV: how often the kept blocks' score was not above the lowest
A choice that rounding could change is refused: the draw (the generator's seed) is then another.
"""

import json

import numpy as np

from golden_drift import ROOT, Model, answer, between

MARGIN = 1e-4


def best(scores, count):
    """Indices of the `count` highest scores; of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if 0 < count < len(order):
        last, next_one = scores[order[count - 1]], scores[order[count]]
        assert last - next_one > MARGIN * max(abs(last), abs(next_one)), "two scores are too near"
    return order[:count]


class Prompt:
    """Token ids of a prompt `S, D1.., Q` with an answer, and its cache: keys before RoPE and values."""

    def __init__(self, model, system, chunks, question, forced, prefix):
        self.model, self.forced, self.prefix = model, forced, prefix
        self.system, self.chunks, self.tail = system, chunks, question
        self.spans, start = [], len(system)
        for chunk in chunks:
            self.spans.append(range(start, start + len(chunk)))
            start += len(chunk)
        self.documents, self.question = range(len(system), start), range(start, start + len(question))
        self.prompt = system + sum(chunks, []) + question
        self.exact = [prefix == system] + [False] * (len(chunks) - 1)
        alone = [model.prefill(system)] + [model.prefill(prefix + chunk, len(prefix)) for chunk in chunks]
        self.cache = [tuple(np.concatenate([part[layer][side] for part in alone]) for side in (0, 1)) for layer in range(model.layers)]

    def ids(self, every):
        return dict(all=every, spans=self.spans, question=(self.question.start, self.question.stop))

    def reusable(self):
        return [t for span, exact in zip(self.spans, self.exact) if not exact for t in span]

    def run(self, rows, select):
        """Logits after prompt and answer; `rows` are computed at layer 0 and go on as `select` says."""
        return answer(self.model, self.ids(self.prompt + self.forced), self.cache, rows, self.exact, select=select)[1]

    def probe(self, score, layers):
        """Scores of the question alone over the reused keys and values, summed over layers."""
        found = {}

        def see(layer, q, keys, _, active):
            found[layer] = score(layer, q[-len(self.question) :], keys)

        answer(self.model, self.ids(self.prompt), self.cache, [], self.exact, select=see)
        return [found[layer] for layer in layers]

    def attention(self, softmax):
        """How the question's rows see document tokens: (layer, q, keys) -> rows x documents, or heads x rows x documents."""
        model, s, end = self.model, self.documents.start, self.documents.stop
        columns = {"documents": self.documents, "prompt": range(self.question.stop)}.get(softmax, range(s, self.question.stop))
        own = slice(s - columns.start, end - columns.start)

        def weights(layer, q, keys):
            if softmax != "concatenated":
                return model.attend(layer, q, self.question, keys[columns.start : columns.stop], columns)[:, :, own]
            q = model.rotate(layer, q, self.question).reshape(len(q), -1)
            k = model.rotate(layer, keys[columns.start : columns.stop], columns)
            k = k.repeat(model.heads // model.kv_heads, 1).reshape(len(k), -1)
            z = q @ k.T / np.sqrt(model.heads * model.d)
            z = np.where(np.asarray(columns)[None] <= np.asarray(self.question)[:, None], z, -np.inf)
            e = np.exp(z - z.max(-1, keepdims=True))
            return (e / e.sum(-1, keepdims=True))[:, own]

        return weights


def share(ratio, tokens):
    return int(ratio * tokens + 1e-9)


def smoothed(scores, taps):
    padded = np.pad(scores, taps // 2)
    return np.array([padded[t : t + taps].sum() / taps for t in range(len(scores))])


def selecting(prompt, checks, scores, counts):
    """Layers before the first of `checks` in full; at each of them the best of the rows that are left go on."""
    rows_at = []
    taken = dict(zip(checks, counts))

    def select(layer, q, keys, values, active):
        rows = [t for t in active if t < prompt.question.start]
        rows_at.append(rows)
        if layer not in taken:
            return None
        question = [i for i, t in enumerate(active) if t in prompt.question]
        of = scores(layer, q[question], keys, values, rows)
        return [rows[i] for i in best(of, taken[layer])]

    logits = prompt.run(prompt.reusable(), select)
    return dict(rows=rows_at[-1], layer_rows=[len(rows) for rows in rows_at], logits=logits)


def before_question(prompt, ratio):
    """floor(r (n - |Q|)), at most what is reusable."""
    return min(share(ratio, prompt.question.start), len(prompt.reusable()))


def a3(prompt, ratio=0.15, charge=0.0, smoothing=5, softmax="concatenated", check=1):
    weights, start = prompt.attention(softmax), prompt.documents.start
    layers, reusable = prompt.model.layers, len(prompt.reusable())
    count = before_question(prompt, ratio)
    if charge:
        left = charge * len(prompt.documents) * layers - (check + 1) * reusable
        count = share(left / (layers - check - 1), 1)

    def scores(layer, q, keys, _, rows):
        found = weights(layer, q, keys)
        found = found.sum(0) if softmax == "concatenated" else found.sum((0, 1))
        return smoothed(found, smoothing)[[t - start for t in rows]]

    return selecting(prompt, [check], scores, [count])


def cache_blend(prompt, ratio=0.15, metric="v_l2", gradual=False):
    def scores(layer, _, keys, values, rows):
        old_keys, old_values = prompt.cache[layer]
        delta = values[rows] - old_values[rows] if metric == "v_l2" else keys[rows] - old_keys[rows]
        return (np.abs(delta) if metric == "k_l1" else delta**2).sum((1, 2))

    after = range(2, prompt.model.layers)
    if not gradual:
        return selecting(prompt, [1], scores, [before_question(prompt, ratio)])
    ratios = np.linspace(1.25 * ratio, 0.75 * ratio, len(after))
    return selecting(prompt, [layer - 1 for layer in after], scores, [before_question(prompt, r) for r in ratios])


def recomputed(prompt, scores, count):
    """The best reusable tokens go through all layers."""
    tokens = prompt.reusable()
    of = [scores[t - prompt.documents.start] for t in tokens]
    rows = sorted(tokens[i] for i in best(of, count))
    return dict(rows=rows, layer_rows=[len(rows)] * prompt.model.layers, logits=prompt.run(rows, None))


def prophet_kv(prompt, ratio=0.2):
    weights = prompt.attention("documents")
    found = prompt.probe(lambda *layer: weights(*layer).mean((0, 1)), range(prompt.model.layers))
    return recomputed(prompt, np.mean(found, 0), share(ratio, len(prompt.reusable())))


def info_flow(prompt, ratio=0.15, start=0.55, end=0.65, reorder=False):
    weights = prompt.attention("prompt")
    layers = between(start, end, prompt.model.layers)
    found = sum(prompt.probe(lambda *layer: np.sqrt((weights(*layer).mean(0) ** 2).sum(0)), layers))
    count = min(share(ratio, len(prompt.documents)), len(prompt.reusable()))
    if not reorder:
        return recomputed(prompt, found, count)
    tokens = prompt.reusable()
    chosen = {tokens[i] for i in best([found[t - prompt.documents.start] for t in tokens], count)}
    density = [sum(t in chosen for t in span) / len(span) for span in prompt.spans]
    order = sorted(range(len(density)), key=lambda i: density[i])
    assert order != list(range(len(density))), "another order is what this case is about"
    chunks = [prompt.chunks[i] for i in order]
    again = Prompt(prompt.model, prompt.system, chunks, prompt.tail, prompt.forced, prompt.prefix)
    return info_flow(again, ratio, start, end)


def selected(prompt, ids, layers, merge=None):
    """Rows over a part of the cache. Each of `layers` has sets of document tokens: `question_sees`, `documents_see`, `written`, whose
    rows replace the cached ones, and `active`, which are computed. Returns mean queries of the question, and logits."""
    model, n, first, system = prompt.model, len(ids), prompt.question.start, range(prompt.documents.start)
    active = np.array(sorted(layers[0]["active"]) + list(range(first, n)))
    x = model.w["model.embed_tokens.weight"][[ids[i] for i in active]]
    queries = []
    for layer, of in enumerate(layers):
        q, k, v = model.project(layer, x)
        queries.append(q[[t in prompt.question for t in active]].mean(0))
        cached = prompt.cache[layer]
        both = [np.zeros((n, model.kv_heads, model.d)) for _ in cached]
        for full, old, new in zip(both, cached, (k, v)):
            full[:first] = old
            for i, t in enumerate(active):
                if t >= first:
                    full[t] = new[i]
                elif t in of["written"]:
                    full[t] = merge(new[i], old[t]) if merge else new[i]
        keys, values = both
        going = layers[layer + 1]["active"] if layer + 1 < len(layers) else set()
        stay = np.array([t >= first or t in going for t in active])
        x, q, active = x[stay], q[stay], active[stay]
        p = np.zeros((model.heads, len(active), n))
        for rows, seen in ((active < first, of["documents_see"]), (active >= first, of["question_sees"])):
            columns = np.array(sorted({*system, *seen, *range(first, n)}))
            weights = model.attend(layer, q[rows], active[rows], keys[columns], columns)
            p[:, np.flatnonzero(rows)[:, None], columns[None]] = weights
        x = model.finish(layer, x, p, values)
    return queries, model.logits(x[prompt.question.stop - 1 - first :])


def relax_kv(prompt, ratio=0.15):
    weights, start, tokens = prompt.attention("documents"), prompt.documents.start, prompt.reusable()
    found = prompt.probe(lambda *layer: weights(*layer).mean((0, 1)), range(prompt.model.layers))
    count = max(1, round(ratio * len(tokens)))
    picked = [{tokens[i] for i in best(scores[[t - start for t in tokens]], count)} for scores in found]
    fresh = [set().union(*picked[layer:]) for layer in range(len(picked))]
    common = dict(question_sees=prompt.documents, documents_see=fresh[0])
    layers = [dict(common, written=rows, active=rows) for rows in fresh]
    _, logits = selected(prompt, prompt.prompt + prompt.forced, layers)
    return dict(rows=sorted(fresh[-1]), layer_rows=[len(rows) for rows in fresh], logits=logits)


class Document:
    """What SamKV keeps of a document at a layer: of its blocks and its last tokens, by its own attention."""

    def __init__(self, model, layer, hidden, dropped, block, ends):
        q, k, _ = model.project(layer, hidden)
        rows = range(len(hidden))
        p = model.attend(layer, q, rows, k, rows)[:, dropped:, dropped:].mean(0)
        n = len(p)
        self.blocks = [range(at, min(at + block, n)) for at in range(0, n, block)]
        self.middle = range(ends[0], max(len(self.blocks) - ends[1], ends[0]))
        self.means = [k[dropped:][list(b)].mean(0) for b in self.blocks]
        self.last = q[dropped:][-ends[1] * block :].mean(0)
        received = np.array([p[t + 1 :, t].mean() if t + 1 < n else 0.0 for t in range(n)])
        self.representative = [b.start + best(received[list(b)], 1)[0] for b in self.blocks]
        self.alpha = [slope(p[t + 1 :, t]) for t in self.representative]
        finite = np.array([a for a in self.alpha if np.isfinite(a)])
        self.marked = [a < finite.mean() - 3 * finite.std() for a in self.alpha]
        if self.middle:
            self.max_block = self.middle.start + best([-self.alpha[b] for b in self.middle], 1)[0]
            self.min_block = self.middle.start + best([-received[self.representative[b]] for b in self.middle], 1)[0]


def slope(weights):
    """alpha of a(x) = c x^-alpha, by least squares of logarithms."""
    if len(weights) < 8:
        return np.inf
    return -np.polyfit(np.log(np.arange(1, len(weights) + 1)), np.log(np.maximum(weights, 1e-8)), 1)[0]


def cosine(a, b):
    return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())


def sam_kv(prompt, block=64, ends=(1, 2), fusion=True, below=0.0, share_of_blocks=0.0, stable=0):
    model, layers, count = prompt.model, range(prompt.model.layers), len(prompt.spans)
    documents = [offline(model, prompt.prefix, chunk, block, ends) for chunk in prompt.chunks]

    def tokens(i, b):
        return {prompt.spans[i].start + t for t in documents[i][0].blocks[b]}

    blocks = [range(len(d[0].blocks)) for d in documents]
    base = set().union(*(tokens(i, b) for i in range(count) for b in blocks[i] if b not in documents[i][0].middle))
    nothing = dict(question_sees=base, documents_see=base, written=set(), active=set())
    queries, _ = selected(prompt, prompt.prompt, [nothing] * len(layers))

    def grouped(x):
        return x.reshape(model.kv_heads, -1, model.d).mean(1)

    # Equations 1 to 3; stable are the last max(4, L/8) layers.
    asked, scores, fractions, ambiguous = {}, {}, np.zeros(count), 0
    stable = list(layers)[-(stable or max(4, len(layers) // 8)) :]
    for layer in layers:
        q = queries[layer]
        for i in range(count):
            others = [documents[j][layer].last for j in range(count) if j != i]
            towards = sum(np.array([abs(cosine(a, b)) for a, b in zip(q, other)])[:, None] * other for other in others)
            own = documents[i][layer]
            asked[layer, i] = grouped(q + towards / (count - 1) if others else q)
            scores[layer, i] = s = np.array([(asked[layer, i] * mean).sum() for mean in own.means])
            if not own.middle or layer not in stable:
                continue
            anchor = np.mean([s[b] for b in blocks[i] if b not in own.middle])
            highest, lowest = s[own.max_block], s[own.min_block]
            assert min(abs(anchor - highest), abs(anchor - lowest)) > MARGIN * np.abs(s).max(), "the anchor is too near"
            if anchor <= lowest:
                ambiguous += 1
                fractions[i] += below / len(stable)
            elif anchor <= highest:
                fractions[i] += (highest - anchor) / (highest - lowest) / len(stable)
    if share_of_blocks:
        fractions[:], ambiguous = share_of_blocks, 0
    exactly = [fractions[i] * len(blocks[i]) for i in range(count)]
    # Fractions that are made of zeros and ones alone are exact.
    assert share_of_blocks or all(not 1e-9 < abs(x - round(x)) < MARGIN for x in exactly), "a fraction is too near a whole"
    counts = [min(share(x, 1), len(documents[i][0].middle)) for i, x in enumerate(exactly)]
    quota = sum(counts) // count

    kept, written, marks = [], [], 0
    for layer in layers:
        found, normal = [], []
        for i in range(count):
            middle = documents[i][layer].middle
            for b in best(scores[layer, i][middle.start : middle.stop], counts[i]):
                found.append((i, middle.start + b))
                normal.append(cosine(asked[layer, i], documents[i][layer].means[middle.start + b]))
        found = [found[i] for i in best(normal, quota)]
        kept.append(base.union(*(tokens(*at) for at in found)))
        marked = {prompt.spans[i].start + documents[i][layer].representative[b] for i, b in found if documents[i][layer].marked[b]}
        marks += len(marked)
        written.append(base | marked)
    below_it = [set().union(*written[layer:]) for layer in layers] + [set()]
    plan = [
        dict(question_sees=kept[layer], documents_see=kept[layer] | below_it[layer + 1], written=written[layer], active=below_it[layer])
        for layer in layers
    ]

    def merge(new, old):
        theta = min(max(cosine(new, old), 0.0), 1.0)
        return theta * new + (1 - theta) * old

    _, logits = selected(prompt, prompt.prompt + prompt.forced, plan, merge if fusion else None)
    print(f"    blocks {counts}, of which {quota} stay; {marks} marked; {ambiguous} ambiguous")
    return dict(
        rows=sorted(written[-1]),
        layer_rows=[len(rows) for rows in below_it[:-1]],
        logits=logits,
        kept=[spans_of(sorted(tokens)) for tokens in kept],
        ambiguous=ambiguous,
    )


def offline(model, prefix, chunk, block, ends):
    """A Document for each layer."""
    ids, found = prefix + chunk, []
    x, rows = model.w["model.embed_tokens.weight"][ids], range(len(ids))
    for layer in range(model.layers):
        found.append(Document(model, layer, x, len(prefix), block, ends))
        q, k, v = model.project(layer, x)
        x = model.finish(layer, x, model.attend(layer, q, rows, k, rows), v)
    return found


def spans_of(tokens):
    starts = [t for t in tokens if t - 1 not in tokens]
    return [[start, next(t for t in range(start, tokens[-1] + 2) if t not in tokens)] for start in starts]


def golden(name, seed, lengths, asked):
    model = Model(ROOT / "tiny" / name)
    random = np.random.default_rng(seed)
    draw = lambda count: [int(i) for i in random.integers(3, 256, count)]
    system, question = draw(6), draw(5)
    chunks, forced = [draw(length) for length in lengths], draw(2)
    cases = []
    for method, prefix, choose, options in asked:
        prefix = system if prefix == "system" else [1]
        print(f"{name:8} {method:50} prefix {len(prefix)}")
        case = choose(Prompt(model, system, chunks, question, forced, prefix), **options)
        rounded = [[round(float(x), 5) for x in row] for row in case["logits"]]
        rows = [int(row) for row in case["rows"]]
        cases.append({**case, "prefix": prefix, "method": method, "rows": rows, "logits": rounded})
    return dict(model=name, system=system, chunks=chunks, question=question, answer=forced, cases=cases)


def main():
    every = [
        ("a3", "bos", a3, {}),
        ("a3", "system", a3, {}),
        ("a3:softmax=per_head,smoothing=1", "bos", a3, dict(softmax="per_head", smoothing=1)),
        ("a3:softmax=documents,ratio=0.3", "bos", a3, dict(softmax="documents", ratio=0.3)),
        ("a3:softmax=prompt,smoothing=3", "bos", a3, dict(softmax="prompt", smoothing=3)),
        ("cache_blend", "bos", cache_blend, {}),
        ("cache_blend", "system", cache_blend, {}),
        ("cache_blend:metric=k_l2", "bos", cache_blend, dict(metric="k_l2")),
        ("cache_blend:metric=k_l1,ratio=0.3", "bos", cache_blend, dict(metric="k_l1", ratio=0.3)),
        ("prophet_kv", "bos", prophet_kv, {}),
        ("prophet_kv:ratio=0.1", "system", prophet_kv, dict(ratio=0.1)),
        ("info_flow", "bos", info_flow, {}),
        ("info_flow", "system", info_flow, {}),
        ("info_flow:from=0.3,to=0.9,reorder=true", "bos", info_flow, dict(start=0.3, end=0.9, reorder=True)),
        ("relax_kv", "bos", relax_kv, {}),
    ]
    # Four layers, of which two have no RoPE.
    deeper = [
        ("a3:charge=0.7", "bos", a3, dict(charge=0.7)),
        ("a3:check_layer=2", "bos", a3, dict(check=2)),
        ("cache_blend:gradual=true", "bos", cache_blend, dict(gradual=True)),
        ("prophet_kv", "bos", prophet_kv, {}),
        ("info_flow:from=0.3,to=0.9", "bos", info_flow, dict(start=0.3, end=0.9)),
        ("relax_kv:ratio=0.1", "bos", relax_kv, dict(ratio=0.1)),
    ]
    few = dict(block=4, ends=(2, 1), share_of_blocks=0.4)
    sam = [
        ("sam_kv:block=8", "bos", sam_kv, dict(block=8)),
        ("sam_kv:block=8,update=overwrite,stable_layers=2", "bos", sam_kv, dict(block=8, fusion=False, stable=2)),
        ("sam_kv:block=8,below=one", "bos", sam_kv, dict(block=8, below=1.0)),
        ("sam_kv:block=4,initial_blocks=2,local_blocks=1,share=0.4", "bos", sam_kv, few),
    ]
    found = [
        golden("qwen2", 20, [40, 64, 23], every),
        golden("smollm3", 20, [40, 64, 23], deeper),
        golden("qwen2", 41, [140, 110, 23], sam),
        golden("smollm3", 19, [140, 110, 23], sam),
    ]
    (ROOT / "choices.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
