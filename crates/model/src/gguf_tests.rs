use super::*;
use crate::config::Config;
use crate::files::ModelFiles;
use crate::quant::dequantize;
use crate::testing::{GgufBuilder, Random, TestFolder, array, checksum, golden, real_model, tiny_gguf};

fn parse(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::from_bytes("test.gguf", bytes)
}

fn error(builder: &GgufBuilder) -> String {
    parse(builder.build()).unwrap_err().to_string()
}

#[test]
fn values_of_every_type_are_read() {
    let mut nested = array(9, 2);
    nested.extend(array(0, 2));
    nested.extend([7, 8]);
    nested.extend(array(7, 1));
    nested.push(1);
    let gguf = GgufBuilder::new()
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[200])
        .raw("u16", 2, &60_000u16.to_le_bytes())
        .raw("i16", 3, &(-5i16).to_le_bytes())
        .u32("u32", 70_000)
        .raw("i32", 5, &(-9i32).to_le_bytes())
        .f32("f32", 0.5)
        .raw("bool", 7, &[1])
        .str("str", "Größe")
        .raw("nested", 9, &nested)
        .raw("u64", 10, &(1u64 << 40).to_le_bytes())
        .raw("i64", 11, &(-1i64 << 40).to_le_bytes())
        .raw("f64", 12, &0.25f64.to_le_bytes())
        .strings("strings", &["a", ""])
        .i32s("i32s", &[1, -1])
        .build();
    let gguf = parse(gguf).unwrap();
    assert_eq!(gguf.metadata().len(), 15);
    assert_eq!(gguf.get_u32("u8").unwrap(), 200);
    assert_eq!(gguf.get("i8"), Some(&Value::I8(-56)));
    assert_eq!(gguf.get_u32("u32").unwrap(), 70_000);
    assert_eq!(gguf.get_f32("f32").unwrap(), 0.5);
    assert_eq!(gguf.get_f32("f64").unwrap(), 0.25);
    assert_eq!(gguf.opt_bool("bool").unwrap(), Some(true));
    assert_eq!(gguf.get_str("str").unwrap(), "Größe");
    assert_eq!(gguf.get_strings("strings").unwrap(), ["a", ""]);
    assert_eq!(gguf.opt_i32s("i32s").unwrap(), Some(&[1, -1][..]));
    let inner = vec![Array::U8(vec![7, 8]), Array::Bool(vec![true])];
    assert_eq!(gguf.get("nested"), Some(&Value::Array(Array::Array(inner))));
    assert_eq!(gguf.opt_u32("none").unwrap(), None);
    assert!(gguf.get_u32("none").unwrap_err().to_string().contains("'none' is missing"));
    let wrong = gguf.get_u32("u64").unwrap_err().to_string();
    assert!(wrong.contains("'u64'") && wrong.contains("the integer 1099511627776"), "{wrong}");
    assert!(gguf.get_u32("str").unwrap_err().to_string().contains("the string 'Größe'"));
    assert!(gguf.get_str("i32s").unwrap_err().to_string().contains("array of 2 signed 32-bit integers"));
}

#[test]
fn tensors_lie_where_the_directory_says() {
    for (version, alignment) in [(2, 32), (3, 64)] {
        let mut builder = GgufBuilder::new();
        (builder.version, builder.alignment) = (version, alignment);
        let gguf = builder
            .u32("general.alignment", alignment as u32)
            .counting("a", &[3, 5])
            .counting("b", &[7])
            .tensor("c", &[2, 32], 8, &[1; 68])
            .build();
        let gguf = parse(gguf).unwrap();
        let (info, dtype, data) = gguf.tensor("a").unwrap();
        assert_eq!((info.shape.as_slice(), dtype, data.len()), (&[3, 5][..], DType::F32, 60));
        assert_eq!(data[56..], 14f32.to_le_bytes());
        let (info, _, data) = gguf.tensor("b").unwrap();
        assert_eq!((info.range.start % alignment, &data[4..8]), (0, &1f32.to_le_bytes()[..]));
        assert_eq!(gguf.tensor("c").unwrap().2, [1; 68]);
        assert!(gguf.tensor("d").unwrap_err().to_string().contains("'d' is missing"));
    }
}

