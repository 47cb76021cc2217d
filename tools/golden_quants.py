#!/usr/bin/env python3
"""Makes the golden files of the reader of GGUF files: what ggml's formats stand for, by the `gguf` package's own code.

    .venv/bin/python tools/golden_quants.py                    # tests/golden/quants.json
    .venv/bin/python tools/golden_quants.py MODEL.gguf ...     # tests/golden/gguf/<model>.json

quants.json   of each format: length and bytes of a block; `values`, the bits of the first 256 values of random bytes
              (xorshift64*, seed 1), for a look at what differs; `checksums` of 9472 values of each of 20 seeds;
              `ragged`, checksums of rows of other lengths where the format allows them (seed 7)
<model>.json  number of metadata keys; of each tensor shape (outermost first) and format; `checksums` of the tensors
              named in `chosen`

A checksum is Σ bits(value i) · (i · 0x9E3779B97F4A7C15 | 1) modulo 2⁶⁴ over float32 values; every NaN counts as 0x7FC00000.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, quants

FORMATS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
RAGGED = [1, 2, 63, 64, 65, 129]
VALUES = 256 * 37
SEEDS = range(1, 21)
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


def random_bytes(n, seed):
    """xorshift64*, as in the tests."""
    state, mask, out = seed | 1, (1 << 64) - 1, bytearray()
    for _ in range(n):
        state ^= state >> 12
        state = (state ^ (state << 25)) & mask
        state ^= state >> 27
        out.append((state * 0x2545F4914F6CDD1D & mask) >> 56)
    return np.frombuffer(bytes(out), np.uint8)


def bits(values):
    words = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32).copy()
    words[np.isnan(words.view(np.float32))] = 0x7FC00000
    return words


def checksum(values):
    words = bits(values).astype(np.uint64)
    weights = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    return f"{int((words * weights).sum(dtype=np.uint64)):016x}"


def formats():
    out = {}
    for name in FORMATS:
        kind = GGMLQuantizationType[name]
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]

        def values(count, seed):
            return quants.dequantize(random_bytes(count // block_len * block_bytes, seed), kind)

        out[name] = {
            "block_len": block_len,
            "block_bytes": block_bytes,
            "values": bits(values(VALUES, 1))[:256].tolist(),
            "checksums": [checksum(values(VALUES, seed)) for seed in SEEDS],
            "ragged": {n: checksum(values(n, 7)) for n in RAGGED} if block_len == 1 else {},
        }
    return out


def model(path):
    reader = GGUFReader(path)
    tensors, checksums = {}, {}
    for t in reader.tensors:
        shape = [int(n) for n in reversed(t.shape)]
        tensors[t.name] = f"{t.tensor_type.name} {'x'.join(map(str, shape))}"
        # All small tensors, and of the large ones those of two layers.
        if len(shape) == 1 or ".0." in t.name or ".7." in t.name:
            checksums[t.name] = checksum(quants.dequantize(t.data, t.tensor_type))
    keys = sum(not key.startswith("GGUF.") for key in reader.fields)
    return {"metadata": keys, "tensors": tensors, "checksums": checksums}


def write(path, golden):
    path.parent.mkdir(parents=True, exist_ok=True)
    golden = {"made_by": f"tools/{Path(__file__).name}; gguf 0.19.0, numpy {np.__version__}"} | golden
    text = json.dumps(golden, separators=(",", ":"))
    path.write_text(text.replace('},"', '},\n"').replace('","', '",\n"') + "\n")
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    np.seterr(all="ignore")
    if len(sys.argv) == 1:
        write(GOLDEN / "quants.json", {"formats": formats()})
    for path in map(Path, sys.argv[1:]):
        write(GOLDEN / "gguf" / f"{path.stem}.json", model(path))


if __name__ == "__main__":
    main()
