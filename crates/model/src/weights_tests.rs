use super::*;
use crate::config::{ExpertSpec, Family};
use crate::files::ModelFiles;
use crate::testing::{GgufBuilder, TestFolder, tiny_gguf};

fn open(builder: &GgufBuilder) -> ModelFiles {
    ModelFiles::from_gguf(Gguf::from_bytes("test.gguf", builder.build()).unwrap()).unwrap()
}

/// First values of all rows, divided by the number of columns: the file's row numbers of `counting` tensors.
fn row_numbers(matrix: &Matrix<'_>) -> Vec<usize> {
    let mut row = vec![0.0; matrix.cols()];
    (0..matrix.rows())
        .map(|r| {
            matrix.row(r, &mut row).unwrap();
            assert!(row.windows(2).all(|w| w[1] == w[0] + 1.0), "a row is not whole");
            row[0] as usize / matrix.cols()
        })
        .collect()
}

/// llama.cpp's `permute`: `reshape(heads, 2, dim / heads / 2).swapaxes(1, 2)`, as the list of rows that it
/// takes.
fn permute(rows: usize, heads: usize) -> Vec<usize> {
    let half = rows / heads / 2;
    let mut out = Vec::new();
    for head in 0..heads {
        for i in 0..half {
            for j in 0..2 {
                out.push((head * 2 + j) * half + i);
            }
        }
    }
    out
}

#[test]
fn q_and_k_of_llama_files_come_in_half_split_order() {
    let q = "model.layers.0.self_attn.q_proj";
    let builder = |architecture| {
        tiny_gguf(architecture)
            .counting("blk.0.attn_q.weight", &[32, 32])
            .counting("blk.0.attn_q.bias", &[32])
            .counting("blk.0.attn_k.weight", &[16, 32])
            .counting("blk.0.attn_v.weight", &[16, 32])
            .counting("blk.0.attn_qkv.weight", &[64, 32])
    };
    let files = open(&builder("llama"));
    let weights = files.weights();
    let matrix = |name: &str| weights.matrix(&format!("model.layers.0.self_attn.{name}.weight")).unwrap();
    // The file's row f holds the original row permute[f]: reading row r must find the f with permute[f] = r.
    for (name, rows, heads) in [("q_proj", 32, 4), ("k_proj", 16, 2)] {
        let permuted = permute(rows, heads);
        let sources = row_numbers(&matrix(name));
        assert_eq!((0..rows).collect::<Vec<_>>(), sources.iter().map(|&f| permuted[f]).collect::<Vec<_>>());
    }
    assert_eq!(row_numbers(&matrix("v_proj")), (0..16).collect::<Vec<_>>());
    let fused = row_numbers(&matrix("qkv_proj"));
    assert_eq!(fused[..32], row_numbers(&matrix("q_proj")));
    assert_eq!(fused[32..48], row_numbers(&matrix("k_proj")).iter().map(|r| r + 32).collect::<Vec<_>>());
    assert_eq!(fused[48..], (48..64).collect::<Vec<_>>());
    let bias = weights.vector(&format!("{q}.bias"), 32).unwrap();
    assert_eq!(bias, row_numbers(&matrix("q_proj")).iter().map(|&r| r as f32).collect::<Vec<_>>());
    assert_eq!(weights.matrix("model.embed_tokens.weight").unwrap().row_bytes(1).unwrap().len(), 128);

    for (architecture, is_interleaved) in [("mistral3", true), ("qwen2", false)] {
        let files = open(&builder(architecture));
        let rows = row_numbers(&files.weights().matrix(&format!("{q}.weight")).unwrap());
        assert_eq!(rows == row_numbers(&matrix("q_proj")), is_interleaved, "{architecture}");
        assert_eq!(rows == (0..32).collect::<Vec<_>>(), !is_interleaved, "{architecture}");
    }
}

#[test]
fn only_the_rotated_part_of_a_head_is_interleaved() {
    let files = open(
        &tiny_gguf("llama").u32("llama.rope.dimension_count", 4).counting("blk.0.attn_k.weight", &[16, 32]),
    );
    let matrix = files.weights().matrix("model.layers.0.self_attn.k_proj.weight").unwrap();
    assert_eq!(row_numbers(&matrix), [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]);
}

#[test]
fn fused_and_separate_feed_forward_are_told_apart() {
    let (up, gate_up) = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight");
    let fused = open(&tiny_gguf("phi3").counting("blk.0.ffn_up.weight", &[128, 32]));
    assert!(fused.weights().has(gate_up) && !fused.weights().has(up));
    let separate = tiny_gguf("qwen2").counting("blk.0.ffn_up.weight", &[64, 32]);
    let separate = open(&separate.counting("blk.0.ffn_gate.weight", &[64, 32]));
    assert!(!separate.weights().has(gate_up) && separate.weights().has(up));
    assert!(separate.weights().matrix(gate_up).is_err());
}

