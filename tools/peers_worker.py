#!/usr/bin/env python3
"""Another engine under the protocol of `refrain-bench worker`, for tools/bench_peers.py.

    peers_worker.py llama.cpp MODEL.gguf --threads 2 --context 8192
    peers_worker.py transformers MODEL.gguf --threads 2 --dtype bf16
    peers_worker.py quantize MODEL.gguf OUT.gguf --type bf16

The first two load the model once, then read one JSON command a line on standard input and answer each
with one JSON line on standard output:

    {"op": "info"}                                      what runs here
    {"op": "tokenize", "text": TEXT}                    {"ids"}, no special tokens added
    {"op": "prefill", "ids": IDS}                       {"seconds"}: an empty KV cache, to the last token's logits
    {"op": "decode", "context": IDS, "tokens": N}       {"prefill_seconds", "seconds_per_token"}: greedy steps after
                                                        the context, mean of N; an empty context starts from one token

llama.cpp takes `"flash": true` or `false` besides: a context with flash attention, or without. One of them is open at
a time, so that the peak memory of the process is of one, as other engines' is. A command that
fails is answered with {"error"}. llama.cpp needs llama-cpp-python, transformers needs transformers, torch, gguf and
accelerate; tools/requirements-bench.txt pins them. Batch sizes and KV types are each engine's defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

REQUIREMENTS = Path(__file__).with_name("requirements-bench.txt")
DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}
FILE_TYPES = {"bf16": "LLAMA_FTYPE_MOSTLY_BF16", "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


class Session(Protocol):
    """An empty KV cache that tokens are appended to."""

    start: int

    def extend(self, ids: list[int]) -> int:
        """Computes `ids` after all tokens so far and returns the likeliest next token."""


class Engine(Protocol):
    def info(self) -> dict[str, Any]: ...

    def tokenize(self, text: str) -> list[int]: ...

    def session(self, command: dict[str, Any]) -> Session: ...


@contextmanager
def needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise SystemExit(
            f"{package} is needed and cannot be imported by {sys.executable}: {error}\n"
            f"install it: {sys.executable} -m pip install -r {REQUIREMENTS}"
        ) from error


# ---- llama.cpp -------------------------------------------------------------------------------------


def llama_library(verbose: bool = False) -> Any:
    with needs("llama-cpp-python"):
        import llama_cpp
    if not verbose:
        silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_library.keep = silent
        llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaCpp:
    """llama.cpp by its C interface, without the Python wrapper's copies of logits."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self.lib = lib = llama_library()
        self.path, self.threads = path, threads
        self.model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocab_size = lib.llama_vocab_n_tokens(self.vocab)
        self.tokens, self.context, self.flash = context, None, None

    def open_context(self, flash: bool) -> Any:
        lib, tokens = self.lib, self.tokens
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = tokens, self.threads, self.threads
        on, off = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = on if flash else off
        self.batch, self.step = params.n_batch, params.n_ubatch
        context = lib.llama_init_from_model(self.model, params)
        if not context:
            raise SystemExit(f"llama.cpp cannot make a context of {tokens} tokens for {self.path}")
        return context

    def info(self) -> dict[str, Any]:
        from importlib.metadata import version

        lib = self.lib
        layers, heads = lib.llama_model_n_layer(self.model), lib.llama_model_n_head(self.model)
        width = lib.llama_model_n_embd(self.model) // heads * lib.llama_model_n_head_kv(self.model)
        return {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "isa": lib.llama_print_system_info().decode().strip(" |"),
            "threads": self.threads,
            "compute": self.file_type(),
            "kv": "f16",
            "context": lib.llama_model_n_ctx_train(self.model),
            "weight_bytes": lib.llama_model_size(self.model),
            "kv_bytes_per_token": layers * width * 2 * 2,
        }

    def file_type(self) -> str:
        """`Q4_K_M` of the description `qwen2 1B Q4_K - Medium`."""
        buffer = self.lib.ctypes.create_string_buffer(256)
        self.lib.llama_model_desc(self.model, buffer, len(buffer))
        name = buffer.value.decode().split(" ", 2)[-1]
        return name.replace(" - Small", "_S").replace(" - Medium", "_M").replace(" - Large", "_L")

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = (self.lib.llama_token * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), room, len(room), False, False)
        return list(room[:count])

    def session(self, command: dict[str, Any]) -> LlamaSession:
        flash = command.get("flash", True)
        if flash is not self.flash:
            if self.context:
                self.lib.llama_free(self.context)
            self.context, self.flash = None, None
            self.context, self.flash = self.open_context(flash), flash
            # The pages of a new context's buffers are touched before the clock of a command begins.
            warm = LlamaSession(self, self.context)
            warm.compute([warm.start] * min(self.step, self.tokens))
        return LlamaSession(self, self.context)


