use std::sync::Arc;
use std::time::SystemTime;

use refrain_kernels::{Cpu, Dtype, ReferenceDevice, copy_range};

use super::*;
use crate::decoder::{Decoder, Workspace};
use crate::testing::TestFolder;

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Q8];

fn tiny(name: &str) -> ModelFiles {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny");
    ModelFiles::open(tiny.join(name)).unwrap()
}

fn place(folder: &TestFolder, precision: Precision) -> PackedWeights {
    let of = Identity { layout: "panels".to_owned(), fingerprint: [7; 32], precision: precision.to_string() };
    PackedWeights { path: folder.path().join(format!("{precision}.packed")), of }
}

/// Logits after a pass through all matrices of a model, with queries where attention's output would be.
fn logits(name: &str, precision: Precision, kept: Option<&PackedWeights>) -> Vec<u32> {
    let device: Arc<dyn Device> = Arc::new(Cpu::new(2).unwrap());
    let decoder = Decoder::load(tiny(name), &device, precision, kept, |_, _| ()).unwrap();
    let (mut x, mut work) = (device.floats(0), Workspace::new(&*device, Dtype::F32));
    decoder.embed(3, |row| row as u32 + 1, &mut x).unwrap();
    for layer in 0..decoder.config().num_layers() {
        decoder.project(layer, &x, 0..3, &mut work);
        copy_range(&*device, &work.q, 0..work.q.len(), &mut work.attended);
        decoder.finish(layer, &mut x, 0..3, (&work, 0));
    }
    decoder.logits(&x, &mut work);
    work.logits.iter().map(|logit| logit.to_bits()).collect()
}

/// A file's length and time of modification: another after it was written again.
fn state(path: &Path) -> (u64, SystemTime) {
    let meta = std::fs::metadata(path).unwrap();
    (meta.len(), meta.modified().unwrap())
}

#[test]
fn weights_from_the_file_are_the_packed_ones() {
    for name in ["llama", "qwen2", "phi3", "qwen3_moe"] {
        for precision in PRECISIONS {
            let folder = TestFolder::new();
            let kept = place(&folder, precision);
            let fresh = logits(name, precision, None);
            assert_eq!(logits(name, precision, Some(&kept)), fresh, "{name} {precision}, written");
            let written = state(&kept.path);
            assert_eq!(logits(name, precision, Some(&kept)), fresh, "{name} {precision}, read");
            assert_eq!(state(&kept.path), written, "{name} {precision} was packed again");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "one file, no parts");
        }
    }
}

#[test]
fn a_damaged_file_is_made_again() {
    let folder = TestFolder::new();
    let kept = place(&folder, Precision::Bf16);
    let fresh = logits("llama", Precision::Bf16, Some(&kept));
    let whole = std::fs::read(&kept.path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let last = whole.len() - 1;
    let flips = (0..40).map(|i| last * i / 39).chain(last - 24..=last).map(flipped);
    let cuts = [0, 1, 7, 8, 9, last / 2, last].map(|length| whole[..length].to_vec());
    for bytes in flips.chain(cuts) {
        std::fs::write(&kept.path, bytes).unwrap();
        assert_eq!(logits("llama", Precision::Bf16, Some(&kept)), fresh);
        assert!(std::fs::read(&kept.path).unwrap() == whole, "the file is whole again");
    }
}

#[test]
fn blocks_that_a_precision_has_not_are_damage() {
    let folder = TestFolder::new();
    let kept = place(&folder, Precision::Bf16);
    let fresh = logits("llama", Precision::Bf16, Some(&kept));
    let whole = std::fs::read(&kept.path).unwrap();
    // An index, its hash and its length are at the end.
    let index = whole.len() - 2 * WORD - u64::from_le_bytes(*whole.last_chunk().unwrap()) as usize;
    let text = std::str::from_utf8(&whole[index..whole.len() - 2 * WORD]).unwrap();
    let text = text.replacen("\"four_bits\":false", "\"four_bits\":true ", 1);
    let hash = XxHash3_64::oneshot(text.as_bytes()).to_le_bytes();
    let bytes = [&whole[..index], text.as_bytes(), &hash, &whole[whole.len() - WORD..]].concat();
    assert!(bytes.len() == whole.len() && bytes != whole);
    std::fs::write(&kept.path, bytes).unwrap();
    assert_eq!(logits("llama", Precision::Bf16, Some(&kept)), fresh);
    assert!(std::fs::read(&kept.path).unwrap() == whole, "the file is whole again");
}

#[test]
fn a_file_of_other_weights_is_replaced() {
    let folder = TestFolder::new();
    let kept = place(&folder, Precision::Bf16);
    let other = PackedWeights { of: Identity { fingerprint: [8; 32], ..kept.of.clone() }, ..kept.clone() };
    let newer =
        PackedWeights { of: Identity { layout: "others".to_owned(), ..kept.of.clone() }, ..kept.clone() };
    let llama = logits("llama", Precision::Bf16, Some(&kept));
    let tied = logits("llama_tied", Precision::Bf16, Some(&other));
    assert_ne!(llama, tied);
    assert!(kept.open().is_none() && other.open().is_some());
    assert_eq!(logits("llama", Precision::Bf16, Some(&newer)), llama);
    assert!(other.open().is_none() && newer.open().is_some());
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let folder = TestFolder::new();
    let kept =
        PackedWeights { path: folder.path().join("gone/f32.packed"), ..place(&folder, Precision::F32) };
    assert_eq!(logits("llama", Precision::F32, Some(&kept)), logits("llama", Precision::F32, None));
}

#[test]
fn what_stopped_programs_left_is_removed() {
    let folder = TestFolder::new();
    let kept = place(&folder, Precision::Q8);
    let long_ago = SystemTime::now() - 2 * ABANDONED;
    let left = folder.write("q8.1234.part", "left");
    let others = [folder.write("bf16.1234.part", "of others"), folder.write("q8.packed.txt", "no part")];
    let fresh = folder.write("q8.1235.part", "being written");
    for path in others.iter().chain([&left]) {
        File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    }
    logits("llama", Precision::Q8, Some(&kept));
    assert!(!left.exists(), "left long ago");
    assert!(fresh.exists() && others.iter().all(|path| path.exists()));
}

#[test]
fn small_models_and_devices_without_a_layout_keep_nothing() {
    let cpu = Cpu::new(1).unwrap();
    assert!(PackedWeights::beside(&tiny("llama"), [0; 32], Precision::Q8, &cpu).is_none());
    assert_eq!(ReferenceDevice.packed_layout(), None);
}