#[test]
fn errors_name_the_tensor_and_its_shape() {
    let files = open(
        &tiny_gguf("llama").counting("output_norm.weight", &[32]).counting("blk.0.attn_q.weight", &[24, 32]),
    );
    let weights = files.weights();
    let message = |e: ModelError| e.to_string();
    let wrong = message(weights.matrix_of("model.embed_tokens.weight", 7, 32).unwrap_err());
    assert!(wrong.contains("'token_embd.weight' has shape [6, 32], expected [7, 32]"), "{wrong}");
    let wrong = message(weights.vector("model.norm.weight", 31).unwrap_err());
    assert!(wrong.contains("has shape [32], expected [31]"), "{wrong}");
    let wrong = message(weights.matrix("model.norm.weight").unwrap_err());
    assert!(wrong.contains("expected a matrix"), "{wrong}");
    let wrong = message(weights.matrix("model.layers.0.self_attn.q_proj.weight").unwrap_err());
    assert!(wrong.contains("has shape [24, 32], expected 32 rows"), "{wrong}");
    let wrong = message(weights.matrix("model.layers.5.mlp.down_proj.weight").unwrap_err());
    assert!(wrong.contains("'blk.5.ffn_down.weight' is missing"), "{wrong}");
    let matrix = weights.matrix("model.embed_tokens.weight").unwrap();
    assert!(message(matrix.row(6, &mut [0.0; 32]).unwrap_err()).contains("no row 6"));
    assert!(message(matrix.row(0, &mut [0.0; 31]).unwrap_err()).contains("length 31"));
}

#[test]
fn safetensors_weights_are_read_by_their_own_names() {
    let folder = TestFolder::new();
    folder
        .write_safetensors("model.safetensors", &[("model.norm.weight", &[3]), ("lm_head.weight", &[4, 3])]);
    let config = Config::from_gguf(&Gguf::from_bytes("x.gguf", tiny_gguf("llama").build()).unwrap()).unwrap();
    let weights = Weights::from_safetensors(SafetensorsFolder::open(folder.path()).unwrap(), &config);
    assert!(weights.has("lm_head.weight") && !weights.has("model.embed_tokens.weight"));
    assert_eq!(weights.vector("model.norm.weight", 3).unwrap(), [0.0, 1.0, 2.0]);
    assert_eq!(row_numbers(&weights.matrix_of("lm_head.weight", 4, 3).unwrap()), [0, 1, 2, 3]);
    weights.release_pages();
    assert_eq!(row_numbers(&weights.matrix("lm_head.weight").unwrap()), [0, 1, 2, 3]);
    assert!(weights.vector("lm_head.weight", 12).is_err());
}

#[test]
fn the_text_part_of_a_model_for_pictures_is_read_by_the_names_of_a_text_model() {
    for names in [
        ["language_model.model.norm.weight", "language_model.lm_head.weight"],
        ["model.language_model.norm.weight", "lm_head.weight"],
    ] {
        let folder = TestFolder::new();
        folder.write_safetensors("model.safetensors", &[(names[0], &[3]), (names[1], &[4, 3])]);
        let gguf = Gguf::from_bytes("x.gguf", tiny_gguf("llama").build()).unwrap();
        let config = Config { family: Family::Gemma3, ..Config::from_gguf(&gguf).unwrap() };
        let weights = Weights::from_safetensors(SafetensorsFolder::open(folder.path()).unwrap(), &config);
        // Gemma's norms multiply by one more than is stored.
        assert_eq!(weights.vector("model.norm.weight", 3).unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(row_numbers(&weights.matrix_of("lm_head.weight", 4, 3).unwrap()), [0, 1, 2, 3]);
        assert!(!weights.has("model.embed_tokens.weight"));
    }
}

#[test]
fn experts_of_a_gguf_file_are_parts_of_one_tensor() {
    let mixture = tiny_gguf("qwen3moe")
        .u32("qwen3moe.expert_count", 2)
        .u32("qwen3moe.expert_used_count", 1)
        .u32("qwen3moe.expert_feed_forward_length", 3)
        .counting("blk.0.ffn_up_exps.weight", &[2, 3, 32])
        .counting("blk.0.ffn_down_exps.weight", &[3, 32]);
    let files = open(&mixture);
    let spec = ExpertSpec { count: 2, top_k: 1, intermediate: 3, normalised: true };
    assert_eq!(files.config().layers[0].experts, Some(spec));
    let expert = |e: usize, part: &str| {
        files.weights().matrix_of(&format!("model.layers.0.mlp.experts.{e}.{part}.weight"), 3, 32)
    };
    assert_eq!(row_numbers(&expert(0, "up_proj").unwrap()), [0, 1, 2]);
    assert_eq!(row_numbers(&expert(1, "up_proj").unwrap()), [3, 4, 5]);
    let message = |found: Result<Matrix<'_>>| found.unwrap_err().to_string();
    assert!(message(expert(2, "up_proj")).contains("more than 2 experts"));
    assert!(message(expert(0, "gate_proj")).contains("'blk.0.ffn_gate_exps.weight' is missing"));
    assert!(message(expert(0, "down_proj")).contains("has shape [3, 32]"));
    assert!(message(files.weights().matrix("model.layers.0.mlp.experts.0.bad.weight")).contains("missing"));
}

#[test]
fn experts_of_a_llama_file_are_as_wide_as_its_dense_layers() {
    let mixture = tiny_gguf("llama")
        .u32("llama.expert_count", 2)
        .u32("llama.expert_used_count", 1)
        .counting("blk.0.ffn_gate_inp.weight", &[2, 32])
        .counting("blk.0.ffn_down_exps.weight", &[2, 32, 64]);
    let files = open(&mixture);
    let spec = ExpertSpec { count: 2, top_k: 1, intermediate: 64, normalised: true };
    assert_eq!((files.config().family, files.config().layers[1].experts), (Family::Llama, Some(spec)));
    let matrix = |name: &str, rows, cols| {
        row_numbers(
            &files.weights().matrix_of(&format!("model.layers.0.mlp.{name}.weight"), rows, cols).unwrap(),
        )
    };
    assert_eq!(matrix("gate", 2, 32), [0, 1]);
    assert_eq!(matrix("experts.1.down_proj", 32, 64), (32..64).collect::<Vec<_>>());
}