class LlamaSession:
    def __init__(self, engine: LlamaCpp, context: Any) -> None:
        self.engine, self.lib, self.context = engine, engine.lib, context
        self.start = max(self.lib.llama_vocab_bos(engine.vocab), 0)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)

    def extend(self, ids: list[int]) -> int:
        import numpy as np

        self.compute(ids)
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.engine.vocab_size,))))

    def compute(self, ids: list[int]) -> None:
        size = self.engine.batch
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            tokens = (self.lib.llama_token * len(part))(*part)
            failed = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, len(part)))
            if failed:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {failed}")


def quantize(source: Path, target: Path, kind: str) -> None:
    """Rewrites a GGUF file in another type, through a temporary file beside the target."""
    lib = llama_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, FILE_TYPES[kind])
    params.allow_requantize = True
    part = target.with_name(target.name + ".part")
    failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(part), lib.ctypes.byref(params))
    if failed:
        part.unlink(missing_ok=True)
        raise SystemExit(f"llama.cpp cannot write {source} as {kind}: it returned {failed}")
    part.replace(target)


# ---- transformers ----------------------------------------------------------------------------------


class Transformers:
    def __init__(self, path: Path, threads: int, dtype: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        with needs("transformers"):
            import torch
            import transformers
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch, self.version = torch, transformers.__version__
        with needs("gguf (and accelerate)"):
            folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=getattr(torch, DTYPES[dtype]), attn_implementation="sdpa"
            ).eval()
        self.threads, self.dtype = threads, dtype

    def info(self) -> dict[str, Any]:
        c = self.model.config
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        size = self.model.dtype.itemsize
        return {
            "engine": "transformers",
            "version": f"transformers {self.version}, torch {self.torch.__version__}, sdpa",
            "isa": self.torch.backends.cpu.get_cpu_capability(),
            "threads": self.torch.get_num_threads(),
            "compute": self.dtype,
            "kv": self.dtype,
            "context": c.max_position_embeddings,
            "weight_bytes": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "kv_bytes_per_token": c.num_hidden_layers * c.num_key_value_heads * width * 2 * size,
        }

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def session(self, _command: dict[str, Any]) -> TransformersSession:
        return TransformersSession(self)


class TransformersSession:
    def __init__(self, engine: Transformers) -> None:
        self.engine, self.past = engine, None
        self.start = engine.model.config.bos_token_id or 0

    def extend(self, ids: list[int]) -> int:
        torch = self.engine.torch
        with torch.inference_mode():
            new = torch.tensor([ids])
            reply = self.engine.model(new, past_key_values=self.past, use_cache=True, logits_to_keep=1)
            self.past = reply.past_key_values
            return int(reply.logits[0, -1].argmax())


# ---- the protocol ----------------------------------------------------------------------------------


def prefill(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    session = engine.session(command)
    started = perf_counter()
    session.extend(command["ids"])
    return {"seconds": perf_counter() - started}


def decode(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    context, steps = command["context"], command["tokens"]
    session = engine.session(command)
    prefilled, token = None, session.start
    started = perf_counter()
    if context:
        token = session.extend(context)
        prefilled = perf_counter() - started
    started = perf_counter()
    for _ in range(steps):
        token = session.extend([token])
    return {"prefill_seconds": prefilled, "seconds_per_token": (perf_counter() - started) / steps}


OPS: dict[str, Callable[[Engine, dict[str, Any]], dict[str, Any]]] = {
    "info": lambda engine, _: engine.info(),
    "tokenize": lambda engine, command: {"ids": engine.tokenize(command["text"])},
    "prefill": prefill,
    "decode": decode,
}


def answer(engine: Engine, line: str) -> dict[str, Any]:
    try:
        command = json.loads(line)
        return OPS[command["op"]](engine, command)
    except Exception as error:  # whatever a command does, the worker goes on
        return {"error": f"{type(error).__name__}: {error}"}


def serve(engine: Engine, replies: Any) -> None:
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(answer(engine, line)), file=replies, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in ("llama.cpp", "transformers"):
        kind = kinds.add_parser(name)
        kind.add_argument("model", type=Path)
        kind.add_argument("--threads", type=int, default=2)
        if name == "llama.cpp":
            kind.add_argument("--context", type=int, default=8192, help="tokens of room (default 8192)")
        else:
            kind.add_argument("--dtype", default="bf16", choices=DTYPES)
    kind = kinds.add_parser("quantize")
    kind.add_argument("model", type=Path)
    kind.add_argument("out", type=Path)
    kind.add_argument("--type", choices=FILE_TYPES, required=True)
    args = parser.parse_args()

    if args.kind == "quantize":
        return quantize(args.model, args.out, args.type)
    # Libraries print what they like: their standard output becomes standard error.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    path = args.model.resolve()
    if args.kind == "llama.cpp":
        engine: Engine = LlamaCpp(path, args.threads, args.context)
    else:
        engine = Transformers(path, args.threads, args.dtype)
    serve(engine, replies)
    replies.close()


if __name__ == "__main__":
    main()
