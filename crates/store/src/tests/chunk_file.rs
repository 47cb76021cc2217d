use refrain_kernels::{Buffer, Dtype, Slice};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{Random, assemble, chunk, chunk_of, content, forged, id, mutate, numbered, parts, raw};
use crate::chunk_file::{Header, verify_layers};
use crate::{Chunk, ChunkId, KvQuantization, Layer, Problem, StoreError};

fn forge(change: impl Fn(&mut Value)) -> Result<Chunk, Problem> {
    Chunk::from_bytes(&forged(&chunk().to_bytes(), change))
}

#[test]
fn every_type_survives_the_round_trip() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let id = ChunkId { head_dim: 3, tokens: vec![9], kv_heads: 1, ..id(dtype) };
        let chunk = chunk_of(id, 7);
        let read = Chunk::from_bytes(&chunk.to_bytes()).unwrap();
        assert_eq!(content(&read), content(&chunk));
        assert_eq!(read.key(), chunk.key());
        for layer in 0..2 {
            assert_eq!(read.layer(layer).k().dtype(), dtype);
            assert_eq!(read.layer(layer).k().len(), 3);
            assert_eq!(read.layer(layer).v().as_bytes(), chunk.layer(layer).v().as_bytes());
        }
    }
}

#[test]
fn the_file_is_a_safetensors_file_with_contiguous_layers() {
    let id = ChunkId { layers: 12, ..id(Dtype::Bf16) };
    let chunk = chunk_of(id, 3);
    let bytes = chunk.to_bytes();
    let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert!(length.is_multiple_of(8));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = Vec::new();
    for layer in 0..12 {
        let (k, v) = (format!("layer.{layer:03}.k"), format!("layer.{layer:03}.v"));
        assert_eq!(tensors.tensor(&k).unwrap().data(), chunk.layer(layer).k().as_bytes());
        assert_eq!(tensors.tensor(&v).unwrap().data(), chunk.layer(layer).v().as_bytes());
        assert_eq!(tensors.tensor(&k).unwrap().shape(), [3, 2, 4]);
        let both = [chunk.layer(layer).k().as_bytes(), chunk.layer(layer).v().as_bytes()].concat();
        let entries = metadata.metadata().as_ref().unwrap();
        assert_eq!(entries[&format!("layer.{layer:03}.blake3")], blake3::hash(&both).to_hex().as_str());
        names.extend([k, v]);
    }
    assert_eq!(metadata.offset_keys(), names);
    // A file that the safetensors crate itself writes has the data in the same order.
    let rewritten = safetensors::serialize(tensors.iter(), metadata.metadata().clone()).unwrap();
    assert_eq!(rewritten[rewritten.len() - chunk.bytes()..], *raw(&chunk));
    assert_eq!(content(&Chunk::from_bytes(&rewritten).unwrap()), content(&chunk));
}

/// Files of earlier builds stay readable: change the format version before changing this.
#[test]
fn bytes_stay_what_they_are() {
    let mut header = Header::of(&chunk());
    header.provenance.created = 1_700_000_000;
    let hash = |header: &Header| blake3::hash(&[header.encode(), raw(&chunk())].concat()).to_string();
    assert_eq!(hash(&header), "5b506c75b104bada3299aa2b5cc56b3268345555aec0b19db4d2267f4f845597");
    // As it was before blocks had digests.
    header.blocks = None;
    assert_eq!(hash(&header), "bef61cc4d2985dde5ab02333792455a7525a4f9a26743924d94d88f312203ff2");
}

