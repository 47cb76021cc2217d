//! A GGUF file of arbitrary bytes: parsing, resolving its configuration, reading a row of every tensor and hashing it
//! must not panic, read out of bounds, or allocate beyond what the bytes justify.
#![no_main]

use libfuzzer_sys::fuzz_target;
use refrain_model::{Gguf, ModelFiles, dequantize};

/// Parameters whose rows are reordered, fused or told apart by the reader.
const NAMES: [&str; 6] = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
];

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes("fuzzed.gguf", bytes.to_vec()) else { return };
    for name in gguf.tensors().keys() {
        let Ok((info, dtype, data)) = gguf.tensor(name) else { continue };
        let cols = info.shape.last().copied().unwrap_or(0);
        let Some(row) = dtype.bytes_for(cols).and_then(|len| data.get(..len)) else { continue };
        dequantize(dtype, row, &mut vec![0.0; cols]).expect("a row of the directory is whole blocks");
    }
    let Ok(files) = ModelFiles::from_gguf(gguf) else { return };
    let _ = files.fingerprint(|_, _| ());
    for name in NAMES {
        let Ok(matrix) = files.weights().matrix(name) else { continue };
        for row in [0, matrix.rows() / 2, matrix.rows() - 1] {
            matrix.row(row, &mut vec![0.0; matrix.cols()]).expect("the row is there");
        }
    }
});
