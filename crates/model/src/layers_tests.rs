use std::path::Path;
use std::sync::Arc;

use refrain_kernels::Cpu;

use super::*;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::testing::TestFolder;

/// The error of loading the tiny Llama with another text in place of `from` in each of its files, if there is one.
fn error_with(from: &str, to: &str) -> Option<ModelError> {
    let (from, to, folder) = (from.as_bytes(), to.as_bytes(), TestFolder::new());
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for file in std::fs::read_dir(tiny).unwrap() {
        let file = file.unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        if let Some(at) = bytes.windows(from.len()).position(|window| window == from) {
            bytes.splice(at..at + from.len(), to.iter().copied());
        }
        folder.write(file.file_name().to_str().unwrap(), bytes);
    }
    let device: Arc<dyn Device> = Arc::new(Cpu::new(1).unwrap());
    let files = ModelFiles::open(folder.path()).unwrap();
    Decoder::load(files, &device, Precision::F32, None, |_, _| ()).err()
}

#[test]
fn embeddings_have_the_shape_of_the_configuration() {
    let shape =
        |shape: &str| format!("\"model.embed_tokens.weight\":{{\"dtype\":\"F16\",\"shape\":[{shape}]");
    assert!(error_with(&shape("320,64"), &shape("320,64")).is_none());
    for other in ["640,32", "32,640"] {
        let error = error_with(&shape("320,64"), &shape(other)).unwrap();
        assert!(matches!(&error, ModelError::TensorShape { tensor, .. } if tensor == EMBEDDINGS), "{error}");
    }
}

#[test]
fn a_missing_output_projection_is_not_replaced() {
    let error = error_with("lm_head.weight", "lm_heap.weight").unwrap();
    assert!(
        matches!(&error, ModelError::TensorMissing { tensor, .. } if tensor == "lm_head.weight"),
        "{error}"
    );
}
