//! Keys and values in fewer bits.

use std::fs;

use refrain_kernels::{Buffer, Dtype};
use tempfile::tempdir;

use super::store::{open, path, stored};
use super::{Random, content, id, parts, raw};
use crate::{Chunk, ChunkId, KvQuantization, Layer, Problem, Store};

const HEADS: usize = 2;
const DIM: usize = 48;

/// Keys with channels far from zero, as models with biases have them, and values of any size.
fn kv(dtype: Dtype, tokens: usize, seed: u64) -> (Buffer, Buffer) {
    let mut random = Random(seed | 1);
    let mut noise = || random.next() as i32 as f32 / f32::from(i16::MAX) / 65_536.0;
    let mut make = |spread: f32| {
        let row = HEADS * DIM;
        let values: Vec<f32> =
            (0..tokens * row).map(|i| spread * ((i % row) as f32 - 40.0) + 3.0 * noise()).collect();
        let mut buffer = Buffer::zeros(dtype, values.len());
        buffer.write_f32(0, &values);
        buffer
    };
    (make(0.5), make(0.0))
}

fn encoded(quantization: KvQuantization, dtype: Dtype, tokens: usize) -> (Chunk, Vec<(Buffer, Buffer)>) {
    let layers: Vec<_> = (0..2).map(|layer| kv(dtype, tokens, 77 + layer)).collect();
    let id = ChunkId {
        quantization,
        kv_heads: HEADS,
        head_dim: DIM,
        tokens: (0..tokens as u32).collect(),
        ..id(dtype)
    };
    let exact = layers.iter().map(|(k, v)| Layer::exact(k.as_slice(), v.as_slice())).collect();
    (Chunk::new(id, "label", exact).unwrap(), layers)
}

fn floats(slice: refrain_kernels::Slice<'_>) -> Vec<f32> {
    let mut out = vec![0.0; slice.len()];
    slice.to_f32(&mut out);
    out
}

/// The elements of a channel in the 32 tokens (fewer at the end) among which `at` is.
fn column(x: &[f32], at: usize) -> Vec<f32> {
    let row = HEADS * DIM;
    x[at / row / 32 * 32 * row..].iter().skip(at % row).step_by(row).take(32).copied().collect()
}

fn ends(x: &[f32]) -> (f32, f32) {
    x.iter().fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)))
}

/// The half of a step within which rounding stays, by the definition: 127 steps to each side of the middle of a channel over 32 tokens
/// (keys), `max |x| / 127` over a token's head (values).
fn q8_bound(x: &[f32], at: usize, is_key: bool) -> f32 {
    if is_key {
        let (low, high) = ends(&column(x, at));
        return (high - low) / 2.0 / 127.0 / 2.0;
    }
    let head = &x[at / DIM * DIM..][..DIM];
    head.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0 / 2.0
}

/// Half a fifteenth of the span of a channel over 32 tokens (keys) or of 32 channels of a token's head (values).
fn q4_bound(x: &[f32], at: usize, is_key: bool) -> f32 {
    let row = HEADS * DIM;
    let (token, channel) = (at / row, at % row);
    let group: Vec<f32> = if is_key {
        column(x, at)
    } else {
        let (head, within) = (channel / DIM, channel % DIM);
        let start = token * row + head * DIM + within / 32 * 32;
        x[start..start + 32.min(DIM - within / 32 * 32)].to_vec()
    };
    let (low, high) = ends(&group);
    (high - low) / 15.0 / 2.0
}