#[test]
fn layers_that_do_not_fit_are_refused() {
    let zeros = |dtype, n| {
        let zeros = Buffer::zeros(dtype, n);
        Layer::exact(zeros.as_slice(), zeros.as_slice())
    };
    let good = || zeros(Dtype::F16, 24);
    let new = |layers| Chunk::new(id(Dtype::F16), "", layers);
    assert!(new(vec![good(), good()]).is_ok());
    assert!(matches!(new(vec![good()]), Err(StoreError::Layers { found: 1, expected: 2 })));
    assert!(matches!(new(vec![good(), good(), good()]), Err(StoreError::Layers { found: 3, expected: 2 })));
    let short = new(vec![good(), zeros(Dtype::F16, 23)]);
    assert!(matches!(short, Err(StoreError::Layer { layer: 1, found: 23, expected: 24, .. })));
    let other = new(vec![zeros(Dtype::F32, 24), good()]);
    assert!(other.unwrap_err().to_string().contains("layer 0 are 24 elements of f32"));
    assert!(Chunk::new(ChunkId { tokens: vec![], ..id(Dtype::F16) }, "", vec![good(), good()]).is_err());
}

#[test]
fn every_flipped_bit_is_found() {
    let bytes = chunk().to_bytes();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            assert!(Chunk::from_bytes(&flipped).is_err(), "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn a_flipped_bit_is_found_in_its_layer() {
    let bytes = chunk().to_bytes();
    let data = bytes.len() - chunk().bytes();
    let layer = chunk().bytes() / 2;
    for (at, expected) in [(data, 0), (data + layer - 1, 0), (data + layer, 1), (bytes.len() - 1, 1)] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x10;
        assert_eq!(Chunk::from_bytes(&flipped).unwrap_err(), Problem::Checksum(expected));
        let mut reader = flipped.as_slice();
        let header = Header::read(&mut reader, flipped.len() as u64).unwrap();
        assert_eq!(verify_layers(&header, &mut reader), Err(Problem::Checksum(expected)));
    }
}

