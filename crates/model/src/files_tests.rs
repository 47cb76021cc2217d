use super::*;
use crate::testing::{TestFolder, real_model, tiny_gguf};

#[test]
fn a_gguf_file_and_a_folder_open() {
    let folder = TestFolder::new();
    let path = folder.write("tiny.gguf", tiny_gguf("llama").build());
    let files = ModelFiles::open(&path).unwrap();
    assert_eq!(files.path(), path);
    assert!(files.gguf().is_some() && files.folder().is_none());

    folder.write_safetensors("model.safetensors", &[("model.norm.weight", &[32])]);
    folder.write(
        "config.json",
        r#"{"model_type":"llama","hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,
            "num_attention_heads":4,"vocab_size":6,"max_position_embeddings":128}"#,
    );
    let files = ModelFiles::open(folder.path()).unwrap();
    assert!(files.gguf().is_none() && files.folder() == Some(folder.path()));
}

#[test]
fn what_is_no_model_is_an_error() {
    let folder = TestFolder::new();
    let gone = ModelFiles::open(folder.path().join("gone.gguf")).unwrap_err().to_string();
    assert!(gone.contains("gone.gguf") && gone.contains("cannot read"), "{gone}");
    assert!(ModelFiles::open(folder.path()).unwrap_err().to_string().contains("is no model"));
    let text = folder.write("text.gguf", "hello, I am no model");
    assert!(ModelFiles::open(text).unwrap_err().to_string().contains("does not begin with 'GGUF'"));
    let empty = folder.write("empty.gguf", "");
    assert!(ModelFiles::open(empty).unwrap_err().to_string().contains("truncated"));
    folder.write_safetensors("model.safetensors", &[("model.norm.weight", &[32])]);
    assert!(ModelFiles::open(folder.path()).unwrap_err().to_string().contains("config.json"));
}

#[test]
fn the_fingerprint_follows_the_model() {
    let folder = TestFolder::new();
    let print = |name: &str, bytes: Vec<u8>| {
        ModelFiles::open(folder.write(name, bytes)).unwrap().fingerprint(|_, _| ())
    };
    let bytes = tiny_gguf("llama").build();
    let first = print("a.gguf", bytes.clone());
    assert_eq!(first, print("b.gguf", bytes.clone()), "the name of the file does not matter");
    let mut weight = bytes.clone();
    *weight.last_mut().unwrap() ^= 1;
    assert_ne!(first, print("c.gguf", weight));
    assert_ne!(first, print("d.gguf", tiny_gguf("qwen2").build()));
    assert_ne!(first, print("e.gguf", tiny_gguf("llama").counting("x", &[1]).build()));

    // Every byte of a tensor counts.
    let large = |at: usize| {
        let mut data = vec![0; 4 * 100_000];
        data[at] = 1;
        print("large.gguf", tiny_gguf("llama").tensor("x", &[100_000], 0, &data).build())
    };
    let prints = [large(0), large(200_001), large(399_999), large(100_000), large(300_000)];
    for (i, a) in prints.iter().enumerate() {
        assert!(prints[..i].iter().all(|b| a != b));
    }
}

#[test]
fn a_real_models_fingerprint_is_remembered() {
    let Some(path) = real_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") else { return };
    let start = std::time::Instant::now();
    let files = ModelFiles::open(path).unwrap();
    let opened = start.elapsed();
    let _ = files.fingerprint(|_, _| ());
    let first = start.elapsed() - opened;
    let again = std::time::Instant::now();
    let _ = files.fingerprint(|_, _| panic!("a remembered file is not hashed"));
    eprintln!("opened in {opened:?}, fingerprint in {first:?}, then in {:?}", again.elapsed());
}