#[test]
fn rounding_stays_within_half_a_step_and_recent_tokens_are_exact() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        for tokens in [1, 31, 32, 63, 64, 65, 100, 200] {
            for quantization in [KvQuantization::Q8, KvQuantization::Q4] {
                let (chunk, exact) = encoded(quantization, dtype, tokens);
                let bound = tokens.saturating_sub(32) / 32 * 32;
                for (layer, (k, v)) in exact.iter().enumerate() {
                    let found = chunk.layer(layer);
                    for (x, y, is_key) in [(k, found.k(), true), (v, found.v(), false)] {
                        let (x, y) = (floats(x.as_slice()), floats(y));
                        assert_eq!(x.len(), y.len());
                        for at in 0..x.len() {
                            let error = (x[at] - y[at]).abs();
                            if quantization == KvQuantization::Q4 && at / (HEADS * DIM) >= bound {
                                assert!(error == 0.0, "{quantization} {tokens} {at}");
                                continue;
                            }
                            let half = match quantization {
                                KvQuantization::Q8 => q8_bound(&x, at, is_key),
                                _ => q4_bound(&x, at, is_key),
                            };
                            // The step itself is an f16, and what comes out is rounded to the type.
                            let slack = half * 0.02
                                + x[at].abs().max(1.0) * if dtype == Dtype::Bf16 { 0.01 } else { 0.002 };
                            assert!(
                                error <= half + slack,
                                "{quantization} {dtype} {tokens} {at}: {error} > {half}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Qwen2.5's biases of keys reach 350 in its first layers, where keys of a channel differ by some tenths. Attention is by the differences.
#[test]
fn a_channel_far_from_zero_leaves_the_other_channels_of_its_key_as_they_are() {
    let row = HEADS * DIM;
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let mut random = Random(3);
        let far = |at: usize| if at % DIM == 5 { 350.0 } else { 0.0 };
        let keys: Vec<f32> =
            (0..70 * row).map(|at| far(at) + random.below(1000) as f32 / 1000.0 - 0.5).collect();
        let mut k = Buffer::zeros(dtype, keys.len());
        k.write_f32(0, &keys);
        let id = encoded(KvQuantization::Q8, dtype, 70).0.id().clone();
        let chunk = Chunk::new(id, "", vec![Layer::exact(k.as_slice(), k.as_slice()); 2]).unwrap();
        let found = chunk.layer(0);
        let (exact, found) = (floats(k.as_slice()), floats(found.k()));
        for at in (0..exact.len()).filter(|at| far(*at) == 0.0) {
            let error = (exact[at] - found[at]).abs();
            assert!(error < 0.005, "{dtype} {at}: {error}");
        }
    }
}

#[test]
fn what_has_few_values_comes_back_as_it_was() {
    for quantization in [KvQuantization::Q8, KvQuantization::Q4] {
        for value in [0.0, 1.0, -2.5, 60_000.0] {
            let mut x = Buffer::zeros(Dtype::F16, 80 * HEADS * DIM);
            x.write_f32(0, &vec![value; 80 * HEADS * DIM]);
            let id = encoded(quantization, Dtype::F16, 80).0.id().clone();
            let chunk = Chunk::new(id, "", vec![Layer::exact(x.as_slice(), x.as_slice()); 2]).unwrap();
            let (found, tolerance) = (chunk.layer(1), value.abs() * 1e-3);
            for found in [found.k(), found.v()] {
                assert!(
                    floats(found).iter().all(|y| (y - value).abs() <= tolerance),
                    "{quantization} {value}"
                );
            }
        }
    }
}

#[test]
fn an_encoded_chunk_takes_the_bytes_it_should() {
    let bytes = |quantization| encoded(quantization, Dtype::F16, 512).0.bytes() as f64 / (2.0 * 512.0);
    let exact = (2 * HEADS * DIM * 2) as f64;
    assert_eq!(bytes(KvQuantization::Exact), exact);
    // A byte an element, of keys four bytes a channel and 32 tokens, of values two a head.
    assert_eq!(bytes(KvQuantization::Q8), (2 * HEADS * DIM + HEADS * DIM / 8 + 2 * HEADS) as f64);
    // Of 512 tokens 480 take half a byte an element, and their ranges: four bytes a channel and 32 tokens, and a group.
    let quantised = (HEADS * DIM) as f64 + (HEADS * DIM * 4) as f64 / 32.0 + (HEADS * 2 * 4) as f64;
    assert_eq!(bytes(KvQuantization::Q4), (480.0 * quantised + 32.0 * exact) / 512.0);
}

#[test]
fn an_encoded_chunk_survives_the_store_and_is_another_than_the_exact_one() {
    let dir = tempdir().unwrap();
    for quantization in KvQuantization::ALL {
        let (chunk, store) = (encoded(quantization, Dtype::F16, 200).0, open(&dir));
        assert!(store.get(chunk.id()).unwrap().is_none(), "{quantization}");
        stored(store.put(chunk.clone()).unwrap());
        let again = open(&dir);
        assert_eq!(content(&again.get(chunk.id()).unwrap().unwrap()), content(&chunk));
        let file = fs::read(path(&store, &chunk)).unwrap();
        let metadata = parts(&file).0["__metadata__"].clone();
        let version = if quantization == KvQuantization::Exact { "1" } else { "2" };
        assert_eq!(
            (&metadata["version"], metadata.get("encoding").is_some()),
            (&version.into(), version == "2")
        );
        assert_eq!(content(&Chunk::from_bytes(&file).unwrap()), content(&chunk));
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.len(), 2 * [2, 4, 6][quantization as usize]);
        assert!(again.verify(|_| ()).unwrap().failed.is_empty());
    }
    assert_eq!(open(&dir).disk().keys("").unwrap().len(), 3);
}

fn same(a: &Layer, b: &Layer) {
    assert_eq!((a.k().as_bytes(), a.v().as_bytes()), (b.k().as_bytes(), b.v().as_bytes()));
}

#[test]
fn some_tokens_are_those_of_the_whole_layer() {
    let dir = tempdir().unwrap();
    let mut random = Random(5);
    for quantization in KvQuantization::ALL {
        for tokens in [40, 64, 96, 130, 200] {
            let chunk = encoded(quantization, Dtype::F16, tokens).0;
            stored(open(&dir).put(chunk.clone()).unwrap());
            for _ in 0..20 {
                let (mut ranges, mut at) = (Vec::new(), 0);
                while at < tokens {
                    let start = at + random.below(40);
                    let end = (start + random.below(50)).min(tokens);
                    if start < end {
                        ranges.push(start..end);
                    }
                    at = end.max(start) + random.below(3);
                }
                let whole = chunk.layer(1);
                let row = HEADS * DIM * 2;
                let expected = whole.select(row, &ranges);
                let cold = open(&dir);
                let reader = cold.reader(chunk.id()).unwrap().unwrap();
                same(&reader.tokens(1, &ranges).unwrap(), &expected);
                assert!(reader.bytes_read() > 0 || ranges.is_empty());
                // From memory, and from a layer that was read whole.
                same(&reader.layer(1).unwrap(), &whole);
                same(&reader.tokens(1, &ranges).unwrap(), &expected);
                let held = Store::in_memory(1 << 20);
                held.put(chunk.clone()).unwrap();
                same(&held.reader(chunk.id()).unwrap().unwrap().tokens(1, &ranges).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn every_flipped_bit_of_an_encoded_chunk_is_found() {
    let mut random = Random(9);
    for quantization in [KvQuantization::Q8, KvQuantization::Q4] {
        let chunk = encoded(quantization, Dtype::F16, 100).0;
        let good = chunk.to_bytes();
        for _ in 0..300 {
            let mut bytes = good.clone();
            bytes[random.below(good.len())] ^= 1 << random.below(8);
            match Chunk::from_bytes(&bytes) {
                Err(_) => {}
                // A flip that changes nothing: white space for white space, say.
                Ok(found) => assert_eq!(content(&found), content(&chunk)),
            }
        }
        assert!(matches!(Chunk::from_bytes(&good[..good.len() - 1]), Err(Problem::Length { .. })));
        assert_eq!(raw(&Chunk::from_bytes(&good).unwrap()), raw(&chunk));
    }
}
