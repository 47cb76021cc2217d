use super::*;
use crate::testing::{Random, TestFolder};

fn error(folder: &TestFolder) -> String {
    SafetensorsFolder::open(folder.path()).unwrap_err().to_string()
}

#[test]
fn shards_are_read_through_the_index() {
    let folder = TestFolder::new();
    folder.write_safetensors("a.safetensors", &[("x", &[2, 3]), ("stray", &[1])]);
    folder.write_safetensors("b.safetensors", &[("y", &[4]), ("x", &[9])]);
    folder.write(
        INDEX,
        r#"{"metadata":{"total_size":1},"weight_map":{"x":"a.safetensors","y":"b.safetensors"}}"#,
    );
    let model = SafetensorsFolder::open(folder.path()).unwrap();
    assert_eq!(model.tensors.keys().collect::<Vec<_>>(), ["x", "y"]);
    let (info, dtype, data) = model.tensor("x").unwrap();
    assert_eq!((info.shape.as_slice(), dtype, data.len()), (&[2, 3][..], DType::F32, 24));
    assert_eq!(model.tensor("y").unwrap().2[12..], 3f32.to_le_bytes());
    assert!(!model.has("stray"));
}

#[test]
fn an_index_leads_only_to_files_of_its_folder() {
    let outside = TestFolder::new();
    let victim = outside.write_safetensors("model.safetensors", &[("x", &[2])]);
    let folder = TestFolder::new();
    folder.write_safetensors("a.safetensors", &[("x", &[2])]);
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    folder.write_safetensors("sub/a.safetensors", &[("x", &[2])]);
    let outside_name = outside.path().file_name().unwrap().to_str().unwrap();
    let bad = [
        victim.to_str().unwrap().to_owned(),
        format!("../{outside_name}/model.safetensors"),
        "..".into(),
        ".".into(),
        "".into(),
        "./a.safetensors".into(),
        "a.safetensors/".into(),
        "sub/a.safetensors".into(),
        "sub\\a.safetensors".into(),
    ];
    for file in bad {
        folder.write(INDEX, serde_json::json!({"weight_map": {"x": file}}).to_string());
        let message = error(&folder);
        assert!(message.contains("not the name of a file in this folder"), "{file}: {message}");
    }
    folder.write(INDEX, r#"{"weight_map":{"x":"a.safetensors"}}"#);
    SafetensorsFolder::open(folder.path()).unwrap();
}

#[test]
fn what_is_missing_is_named() {
    let folder = TestFolder::new();
    assert!(error(&folder).contains("neither model.safetensors nor"));
    folder.write(INDEX, r#"{"weight_map":{"x":"gone.safetensors"}}"#);
    assert!(error(&folder).contains("gone.safetensors"));
    folder.write_safetensors("gone.safetensors", &[("y", &[2])]);
    assert!(error(&folder).contains("the shard 'gone.safetensors' has no tensor 'x'"));
    folder.write(INDEX, r#"{"weight_map":"#);
    assert!(error(&folder).contains("line 1 column"));
    folder.write(SINGLE, b"");
    assert!(error(&folder).contains("malformed or truncated"));
}

#[test]
fn a_type_that_cannot_be_read_is_an_error_when_used() {
    let folder = TestFolder::new();
    let view = safetensors::tensor::TensorView::new(Dtype::I64, vec![1], &[0; 8]).unwrap();
    folder.write(SINGLE, safetensors::serialize([("ids", view)], None).unwrap());
    let message = SafetensorsFolder::open(folder.path()).unwrap().tensor("ids").unwrap_err().to_string();
    assert!(message.contains("'ids'") && message.contains("I64") && message.contains("BF16"), "{message}");
}

#[test]
fn damaged_files_never_panic() {
    let folder = TestFolder::new();
    let path = folder.write_safetensors(SINGLE, &[("x", &[2, 3]), ("y", &[4])]);
    let whole = std::fs::read(&path).unwrap();
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        assert!(SafetensorsFolder::open(folder.path()).is_err(), "the first {len} bytes");
    }
    let mut random = Random::new(5);
    for _ in 0..1000 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() - 40);
            bytes[at] = [b'9', b'0', b'"', b'}', 0xff, random.next() as u8][random.below(6)];
        }
        std::fs::write(&path, &bytes).unwrap();
        let Ok(model) = SafetensorsFolder::open(folder.path()) else { continue };
        model.tensors.values().for_each(|t| assert!(model.data(t).len() <= whole.len()));
    }
}