#[test]
fn a_type_that_cannot_be_read_is_an_error_when_used() {
    let gguf = parse(GgufBuilder::new().tensor("odd", &[2, 256], 18, &[0; 100]).build()).unwrap();
    let message = gguf.tensor("odd").unwrap_err().to_string();
    assert!(
        message.contains("'odd'")
            && message.contains("IQ3_XXS")
            && message.contains("Q4_K")
            && message.ends_with("in one of these"),
        "{message}"
    );
}

#[test]
fn no_truncated_file_is_taken() {
    let whole = tiny_gguf("llama").counting("blk.0.attn_q.weight", &[32, 32]).build();
    parse(whole.clone()).unwrap();
    for len in 0..whole.len() {
        assert!(parse(whole[..len].to_vec()).is_err(), "the first {len} of {} bytes", whole.len());
    }
}

#[test]
fn forged_headers_are_errors() {
    let good = GgufBuilder::new().u32("k", 1).build();
    let patched = |at: usize, bytes: &[u8]| {
        let mut out = good.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        parse(out).unwrap_err().to_string()
    };
    let huge = u64::MAX.to_le_bytes();
    assert!(patched(0, b"GGML").contains("does not begin with 'GGUF'"));
    assert!(patched(4, &[1]).contains("version 1 is not supported"));
    assert!(patched(4, &[0, 0, 0, 3]).contains("big-endian"));
    assert!(patched(8, &huge).contains("more than is sensible"));
    assert!(patched(16, &huge).contains("more than is sensible"));
    assert!(patched(8, &1000u64.to_le_bytes()).contains("a name has 0 bytes"), "padding is no tensor");
    assert!(patched(16, &1000u64.to_le_bytes()).contains("a name has 0 bytes"), "padding is no key");
    assert!(patched(24, &huge).contains("are left"), "a key's length");
    assert!(patched(24, &[0; 8]).contains("a name has 0 bytes"));
    assert!(patched(32, &[0xff]).contains("byte 32: a string is not UTF-8"));
    assert!(patched(33, &[13]).contains("type 13 does not exist"));
}

#[test]
fn forged_values_are_errors() {
    let new = GgufBuilder::new;
    assert!(error(&new().u32("k", 1).u32("k", 2)).contains("'k' appears twice"));
    assert!(error(&new().raw("k", 7, &[2])).contains("a truth value is 2"));
    for count in [1 << 22, 1 << 40, u64::MAX as usize] {
        for type_id in 0..=12 {
            let message = error(&new().raw("k", 9, &array(type_id, count)));
            let known = ["are left", "does not fit", "more than is sensible"];
            assert!(known.iter().any(|k| message.contains(k)), "{type_id}, {count}: {message}");
        }
    }
    let deep: Vec<u8> = (0..1000).flat_map(|_| array(9, 1)).collect();
    assert!(error(&new().raw("k", 9, &deep)).contains("nested too deeply"));
    for alignment in [0, 3, 24, 1 << 20, u32::MAX] {
        assert!(error(&new().u32("general.alignment", alignment)).contains("power of two"), "{alignment}");
    }
    assert!(error(&new().str("general.alignment", "x")).contains("the string 'x'"));
}

#[test]
fn forged_directories_are_errors() {
    let new = GgufBuilder::new;
    assert!(error(&new().counting("t", &[1]).counting("t", &[1])).contains("'t' appears twice"));
    assert!(error(&new().entry("t", &[], 0, 0)).contains("0 dimensions"));
    assert!(error(&new().entry("t", &[1; 5], 0, 0)).contains("5 dimensions"));
    assert!(error(&new().entry("t", &[0, 1 << 40], 0, 0)).contains("'t' is empty"));
    assert!(error(&new().entry("t", &[1 << 40, 1 << 40], 0, 0)).contains("overflows"));
    assert!(error(&new().entry("t", &[1 << 62, 1], 0, 0)).contains("overflows"));
    assert!(error(&new().entry("t", &[1 << 20, 1 << 20], 0, 0)).contains("but the file has"));
    assert!(error(&new().entry("t", &[4, 33], 8, 0)).contains("no whole Q8_0 blocks"));
    assert!(error(&new().entry("t", &[4, 128], 12, 0)).contains("no whole Q4_K blocks"));
    assert!(error(&new().entry("t", &[1], 0, 5)).contains("not aligned"));
    assert!(error(&new().entry("t", &[1], 0, u64::MAX - 31)).contains("impossible offset"));
    assert!(error(&new().entry("t", &[1], 0, 1 << 30)).contains("but the file has"));
    assert!(error(&new().entry("t", &[1], 18, 1 << 30)).contains("but the file has"));
}

