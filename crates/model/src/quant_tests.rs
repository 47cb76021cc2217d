use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};

use super::*;

const ALL: [(DType, GgmlDType); 11] = [
    (DType::F32, GgmlDType::F32),
    (DType::F16, GgmlDType::F16),
    (DType::BF16, GgmlDType::BF16),
    (DType::Q8_0, GgmlDType::Q8_0),
    (DType::Q4_0, GgmlDType::Q4_0),
    (DType::Q4_1, GgmlDType::Q4_1),
    (DType::Q5_0, GgmlDType::Q5_0),
    (DType::Q5_1, GgmlDType::Q5_1),
    (DType::Q4K, GgmlDType::Q4K),
    (DType::Q5K, GgmlDType::Q5K),
    (DType::Q6K, GgmlDType::Q6K),
];

/// xorshift64*: deterministic bytes.
fn random_bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut s = seed | 1;
    (0..n)
        .map(|_| {
            s ^= s >> 12;
            s ^= s << 25;
            s ^= s >> 27;
            (s.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
        })
        .collect()
}

fn candle(dtype: GgmlDType, bytes: &[u8], values: usize) -> Vec<f32> {
    let storage = QStorage::from_data(bytes.into(), &Device::Cpu, dtype).unwrap();
    let tensor: Tensor = QTensor::new(storage, values).unwrap().dequantize(&Device::Cpu).unwrap();
    tensor.to_vec1().unwrap()
}

/// Equal bits, where every NaN counts as the same (its payload is not defined by IEEE).
fn assert_same(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
            "{what}: value {i}: {a:e} and {b:e}"
        );
    }
}

#[test]
fn random_blocks_are_bit_for_bit_candles() {
    for (ours, theirs) in ALL {
        assert_eq!(ours.block_bytes(), theirs.type_size(), "{ours}");
        assert_eq!(ours.block_len(), theirs.block_size(), "{ours}");
        for seed in 1..=20 {
            let values = 256 * 37;
            let bytes = random_bytes(ours.bytes_for(values).unwrap(), seed);
            let mut out = vec![0.0; values];
            dequantize(ours, &bytes, &mut out).unwrap();
            assert_same(&out, &candle(theirs, &bytes, values), &format!("{ours}, seed {seed}"));
        }
    }
}

#[test]
fn a_ragged_row_of_floats_is_read_whole() {
    for (ours, theirs) in &ALL[..3] {
        for values in [1, 2, 63, 64, 65, 129] {
            let bytes = random_bytes(ours.bytes_for(values).unwrap(), 7);
            let mut out = vec![0.0; values];
            dequantize(*ours, &bytes, &mut out).unwrap();
            assert_same(&out, &candle(*theirs, &bytes, values), &format!("{ours}, {values} values"));
        }
    }
}

#[test]
fn wrong_lengths_are_errors() {
    for (dtype, _) in ALL {
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
    assert_eq!(ggml_type_name(23), "IQ4_XS (number 23)");
    assert_eq!(ggml_type_name(9999), "number 9999");
    assert!(DType::from_ggml(23).is_none());
}

#[test]
fn nibbles_stand_for_the_same_values() {
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q4K] {
        let values = 256 * 9;
        let bytes = random_bytes(dtype.bytes_for(values).unwrap(), 7);
        let mut should = vec![0.0; values];
        dequantize(dtype, &bytes, &mut should).unwrap();
        let mut out = vec![Nibbles::default(); values / 32];
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
    assert!(nibbles(DType::Q8_0, &[0; 34], &mut [Nibbles::default()]).is_err());
}
