use serde_json::Value;

use super::*;
use crate::dtype::ggml_type_name;
use crate::testing::{checksum, golden, random_bytes};

/// The formats and, of each, what the `gguf` package's own code reads (`tools/golden_quants.py`).
fn all() -> Vec<(DType, Value)> {
    let golden = golden("quants.json");
    let formats = golden["formats"].as_object().unwrap();
    let known = (0..64).filter_map(DType::from_ggml);
    let all: Vec<_> = known.map(|dtype| (dtype, formats[&dtype.to_string()].clone())).collect();
    assert_eq!((all.len(), formats.len()), (16, 16));
    all
}

fn dequantized(dtype: DType, values: usize, seed: u64) -> Vec<f32> {
    let bytes = random_bytes(dtype.bytes_for(values).unwrap(), seed);
    let mut out = vec![0.0; values];
    dequantize(dtype, &bytes, &mut out).unwrap();
    out
}

#[test]
fn random_blocks_are_bit_for_bit_ggmls() {
    for (dtype, golden) in all() {
        assert_eq!(golden["block_bytes"], dtype.block_bytes(), "{dtype}");
        assert_eq!(golden["block_len"], dtype.block_len(), "{dtype}");
        let values = 256 * 37;
        let first = dequantized(dtype, values, 1);
        for (i, (ours, expected)) in first.iter().zip(golden["values"].as_array().unwrap()).enumerate() {
            let expected = f32::from_bits(expected.as_u64().unwrap() as u32);
            let same = ours.to_bits() == expected.to_bits() || (ours.is_nan() && expected.is_nan());
            assert!(same, "{dtype}: value {i}: {ours:e} and {expected:e}");
        }
        let sums: Vec<String> = (1..=20).map(|seed| checksum(&dequantized(dtype, values, seed))).collect();
        assert_eq!(golden["checksums"], serde_json::json!(sums), "{dtype}");
    }
}

#[test]
fn a_ragged_row_of_floats_is_read_whole() {
    let mut rows = 0;
    for (dtype, golden) in all() {
        for (values, expected) in golden["ragged"].as_object().unwrap() {
            assert_eq!(
                *expected,
                checksum(&dequantized(dtype, values.parse().unwrap(), 7)),
                "{dtype}: {values}"
            );
            rows += 1;
        }
    }
    assert_eq!(rows, 3 * 6);
}

#[test]
fn wrong_lengths_are_errors() {
    for (dtype, _) in all() {
        let bytes = vec![0; dtype.block_bytes()];
        let mut out = vec![0.0; dtype.block_len()];
        dequantize(dtype, &bytes, &mut out).unwrap();
        assert!(dequantize(dtype, &bytes[1..], &mut out).is_err(), "{dtype}");
        assert!(dequantize(dtype, &bytes, &mut out[1..]).is_err(), "{dtype}");
        assert!(dequantize(dtype, &bytes, &mut []).is_err(), "{dtype}");
    }
    assert_eq!(DType::F32.bytes_for(usize::MAX), None);
    assert_eq!(DType::Q4K.bytes_for(255), None);
}

#[test]
fn types_that_cannot_be_read_have_names() {
    assert_eq!(ggml_type_name(12), "Q4_K");
    assert_eq!(ggml_type_name(18), "IQ3_XXS (number 18)");
    assert_eq!(ggml_type_name(9999), "number 9999");
    assert!(DType::from_ggml(18).is_none());
}

#[test]
fn nibbles_stand_for_the_same_values() {
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q4K] {
        let values = 256 * 9;
        let bytes = random_bytes(dtype.bytes_for(values).unwrap(), 7);
        let mut should = vec![0.0; values];
        dequantize(dtype, &bytes, &mut should).unwrap();
        let mut out = vec![Q4Block::default(); values / 32];
        nibbles(dtype, &bytes, &mut out).unwrap();
        for (block, should) in out.iter().zip(should.chunks(32)) {
            for (q, should) in block.q.iter().zip(should) {
                let value = block.scale * f32::from(*q) + block.min;
                let close = (value - should).abs() <= 1e-6 * (1.0 + should.abs() + block.min.abs());
                assert!(close || !should.is_finite(), "{dtype}: {value} is not {should}");
            }
        }
        assert!(nibbles(dtype, &bytes[1..], &mut out).is_err());
    }
    assert!(nibbles(DType::Q8_0, &[0; 34], &mut [Q4Block::default()]).is_err());
}