#[test]
fn every_truncation_and_every_tail_is_found() {
    let bytes = chunk().to_bytes();
    for len in 0..bytes.len() {
        assert!(Chunk::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
    }
    for tail in [1, 2, 8, 4096] {
        let longer = [bytes.as_slice(), &vec![0; tail]].concat();
        assert!(matches!(Chunk::from_bytes(&longer), Err(Problem::Length { .. })));
    }
    // A file that is cut while it is read.
    let mut reader = &bytes[..bytes.len() - 1];
    let header = Header::read(&mut reader, bytes.len() as u64).unwrap();
    assert!(matches!(verify_layers(&header, &mut reader.to_vec().as_slice()), Err(Problem::Length { .. })));
    assert!(matches!(crate::chunk_file::read_layers(header, &mut reader), Err(Problem::Length { .. })));
}

/// Large layers are verified piece by piece, and pieces end within blocks.
#[test]
fn layers_larger_than_a_piece_are_verified() {
    let id = ChunkId { tokens: (0..1100).collect(), kv_heads: 4, head_dim: 150, layers: 1, ..id(Dtype::F16) };
    let mut bytes = chunk_of(id, 5).to_bytes();
    let check = |bytes: &[u8]| {
        let mut reader = bytes;
        verify_layers(&Header::read(&mut reader, bytes.len() as u64).unwrap(), &mut reader)
    };
    assert_eq!(check(&bytes), Ok(()));
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(check(&bytes), Err(Problem::Checksum(0)));
}

#[test]
fn forged_headers_are_refused() {
    assert!(forge(|_| ()).is_ok());
    let header = |change: &dyn Fn(&mut Value)| match forge(change) {
        Err(Problem::Header(message)) => message,
        other => panic!("{other:?}"),
    };
    // Another shape than the tensors have.
    assert!(header(&|j| j["__metadata__"]["kv_heads"] = "4".into()).contains("layer.000.k"));
    assert!(header(&|j| j["__metadata__"]["tokens"] = "[1,2]".into()).contains("layer.000.k"));
    assert!(header(&|j| j["__metadata__"]["dtype"] = "bf16".into()).contains("layer.000.k"));
    assert!(header(&|j| j["__metadata__"]["layers"] = "1".into()).contains("2 tensors"));
    assert!(header(&|j| j["__metadata__"]["layers"] = "3".into()).contains("layer.002.blake3"));
    assert!(header(&|j| j["layer.000.k"]["shape"] = json!([2, 3, 4])).contains("layer.000.k"));
    // Sizes that overflow, or are nothing.
    for size in ["0", "18446744073709551615", "4611686018427387904", "-1", "x", ""] {
        header(&|j| j["__metadata__"]["head_dim"] = size.into());
        header(&|j| j["__metadata__"]["layers"] = size.into());
    }
    header(&|j| j["__metadata__"]["tokens"] = "[]".into());
    header(&|j| j["__metadata__"]["tokens"] = "[4294967296]".into());
    header(&|j| j["layer.000.k"]["shape"] = json!([usize::MAX, 2, 2]));
    // Keys and values in each other's place: offsets that safetensors allows.
    assert!(
        header(&|j| {
            let k = j["layer.000.k"].take();
            j["layer.000.k"] = j["layer.000.v"].take();
            j["layer.000.v"] = k;
        })
        .contains("layer.000.k")
    );
    // Overlapping and reversed offsets.
    header(&|j| j["layer.000.v"]["data_offsets"] = json!([0, 48]));
    header(&|j| j["layer.000.v"]["data_offsets"] = json!([96, 48]));
    // Missing and foreign entries.
    for name in ["format", "model", "tokens", "label", "created", "layer.001.blake3"] {
        let message = header(&|j| _ = j["__metadata__"].as_object_mut().unwrap().remove(name));
        assert!(message.contains(name), "{message}");
    }
    assert!(header(&|j| j["__metadata__"]["format"] = "pt".into()).contains("refrain-chunk"));
    assert!(header(&|j| j["__metadata__"]["bos"] = "maybe".into()).contains("bos"));
}

#[test]
fn a_chunk_behind_a_prefix_is_read_back_with_it() {
    for quantization in KvQuantization::ALL {
        let id = ChunkId { prefix: Some(ChunkId::digest(&[7, 8])), quantization, ..id(Dtype::F16) };
        let chunk = chunk_of(id.clone(), 3);
        let (json, _) = parts(&chunk.to_bytes());
        assert_eq!(json["__metadata__"]["version"], "3");
        assert_eq!(Chunk::from_bytes(&chunk.to_bytes()).unwrap().id(), chunk.id());
        assert_ne!(chunk.id().key(), ChunkId { prefix: None, ..id }.key());
    }
}

/// Who computed a chunk is told, and does not enter its name.
#[test]
fn numerics_are_read_back_and_are_no_part_of_the_key() {
    let computed = chunk().with_numerics("bf16-avx512");
    let (json, _) = parts(&computed.to_bytes());
    assert_eq!(
        (&json["__metadata__"]["version"], &json["__metadata__"]["numerics"]),
        (&json!("1"), &json!("bf16-avx512"))
    );
    let read = Chunk::from_bytes(&computed.to_bytes()).unwrap();
    assert_eq!((read.numerics(), read.id()), (Some("bf16-avx512"), chunk().id()));
    assert_eq!(read.moved("other").numerics(), Some("bf16-avx512"));
    // Files of earlier builds do not say it.
    assert!(parts(&chunk().to_bytes()).0["__metadata__"].get("numerics").is_none());
    assert_eq!(Chunk::from_bytes(&chunk().to_bytes()).unwrap().numerics(), None);
}

#[test]
fn numerics_of_an_identity_are_part_of_the_key_and_version() {
    for (quantization, prefix) in [(KvQuantization::Exact, None), (KvQuantization::Q8, Some([7; 32]))] {
        let numerics = Some("bf16-avx2".to_owned());
        let id = ChunkId { quantization, prefix, numerics, ..id(Dtype::F16) };
        let chunk = chunk_of(id.clone(), 3);
        assert_eq!(parts(&chunk.to_bytes()).0["__metadata__"]["version"], "4");
        let read = Chunk::from_bytes(&chunk.to_bytes()).unwrap();
        assert_eq!((read.id(), read.numerics()), (&id, Some("bf16-avx2")));
        assert_eq!(chunk.with_numerics("bf16-portable").numerics(), Some("bf16-avx2"));
        assert_ne!(id.key(), ChunkId { numerics: None, ..id.clone() }.key());
    }
}

#[test]
fn an_unknown_version_is_told_from_damage() {
    let newer = forge(|j| j["__metadata__"]["version"] = "5".into()).unwrap_err();
    assert_eq!(newer, Problem::UnknownVersion("5".into()));
    // The second version is that of what is encoded, and says how; the third that of what was prefilled behind a prefix; the
    // fourth that of what belongs to its numerics.
    for version in ["2", "3", "4"] {
        let lacking = forge(|j| j["__metadata__"]["version"] = version.into()).unwrap_err();
        assert!(matches!(lacking, Problem::Header(_)), "{lacking}");
    }
    // The form of 8 bits that earlier builds wrote.
    let earlier = forge(|j| {
        j["__metadata__"]["version"] = "2".into();
        j["__metadata__"]["encoding"] = "q8".into();
    });
    assert_eq!(earlier.unwrap_err(), Problem::UnknownVersion("2 with the encoding q8".into()));
    let unasked = forge(|j| j["__metadata__"]["prefix"] = "0".repeat(64).into()).unwrap_err();
    assert!(matches!(unasked, Problem::Header(_)), "{unasked}");
    assert!(!newer.is_permanent());
    assert!(Problem::Checksum(0).is_permanent());
    let (mut json, data) = parts(&chunk().to_bytes());
    json["__metadata__"]["label"] = "another".into();
    assert_eq!(Chunk::from_bytes(&assemble(&json, &data)).unwrap_err(), Problem::HeaderChecksum);
}

#[test]
fn absurd_lengths_take_no_memory() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, (16 << 20) + 1, 1 << 20] {
        let bytes = [&length.to_le_bytes(), b"{}".as_slice()].concat();
        assert!(Chunk::from_bytes(&bytes).is_err());
    }
    assert!(Chunk::from_bytes(&[]).is_err());
}

