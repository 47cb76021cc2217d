//! Some tokens of a layer.

// Lists of ranges may have one.
#![allow(clippy::single_range_in_vec_init)]

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use refrain_kernels::Dtype;
use serde_json::Value;
use tempfile::{TempDir, tempdir};
use twox_hash::XxHash3_128;

use super::{Random, chunk_of, content, forged, id, raw};
use crate::block_digests::within;
use crate::chunk_file::Header;
use crate::hex;
use crate::{Chunk, ChunkId, ChunkReader, Layer, Problem, Store};

/// Tokens of a block.
const BLOCK: usize = 64;

/// Two layers of two heads of three elements.
fn long(tokens: usize, dtype: Dtype) -> Chunk {
    chunk_of(ChunkId { tokens: (0..tokens as u32).collect(), head_dim: 3, ..id(dtype) }, tokens as u64)
}

/// Bytes of the keys of a token.
fn row(chunk: &Chunk) -> usize {
    chunk.layer(0).k().as_bytes().len() / chunk.tokens().len()
}

/// The file as it was written before blocks had digests.
fn old(chunk: &Chunk) -> Vec<u8> {
    [Header { blocks: None, ..Header::of(chunk) }.encode(), raw(chunk)].concat()
}

/// The digests of a layer's blocks as the format describes them.
fn digests(chunk: &Chunk, layer: usize, block: usize) -> String {
    let whole = chunk.layer(layer);
    let (k, v) = (whole.k().as_bytes(), whole.v().as_bytes());
    let place = |b: usize| b * block * row(chunk)..k.len().min((b + 1) * block * row(chunk));
    let digest = |b| format!("{:032x}", XxHash3_128::oneshot(&[&k[place(b)], &v[place(b)]].concat()));
    (0..chunk.tokens().len().div_ceil(block)).map(digest).collect()
}

/// The file with digests of blocks of another size.
fn with_blocks_of(chunk: &Chunk, block: usize) -> Vec<u8> {
    forged(&chunk.to_bytes(), |json| {
        json["__metadata__"]["block.tokens"] = block.to_string().into();
        for layer in 0..chunk.layers() {
            json["__metadata__"][format!("layer.{layer:03}.blocks.xxh3")] =
                digests(chunk, layer, block).into();
        }
    })
}

/// A store that has only this file, and nothing in memory.
fn lying(dir: &TempDir, chunk: &Chunk, bytes: &[u8]) -> Store {
    let store = Store::open(dir.path(), 1 << 20).unwrap();
    let path = store.disk().path(&chunk.key());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
    store
}

fn reader(store: &Store, chunk: &Chunk) -> ChunkReader {
    store.reader(chunk.id()).unwrap().unwrap()
}

fn assert_tokens(found: &Layer, chunk: &Chunk, layer: usize, ranges: &[Range<usize>]) {
    for (found, whole) in [(found.k(), chunk.layer(layer).k()), (found.v(), chunk.layer(layer).v())] {
        let row = row(chunk);
        let expected: Vec<u8> =
            ranges.iter().flat_map(|r| &whole.as_bytes()[row * r.start..row * r.end]).copied().collect();
        assert_eq!((found.as_bytes(), found.dtype()), (expected.as_slice(), whole.dtype()));
    }
}

