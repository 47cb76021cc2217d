#!/usr/bin/env python3
"""Makes the golden files that the tests compare this engine with.

The reference is Hugging Face transformers: float32, CPU, eager attention. Versions are pinned in
`tools/requirements.txt`; this script needs nothing but the packages there:

    python -m venv .venv && .venv/bin/pip install -r tools/requirements.txt
    .venv/bin/python tools/golden.py tiny                     # tests/golden/tiny/<family>/
    .venv/bin/python tools/golden.py real MODEL.gguf ...      # tests/golden/real/<model>.json

tiny  Random-weight models of every family in Hugging Face folder layout (config.json, safetensors,
      here and there a tokenizer), each with a `golden.json`. Weights are stored in the named dtype
      and the golden logits are computed in float32 from those stored weights. Half of the configs
      are rewritten to the keys of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`);
      golden values are made from the folder as it lies on disk.
real  Prompt, logits, greedy continuation, tokenizer cases and rendered chats of a GGUF file.

golden.json of a tiny model:
  seed, dtype, exercises      how it was made and what it is there for
  ignoring                    config keys that leave the feature out (or "biases": all zero, "head norms": skipped), how far the logits
                              of each case move then, and the first position that moves
  cases[]                     ids; positions; logits (positions, vocab); argmax (at positions);
                              greedy (64 ids after the prompt, no KV cache); min_margin (smallest
                              top1-top2 gap on the way); f64_max_diff (float64 against float32)
  tokenizer[]                 text; ids (no special tokens added); ids_with_specials; decoded
  chat[]                      messages; rendered (add_generation_prompt=True)

Numbers have 6 significant digits. The same packages on the same kind of CPU give the same bytes;
elsewhere the last digits may differ.
"""

import argparse
import json
import os
import re
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from golden_cases import CHATS, FAMILIES, PROMPT, TEXTS, VISION
from golden_tokenizers import TOKENIZERS

STEPS = 64
MIN_MARGIN = 5e-3  # greedy paths closer to a tie than this are not worth testing
MIN_DISTINCT = 24  # distinct ids among the greedy ones: no one-token loops
MIN_IGNORING = 0.05  # a feature that moves no logit by this much is not tested at all


def versions(*packages):
    from importlib.metadata import version

    return ", ".join(f"{p} {version(p)}" for p in packages)


def digits(x):
    """Nested lists of floats at 6 significant digits."""
    return [digits(y) for y in x] if isinstance(x, (list, tuple)) else float(f"{x:.6g}")


def dump(path, obj):
    """JSON with one key, and one element of a list of lists or objects, per line."""

    def flat(x):
        return json.dumps(x, ensure_ascii=False, separators=(",", ":"))

    def block(x, pad):
        if isinstance(x, list) and x and isinstance(x[0], (list, dict)):
            return "[\n" + ",\n".join(pad + " " + block(y, pad + " ") for y in x) + "]"
        if isinstance(x, dict) and any(isinstance(v, list) for v in x.values()):
            return "{" + (",\n" + pad + " ").join(f"{flat(k)}:{block(v, pad + ' ')}" for k, v in x.items()) + "}"
        return flat(x)

    path.write_text(block(obj, "") + "\n", encoding="utf-8")


# ---- logits and greedy decoding -------------------------------------------------------------