/// Advice to fetch a file again is given where that can help.
#[test]
fn files_that_are_whole_are_not_to_be_fetched_again() {
    let good = GgufBuilder::new().u32("k", 1).build();
    let of_version = |version: [u8; 4]| parse([&good[..4], &version, &good[8..]].concat()).unwrap_err();
    for (error, advice) in [
        (of_version([1, 0, 0, 0]), "convert the model with a current converter"),
        (of_version([0, 0, 0, 3]), "gguf_convert_endian.py"),
        (parse(b"PK\x03\x04 weights of torch".to_vec()).unwrap_err(), "the folder that holds config.json"),
    ] {
        let message = error.to_string();
        assert!(message.contains(advice) && message.starts_with("test.gguf"), "{message}");
        assert!(!message.contains("truncated") && !message.contains("fetch the file"), "{message}");
    }
    let cut = parse(good[..good.len() - 40].to_vec()).unwrap_err().to_string();
    assert!(cut.contains("truncated") && cut.ends_with("fetch the file again"), "{cut}");
}

/// Everything that a loader does with a file whose bytes are not trusted.
fn exercise(bytes: Vec<u8>) {
    let Ok(gguf) = parse(bytes) else { return };
    let _ = Config::from_gguf(&gguf);
    for name in gguf.tensors().keys() {
        let Ok((info, dtype, data)) = gguf.tensor(name) else { continue };
        let cols = info.shape[info.shape.len() - 1];
        if let Some(row) = dtype.bytes_for(cols).and_then(|len| data.get(..len)) {
            dequantize(dtype, row, &mut vec![0.0; cols]).unwrap();
        }
    }
    let Ok(files) = ModelFiles::from_gguf(gguf) else { return };
    let _ = files.fingerprint(|_, _| ());
    for name in ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"] {
        let Ok(matrix) = files.weights().matrix(name) else { continue };
        matrix.row(matrix.rows() - 1, &mut vec![0.0; matrix.cols()]).unwrap();
    }
}