/// The reader panics at no change of a file, and a file that it accepts is the chunk that was written.
#[test]
fn mutations_are_found() {
    let (one, two) = (chunk(), numbered(2, 4));
    let files = [one.to_bytes(), two.to_bytes()];
    let mut random = Random(0x5eed);
    for _ in 0..20_000 {
        let which = random.below(2);
        let mut bytes = files[which].clone();
        for _ in 0..=random.below(4) {
            mutate(&mut bytes, &files[1 - which], &mut random);
        }
        if let Ok(read) = Chunk::from_bytes(&bytes) {
            let expected = [&one, &two].into_iter().find(|chunk| chunk.key() == read.key()).unwrap();
            assert_eq!(content(&read), content(expected));
        }
    }
}

#[test]
fn random_bytes_are_refused() {
    let mut random = Random(77);
    for _ in 0..20_000 {
        let len = random.below(300);
        let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        if len >= 8 && random.below(2) == 0 {
            let length = random.below(len) as u64;
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        assert!(Chunk::from_bytes(&bytes).is_err());
    }
}

#[test]
fn slices_are_numbers_where_they_lie() {
    let mut keys = Buffer::zeros(Dtype::F32, 24);
    keys.write_f32(0, &(0..24).map(|i| i as f32).collect::<Vec<_>>());
    let values = Buffer::zeros(Dtype::F32, 24);
    let layer = |k: &Buffer, v: &Buffer| Layer::exact(k.as_slice(), v.as_slice());
    let chunk = Chunk::new(id(Dtype::F32), "", vec![layer(&keys, &values), layer(&values, &keys)]).unwrap();
    assert!(matches!(chunk.layer(0).k(), Slice::F32(k) if k[23] == 23.0));
    assert_eq!(chunk.layer(1).k().get(5), 0.0);
    assert_eq!(chunk.layer(1).v().get(5), 5.0);
    assert_eq!(chunk.bytes(), 4 * 24 * 4);
    assert_eq!(chunk.tokens(), [5, 70_000, u32::MAX]);
}