@torch.no_grad()
def logits_of(model, ids):
    """(tokens, vocab)"""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(model, ids, steps=STEPS, cache=False):
    """`steps` ids after the prompt and the top1-top2 gap at each."""
    ids, out, gaps, past = list(ids), [], [], None
    for _ in range(steps):
        if cache:
            new = torch.tensor([ids if past is None else ids[-1:]])
            reply = model(new, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, last = reply.past_key_values, reply.logits[0, -1]
        else:
            last = logits_of(model, ids)[-1]
        top = torch.topk(last.float(), 2)
        out.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        ids.append(out[-1])
    return out, gaps


# ---- tiny models ----------------------------------------------------------------------------


def fill(model, rng):
    """Random weights under which every part matters: logits of a few units, attention far from flat."""
    tied = model.config.get_text_config().tie_word_embeddings
    less_one = "gemma" in model.config.model_type  # norms are stored less one
    for name, p in sorted(model.named_parameters()):
        x = rng.standard_normal(tuple(p.shape))
        if "norm" in name:
            # Gemma's embeddings are multiplied, so that what branches add must be large as well to matter.
            least = 5.5 if less_one and "post_" in name else 0.5
            x = rng.uniform(least, least + 1, tuple(p.shape)) - less_one
        elif name.endswith("bias"):
            x *= 0.5
        elif "embed_tokens" in name:
            # Gemma's are multiplied by the root of their width: a tied head would answer each token with itself.
            x *= 0.12 if less_one else 0.35 if tied else 1.0
        elif "lm_head" in name:
            x *= 3 / np.sqrt(p.shape[-1])
        else:
            gain = 1.5 if re.search("q_proj|k_proj|qkv_proj|gate|up", name) else 1.0
            x *= gain / np.sqrt(p.shape[-1])
        p.data.copy_(torch.from_numpy(x).float())


def to_old_keys(folder, spec):
    """Rewrites config.json to the keys that transformers 4 wrote."""
    path = folder / "config.json"
    c = json.loads(path.read_text())
    if "text_config" in c:
        c["torch_dtype"] = c.pop("dtype")
        c["text_config"] = old_gemma3_text(c["text_config"])
        return path.write_text(json.dumps(dict(sorted(c.items())), indent=2) + "\n")
    rope = c.pop("rope_parameters")
    c["torch_dtype"] = c.pop("dtype")
    c["rope_theta"] = rope.pop("rope_theta")
    if (partial := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        c["partial_rotary_factor"] = partial
    kind = rope.pop("rope_type")
    if kind == "longrope":  # Phi: "type", and the original length beside the dictionary
        c["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
        rope["type"] = kind
    elif kind != "default":
        rope["rope_type"] = kind
    c["rope_scaling"] = rope or None
    for key in ("layer_types", "head_dim"):  # many old configs have neither
        if key != "head_dim" or c.get(key) == c["hidden_size"] // c["num_attention_heads"]:
            c.pop(key, None)
    c["transformers_version"] = "4.46.0"
    c.update(spec.get("old_extra", {}))
    path.write_text(json.dumps(dict(sorted(c.items())), indent=2) + "\n")


def old_gemma3_text(c):
    """A text_config of Gemma 3 as it was first published: ropes by number, and nothing that its class has as a default."""
    ropes, kinds = c.pop("rope_parameters"), c.pop("layer_types")
    c |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_scaling": None}
    c |= {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    c |= {"sliding_window_pattern": kinds.index("full_attention") + 1}
    defaults = AutoConfig.for_model("gemma3_text").to_dict()
    old = {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    return {k: v for k, v in sorted(c.items()) if k == "model_type" or v != (defaults | old).get(k)}


def write_folder(folder, spec, seed):
    """Config and weights; returns the generator, which goes on to draw the prompts."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config, auto = AutoConfig.for_model(**spec["config"]), AutoModelForCausalLM
    if nested := spec.get("nested"):
        config = AutoConfig.for_model(nested, text_config=config.to_dict(), **VISION[nested])
        config.tie_word_embeddings = config.text_config.tie_word_embeddings
        auto = AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    fill(model, rng)
    model.to(getattr(torch, spec["dtype"]))
    model.save_pretrained(folder, max_shard_size=spec.get("shard", "5GB"))
    for f in folder.glob("*.safetensors"):
        f.chmod(0o644)
    if spec.get("old"):
        to_old_keys(folder, spec)
    return rng


def load(folder, **changes):
    config = AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    nested = config is not config.get_text_config()
    return (AutoModelForImageTextToText if nested else AutoModelForCausalLM).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def ignoring(folder, spec, cases, wanted):
    """How far logits move when the family's feature is left out; refuses a feature that does not show."""
    if "ignore" not in spec:
        return None
    changes = spec["ignore"]
    other = load(folder, **({} if isinstance(changes, str) else changes))
    if changes == "biases":
        for name, p in other.named_parameters():
            if name.endswith("bias"):
                p.data.zero_()
    elif changes == "head norms":
        for module in other.modules():
            if hasattr(module, "q_norm"):
                module.q_norm = module.k_norm = torch.nn.Identity()
    moved = [(logits_of(other, ids) - w).abs().max(dim=1).values for ids, w in zip(cases, wanted)]
    if max(m.max() for m in moved) < MIN_IGNORING:
        raise SystemExit(f"{folder.name}: {changes} changes nothing")
    first = [int((m > 1e-3).nonzero()[0]) if (m > 1e-3).any() else None for m in moved]
    return {
        "what": changes,
        "max_diff_per_case": digits([float(m.max()) for m in moved]),
        "first_position_that_moves_per_case": first,
    }


def make_tiny(out, name, spec):
    """Tries seeds from 0 up until every greedy path keeps clear of ties and of loops."""
    folder = out / name
    for seed in range(2000):
        rng = write_folder(folder, spec, seed)
        model = load(folder)
        cases = [rng.integers(3, spec["config"]["vocab_size"], n).tolist() for n in spec["prompts"]]
        paths = [greedy(model, ids) for ids in cases]
        if all(min(gaps) > MIN_MARGIN and len(set(path)) >= MIN_DISTINCT for path, gaps in paths):
            break
    else:
        raise SystemExit(f"{name}: no seed does")

    wanted = [logits_of(model, ids) for ids in cases]
    used = versions("transformers", "torch", "tokenizers", "numpy")
    golden = {
        "family": name,
        "exercises": spec["exercises"],
        "made_by": f"tools/golden.py tiny; {used}; float32, CPU, eager",
        "seed": seed,
        "dtype": spec["dtype"],
        "ignoring": ignoring(folder, spec, cases, wanted),
        "cases": [],
    }
    how = dict(max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    checks = [model.generate(torch.tensor([c]), **how) for c in cases]
    model.double()
    for ids, want, (path, gaps), check, at in zip(cases, wanted, paths, checks, spec["positions"]):
        assert check[0, len(ids) :].tolist() == path, f"{name}: generate() with a KV cache takes another path"
        golden["cases"].append(
            {
                "ids": ids,
                "positions": at,
                "logits": digits(want[at].tolist()),
                "argmax": want[at].argmax(-1).tolist(),
                "greedy": path,
                "min_margin": digits(min(gaps)),
                "f64_max_diff": digits(float((logits_of(model, ids) - want).abs().max())),
            }
        )
    if "tokenizer" in spec:
        tok = TOKENIZERS[spec["tokenizer"]](folder, spec["config"]["vocab_size"])
        golden["tokenizer"] = tokenizer_cases(tok, specials=True)
        golden["chat"] = chat_cases(tok)
    dump(folder / "golden.json", golden)
    size = sum(f.stat().st_size for f in folder.iterdir())
    spread = max(float(w.std()) for w in wanted)
    margins = [c["min_margin"] for c in golden["cases"]]
    print(f"{name}: seed {seed}, {size} bytes, logit std {spread:.2f}, min margins {margins}")
    if size > 300_000:
        raise SystemExit(f"{name}: larger than 300 kB")


# ---- tokenizers and chats ------------------------------------------------------------------


def tokenizer_cases(tok, specials=False):
    cases = []
    for text in TEXTS:
        ids = tok(text, add_special_tokens=False)["input_ids"]
        case = {"text": text, "ids": ids}
        if specials:
            case["ids_with_specials"] = tok(text, add_special_tokens=True)["input_ids"]
            case["decoded"] = tok.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        cases.append(case)
    return cases


def chat_cases(tok):
    return [
        {"messages": m, "rendered": tok.apply_chat_template(m, tokenize=False, add_generation_prompt=True)}
        for m in CHATS
    ]


# ---- real models ----------------------------------------------------------------------------


def real_tokenizer(path, field):
    """The tokenizer in the GGUF file, completed with what transformers does not take from the file.

    transformers 5.23 knows no split for `smollm` (digits one by one, then GPT-2's pattern) and does
    not set Qwen2's NFC normaliser; both are in those models' own tokenizer.json.
    """
    tok = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    before, note = tokenizer_cases(tok), None
    pre = field("tokenizer.ggml.pre")
    if pre == "smollm":
        tok.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        note = "pre-tokenizer set to Digits(individual_digits=True), ByteLevel(add_prefix_space=False)"
    elif pre == "qwen2":
        tok.backend_tokenizer.normalizer = normalizers.NFC()
        note = "normaliser set to NFC"
    changed = [a["text"] for a, b in zip(before, tokenizer_cases(tok)) if a != b]
    return tok, {"change": note, "cases_it_changes": changed}


def check_weights(model, reader):
    """Every tensor transformers took from the file must equal what the gguf package dequantises."""
    from gguf import dequantize

    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    less_one = "gemma" in model.config.model_type
    if less_one:
        names |= {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
        names |= {"post_ffw_norm": "post_feedforward_layernorm"}
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    top["output.weight"] = "lm_head.weight"
    params, heads = dict(model.named_parameters(remove_duplicate=False)), model.config.num_attention_heads
    kv_heads, seen = model.config.num_key_value_heads, {"lm_head.weight"}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type)
        if m := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", t.name):
            name = f"model.layers.{m[1]}.{names[m[2]]}.{m[3]}"
            if model.config.model_type == "llama" and m[2] in ("attn_q", "attn_k"):
                n = heads if m[2] == "attn_q" else kv_heads  # llama.cpp interleaves the halves of each head
                w = w.reshape(n, w.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        else:
            name = top[t.name]
        p = params[name]
        w = w - 1 if less_one and "norm" in t.name else w  # Gemma's norms multiply by one more than is stored
        assert p.dtype == torch.float32 and torch.equal(p, torch.from_numpy(np.array(w))), t.name
        seen.add(name)
    assert seen == set(params), set(params) - seen


def load_real(path, reader):
    from gguf import dequantize

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for t in reader.tensors:
        if t.name == "output.weight":  # never tied when the file has both, whatever transformers does
            head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
            head.weight = torch.nn.Parameter(torch.from_numpy(np.array(dequantize(t.data, t.tensor_type))))
            model.lm_head, model.config.tie_word_embeddings = head, False
    check_weights(model, reader)
    return model


def make_real(out, path):
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(key):
        return reader.fields[key].contents() if key in reader.fields else None

    model, arch = load_real(path, reader), field("general.architecture")
    c = model.config
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    assert rope["rope_theta"] == field(f"{arch}.rope.freq_base"), c.rope_parameters
    assert abs(c.rms_norm_eps - field(f"{arch}.attention.layer_norm_rms_epsilon")) < 1e-9, c.rms_norm_eps
    tok, changes = real_tokenizer(path, field)
    ids = tok(PROMPT, add_special_tokens=False)["input_ids"]
    n, stride = len(ids), 83 if c.vocab_size < 100_000 else 251
    at = [0, 1, n // 4, n // 2, n - 1]
    want = logits_of(model, ids)
    path_ids, gaps = greedy(model, ids, cache=True)
    made = f"tools/golden.py real {path.name}; {versions('transformers', 'torch', 'tokenizers', 'gguf', 'numpy')}"
    golden = {
        "model": path.name,
        "made_by": f"{made}; float32, CPU, eager",
        "prompt": PROMPT,
        "ids": ids,
        "positions": at,
        "vocab_stride": stride,
        "logits": digits(want[at, ::stride].tolist()),
        "argmax": want[at].argmax(-1).tolist(),
        "greedy": path_ids,
        "greedy_margin": digits(gaps),
        "tokenizer_changes": changes,
        "tokenizer": tokenizer_cases(tok),
        "chat": chat_cases(tok) if tok.chat_template else [],
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{path.stem}.json"
    dump(target, golden)
    print(f"{target.name}: {target.stat().st_size} bytes, {n} prompt tokens, min margin {min(gaps):.4g}")
    print(tok.decode(path_ids))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "tests" / "golden")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: the bytes stay the same)")
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser("tiny", help="random-weight models")
    tiny.add_argument("family", nargs="*", help=f"default: all of {', '.join(FAMILIES)}")
    real = kinds.add_parser("real", help="GGUF files")
    real.add_argument("gguf", nargs="+", type=Path)
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.kind == "tiny":
        for name in args.family or FAMILIES:
            make_tiny(args.out / "tiny", name, FAMILIES[name])
    else:
        for path in args.gguf:
            make_real(args.out / "real", path.resolve())


if __name__ == "__main__":
    main()