#[test]
fn damaged_files_never_panic() {
    let q4_0 = Random::new(3).bytes(18 * 32);
    let whole = tiny_gguf("llama")
        .f32("llama.rope.scaling.factor", 2.0)
        .counting("rope_freqs.weight", &[4])
        .tensor("blk.0.attn_q.weight", &[32, 32], 2, &q4_0)
        .build();
    let head = whole.len() - 18 * 32 - 6 * 32 * 4;
    let mut random = Random::new(1);
    let mut taken = 0;
    for _ in 0..40_000 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(4) {
            let at = random.below(head);
            match random.below(4) {
                0 => bytes[at] = random.next() as u8,
                1 => bytes[at] ^= 1 << random.below(8),
                2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
                _ => {
                    let word = [0, 1, u64::MAX, 1 << 31, 1 << 63, 1 << 32, random.next()][random.below(7)];
                    bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        if random.below(8) == 0 {
            bytes.truncate(random.below(bytes.len()));
        }
        taken += usize::from(parse(bytes.clone()).is_ok());
        exercise(bytes);
    }
    assert!(taken > 1000, "only {taken} of the damaged files were taken: the test tests little");
}

/// Makes a seed for the fuzz target:
/// `REFRAIN_SEED=../../fuzz/seeds/gguf/tiny.gguf cargo test -p refrain-model -- --ignored write_fuzz_seed`.
#[test]
#[ignore = "writes a file"]
fn write_fuzz_seed() {
    let bytes = tiny_gguf("llama")
        .counting("rope_freqs.weight", &[4])
        .tensor("blk.0.attn_q.weight", &[32, 32], 2, &[0x33; 18 * 32])
        .tensor("blk.0.ffn_down.weight", &[1, 256], 12, &[0x33; 144])
        .build();
    std::fs::write(std::env::var("REFRAIN_SEED").expect("REFRAIN_SEED names the file"), bytes).unwrap();
}

/// Directory and values of real files, against the `gguf` package's reader (`tools/golden_quants.py`).
#[test]
fn real_files_are_read_as_ggml_reads_them() {
    for file in ["SmolLM2-135M-Instruct.Q4_1", "qwen2.5-coder-0.5b-instruct-q4_k_m"] {
        let Some(path) = real_model(&format!("{file}.gguf")) else { continue };
        let (gguf, golden) = (Gguf::open(&path).unwrap(), golden(&format!("gguf/{file}.json")));
        assert_eq!(golden["metadata"], gguf.metadata().len());
        let tensors = golden["tensors"].as_object().unwrap();
        assert_eq!(tensors.len(), gguf.tensors().len());
        for (name, expected) in tensors {
            let (info, dtype, _) = gguf.tensor(name).unwrap();
            let shape: Vec<String> = info.shape.iter().map(usize::to_string).collect();
            assert_eq!(*expected, format!("{dtype} {}", shape.join("x")), "{name}");
        }
        let checksums = golden["checksums"].as_object().unwrap();
        for (name, expected) in checksums {
            let (info, dtype, data) = gguf.tensor(name).unwrap();
            let mut values = vec![0.0; info.shape.iter().product()];
            dequantize(dtype, data, &mut values).unwrap();
            assert_eq!(*expected, checksum(&values), "{name} of {dtype}");
        }
        eprintln!("{file}: {} tensors, values of {}", tensors.len(), checksums.len());
    }
}

/// The file `part` of `count`, with one tensor of its own.
fn split_file(part: u16, count: u16) -> Vec<u8> {
    let builder = if part == 0 { tiny_gguf("llama") } else { GgufBuilder::new() };
    builder
        .raw("split.no", 2, &part.to_le_bytes())
        .raw("split.count", 2, &count.to_le_bytes())
        .tensor(&format!("own.{part}"), &[1, 2], 0, &[f32::from(part), 1.0].map(f32::to_le_bytes).concat())
        .build()
}

#[test]
fn a_model_in_several_files_is_opened_by_its_first() {
    let folder = TestFolder::new();
    let name = |part: u16| format!("big-{:05}-of-00003.gguf", part + 1);
    for part in 0..3 {
        folder.write(&name(part), split_file(part, 3));
    }
    let open = |part| Gguf::open(&folder.path().join(name(part)));
    let gguf = open(0).unwrap();
    assert_eq!(gguf.get_str("general.architecture").unwrap(), "llama");
    for part in 0..3u16 {
        let (info, dtype, data) = gguf.tensor(&format!("own.{part}")).unwrap();
        assert_eq!((info.shape.as_slice(), dtype), (&[1, 2][..], DType::F32));
        assert_eq!(data[..4], f32::from(part).to_le_bytes());
    }
    assert_eq!(gguf.files().len(), 3);
    let message = |part| open(part).unwrap_err().to_string();
    assert!(
        message(1).contains("part 2 of 3") && message(1).contains("big-00001-of-00003.gguf"),
        "{}",
        message(1)
    );
    // Two parts with one tensor, a part of another model, and one that is missing.
    folder.write(&name(2), split_file(1, 3));
    assert!(message(0).contains("says that it is part 2 of 3"), "{}", message(0));
    let twice = split_file(2, 3);
    let at = twice.windows(5).position(|bytes| bytes == b"own.2").unwrap();
    folder.write(&name(2), [&twice[..at + 4], b"1", &twice[at + 5..]].concat());
    assert!(message(0).contains("'own.1' is in two parts"), "{}", message(0));
    std::fs::remove_file(folder.path().join(name(2))).unwrap();
    assert!(message(0).contains(&name(2)), "{}", message(0));
    folder.write("renamed.gguf", split_file(0, 3));
    let renamed = Gguf::open(&folder.path().join("renamed.gguf")).unwrap_err().to_string();
    assert!(renamed.contains("-00001-of-00003.gguf") && renamed.contains("published"), "{renamed}");
    assert!([renamed, message(1)].iter().all(|message| !message.contains("truncated")));
    let far = tiny_gguf("llama").raw("split.no", 4, &u32::MAX.to_le_bytes());
    folder.write("far.gguf", far.raw("split.count", 4, &2u32.to_le_bytes()).build());
    let far = Gguf::open(&folder.path().join("far.gguf")).unwrap_err().to_string();
    assert!(far.contains("is part 4294967295 of 2"), "{far}");
}