/// Bytes of the blocks that the ranges touch, keys and values.
fn touched(chunk: &Chunk, block: usize, ranges: &[Range<usize>]) -> u64 {
    let blocks: BTreeSet<usize> = ranges.iter().cloned().flatten().map(|token| token / block).collect();
    let tokens = |b: usize| chunk.tokens().len().min((b + 1) * block) - b * block;
    blocks.into_iter().map(|b| 2 * (tokens(b) * row(chunk)) as u64).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Tokens that are asked for are those of the whole layer, and no block beside is read.
    #[test]
    fn ranges_are_slices_of_the_layer(
        tokens in 1_usize..300,
        mut cuts in prop::collection::vec(0.0..1.0_f64, 0..12),
        dtype in prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]),
        block in prop::sample::select(vec![0, 1, 7, 64, 64, 64, 1000]),
    ) {
        cuts.sort_by(f64::total_cmp);
        let cuts: Vec<usize> = cuts.iter().map(|cut| (cut * (tokens + 1) as f64) as usize).collect();
        let ranges: Vec<Range<usize>> = cuts.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
        let (dir, chunk) = (tempdir().unwrap(), long(tokens, dtype));
        // Zero stands for a file without digests.
        let bytes = match block {
            0 => old(&chunk),
            64 => chunk.to_bytes(),
            block => with_blocks_of(&chunk, block),
        };
        let store = lying(&dir, &chunk, &bytes);
        let reader = reader(&store, &chunk);
        let mut read = 0;
        for layer in [1, 0, 1] {
            assert_tokens(&reader.tokens(layer, &ranges).unwrap(), &chunk, layer, &ranges);
            read += if block == 0 { chunk.bytes() as u64 / 2 } else { touched(&chunk, block, &ranges) };
            prop_assert_eq!((reader.bytes_read(), store.stats().bytes_read), (read, read));
        }
        // Nothing was kept, and reading all of it is as it was.
        prop_assert!(reader.would_be_kept() && store.stats().memory_chunks == 0);
        prop_assert_eq!(content(&reader.chunk().unwrap()), content(&Chunk::from_bytes(&bytes).unwrap()));
        read += chunk.bytes() as u64;
        // A layer that has been read whole serves from memory.
        assert_tokens(&reader.tokens(0, &ranges).unwrap(), &chunk, 0, &ranges);
        prop_assert_eq!(reader.bytes_read(), read);
        let held = store.reader(chunk.id()).unwrap().unwrap();
        assert_tokens(&held.tokens(1, &ranges).unwrap(), &chunk, 1, &ranges);
        prop_assert_eq!((held.bytes_read(), store.stats().bytes_read), (0, read));
        prop_assert_eq!(store.verify(|_| ()).unwrap().whole, 1);
    }
}

#[test]
fn headers_have_the_digests_of_blocks() {
    // The value that XXH3's own specification has for nothing.
    assert_eq!(XxHash3_128::oneshot(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
    for tokens in [1, 63, 64, 65, 128, 200] {
        let chunk = long(tokens, Dtype::F16);
        let (json, _) = super::parts(&chunk.to_bytes());
        let entries = &json["__metadata__"];
        assert_eq!(entries["block.tokens"], "64");
        for layer in 0..2 {
            assert_eq!(entries[format!("layer.{layer:03}.blocks.xxh3")], digests(&chunk, layer, BLOCK));
        }
        assert_eq!(forged(&chunk.to_bytes(), |_| ()).len(), with_blocks_of(&chunk, 64).len());
    }
}

/// Neighbouring blocks are one run, and so one read of keys and one of values.
#[test]
fn neighbouring_blocks_are_one_run() {
    let chunk = long(300, Dtype::F16);
    let blocks = Header::of(&chunk).blocks.unwrap();
    for (ranges, runs, places) in [
        (vec![], vec![], vec![]),
        (vec![0..300], vec![0..300], vec![0..300]),
        (vec![70..71, 100..101], vec![64..128], vec![6..7, 36..37]),
        (vec![10..20, 64..65, 127..129], vec![0..192], vec![10..20, 64..65, 127..129]),
        (vec![63..64, 128..128, 192..193, 299..300], vec![0..64, 192..300], vec![63..64, 64..65, 171..172]),
        (vec![299..300], vec![256..300], vec![43..44]),
    ] {
        assert_eq!(blocks.around(&ranges), runs);
        assert_eq!(within(&ranges, &runs), places);
    }
}

/// A layer that was read whole needs no file, even where the rest of the chunk does.
#[test]
fn a_layer_that_was_read_serves_its_tokens() {
    let (dir, chunk) = (tempdir().unwrap(), long(150, Dtype::F16));
    let store = lying(&dir, &chunk, &chunk.to_bytes());
    let _others = store.other_open_files();
    let reader = reader(&store, &chunk);
    assert!(reader.layer(1).is_some());
    fs::remove_file(store.disk().path(&chunk.key())).unwrap();
    assert_tokens(&reader.tokens(1, &[3..5, 70..150]).unwrap(), &chunk, 1, &[3..5, 70..150]);
    assert_eq!(reader.bytes_read(), chunk.bytes() as u64 / 2);
    // Gone, not broken.
    assert!(reader.tokens(0, &[3..5]).is_none() && reader.tokens(0, &[3..5]).is_none());
    assert_eq!((store.stats().misses, store.take_repairs()), (1, vec![]));
}

/// Damage elsewhere in the layer does no harm to a range, and damage in its blocks is found and told once.
#[test]
fn a_flipped_bit_is_found_in_the_blocks_that_are_read() {
    let chunk = long(200, Dtype::F16);
    let (good, layer, row) = (chunk.to_bytes(), chunk.bytes() / 2, row(&chunk));
    let data = good.len() - chunk.bytes();
    // A range within the second of four blocks, in the second layer.
    let ranges = [70..71, 100..101];
    for half in [0, layer / 2] {
        for (token, is_touched) in
            [(0, false), (63, false), (64, true), (127, true), (128, false), (199, false)]
        {
            for at in [data + layer + half + token * row, data + layer + half + (token + 1) * row - 1] {
                let dir = tempdir().unwrap();
                let mut bytes = good.clone();
                bytes[at] ^= 0x20;
                let store = lying(&dir, &chunk, &bytes);
                let reader = reader(&store, &chunk);
                assert_tokens(&reader.tokens(0, &ranges).unwrap(), &chunk, 0, &ranges);
                let before = reader.bytes_read();
                if !is_touched {
                    assert_tokens(&reader.tokens(1, &ranges).unwrap(), &chunk, 1, &ranges);
                    assert_eq!((reader.bytes_read(), store.take_repairs()), (2 * before, vec![]));
                    continue;
                }
                std::thread::scope(|scope| {
                    (0..4).for_each(|_| _ = scope.spawn(|| assert!(reader.tokens(1, &ranges).is_none())));
                });
                assert!(reader.layer(0).is_none() && reader.tokens(0, &ranges).is_none());
                let repairs = store.take_repairs();
                assert_eq!((repairs.len(), &repairs[0].problem), (1, &Problem::Checksum(1)));
                assert!(repairs[0].removed && !repairs[0].path.exists());
                assert_eq!(
                    (store.stats().removed, store.stats().misses, reader.bytes_read()),
                    (1, 1, before)
                );
            }
        }
    }
}

/// Without digests of blocks all of the layer vouches for a range.
#[test]
fn files_of_earlier_builds_are_verified_layer_by_layer() {
    let (dir, chunk) = (tempdir().unwrap(), long(200, Dtype::F16));
    let mut bytes = old(&chunk);
    *bytes.last_mut().unwrap() ^= 1;
    let store = lying(&dir, &chunk, &bytes);
    let reader = reader(&store, &chunk);
    assert!(reader.tokens(0, &[1..2]).is_some() && reader.tokens(1, &[1..2]).is_none());
    assert_eq!(store.take_repairs()[0].problem, Problem::Checksum(1));
}

#[test]
fn a_file_that_is_cut_midway_is_told() {
    let (dir, chunk) = (tempdir().unwrap(), long(200, Dtype::F16));
    let good = chunk.to_bytes();
    let store = lying(&dir, &chunk, &good);
    let reader = reader(&store, &chunk);
    fs::write(store.disk().path(&chunk.key()), &good[..good.len() - row(&chunk)]).unwrap();
    // Neither the last block nor what is before it needs the header that no longer fits.
    assert!(reader.tokens(1, &[0..10]).is_some());
    assert!(reader.tokens(1, &[198..199]).is_none());
    let repairs = store.take_repairs();
    assert!(matches!(repairs[0].problem, Problem::Length { .. }) && repairs[0].removed);
}

/// Digests that are wrong in themselves: whatever is read by them finds it, and `verify`.
#[test]
fn wrong_digests_are_found() {
    let (dir, chunk) = (tempdir().unwrap(), long(200, Dtype::F16));
    let bytes = forged(&chunk.to_bytes(), |json| {
        let mut digests = digests(&chunk, 1, BLOCK);
        digests.replace_range(..1, if digests.starts_with('0') { "1" } else { "0" });
        json["__metadata__"]["layer.001.blocks.xxh3"] = digests.into();
    });
    assert_eq!(Chunk::from_bytes(&bytes).unwrap_err(), Problem::Checksum(1));
    let store = lying(&dir, &chunk, &bytes);
    let reader = reader(&store, &chunk);
    assert!(reader.layer(0).is_some() && reader.tokens(1, &[64..200]).is_some());
    assert!(reader.tokens(1, &[63..64]).is_none());
    let store = lying(&dir, &chunk, &bytes);
    assert!(self::reader(&store, &chunk).layer(1).is_none());
    let store = lying(&dir, &chunk, &bytes);
    assert_eq!(store.verify(|_| ()).unwrap().failed[0].problem, Problem::Checksum(1));
}

#[test]
fn malformed_digests_are_a_broken_header() {
    let chunk = long(200, Dtype::F16);
    let read = |change: &dyn Fn(&mut Value)| {
        Chunk::from_bytes(&forged(&chunk.to_bytes(), |json| change(&mut json["__metadata__"])))
    };
    let header = |change: &dyn Fn(&mut Value)| match read(change) {
        Err(Problem::Header(message)) => message,
        other => panic!("{other:?}"),
    };
    let remove = |entries: &mut Value, name: &str| _ = entries.as_object_mut().unwrap().remove(name);
    for size in ["0", "-64", "", "x", "64.0", "18446744073709551616"] {
        assert!(
            header(&|entries| entries["block.tokens"] = size.into()).contains("'block.tokens'"),
            "{size}"
        );
    }
    // Other sizes ask for other numbers of digests; blocks of 66 tokens are as many, with other digests.
    for size in ["1", "67", "18446744073709551615"] {
        assert!(
            header(&|entries| entries["block.tokens"] = size.into()).contains("layer.000.blocks.xxh3"),
            "{size}"
        );
    }
    assert_eq!(read(&|entries| entries["block.tokens"] = "66".into()).unwrap_err(), Problem::Checksum(0));
    let good = digests(&chunk, 1, BLOCK);
    for bad in [
        String::new(),
        good[1..].to_owned(),
        good[32..].to_owned(),
        format!("{good}0"),
        format!("{good}{}", &good[..32]),
        format!("g{}", &good[1..]),
        format!("{}é", &good[2..]),
        format!("+{}", &good[1..]),
    ] {
        let message = header(&|entries| entries["layer.001.blocks.xxh3"] = bad.clone().into());
        assert!(message.contains("layer.001.blocks.xxh3"), "{message}");
    }
    for name in ["block.tokens", "layer.000.blocks.xxh3", "layer.001.blocks.xxh3"] {
        assert!(header(&|entries| remove(entries, name)).contains(name));
    }
    // Without any of them it is a file of an earlier build.
    let entries = ["block.tokens", "layer.000.blocks.xxh3", "layer.001.blocks.xxh3"];
    assert!(read(&|json| entries.iter().for_each(|name| remove(json, name))).is_ok());
    assert!(read(&|json| json["layer.001.blocks.xxh3"] = good.to_uppercase().into()).is_ok());
}

#[test]
fn ranges_that_are_none_are_refused() {
    let (dir, chunk) = (tempdir().unwrap(), long(100, Dtype::F16));
    let store = lying(&dir, &chunk, &chunk.to_bytes());
    for reader in [reader(&store, &chunk), chunk.clone().into()] {
        let backward = Range { start: 5, end: 3 };
        for ranges in [vec![0..101], vec![101..101], vec![5..6, 4..5], vec![5..8, 7..9], vec![backward]] {
            let asked = AssertUnwindSafe(|| reader.tokens(0, &ranges));
            assert!(catch_unwind(asked).is_err(), "{ranges:?}");
        }
        assert!(catch_unwind(AssertUnwindSafe(|| reader.tokens(2, std::slice::from_ref(&(0..1))))).is_err());
        for ranges in [vec![], vec![0..0], vec![5..5, 5..6, 6..6, 6..9, 100..100]] {
            assert_tokens(&reader.tokens(0, &ranges).unwrap(), &chunk, 0, &ranges);
        }
    }
}

#[test]
fn hexadecimal_digits_are_read_back() {
    let mut random = Random(3);
    let bytes: Vec<u8> = (0..=255).chain((0..100).map(|_| random.next() as u8)).collect();
    assert_eq!(hex::decode(&hex::encode(&bytes)), Some(bytes.clone()));
    assert_eq!(hex::decode(&hex::encode(&bytes).to_uppercase()), Some(bytes));
    for b in 0..=127_u8 {
        let text = [char::from(b), '0'].iter().collect::<String>();
        let expected = char::from(b).to_digit(16).map(|digit| vec![digit as u8 * 16]);
        assert_eq!(hex::decode(&text), expected, "{text}");
    }
}
