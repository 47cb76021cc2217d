//! Standard input that is no text, and standard output where a result and an error come together.

use super::*;

#[test]
fn a_line_of_a_chat_that_is_no_text_is_told() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let line = home.write("line", b"caf\xe9\n");
    let mut chat = home.command(&["chat", "--model", model.to_str().unwrap(), "--prefix", "none"]);
    let ran = Ran::of(chat.stdin(std::fs::File::open(line).unwrap()).output().unwrap());
    ran.failed(1, &["the next line of standard input", "valid UTF-8", "hint: give text in UTF-8"]);
}

/// Layers are printed where their file cannot be written, and JSON is one value.
#[test]
fn a_calibration_that_cannot_be_kept_is_printed() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let docs = home.write("wheels.txt", "A wheel has spokes and a valve of brass. ".repeat(60));
    let kept = home.write("file", "").join("calibration.toml");
    let words = ["calibrate", docs.to_str().unwrap(), "--model", model.to_str().unwrap(), "--prefix", "none"];
    let words = [&words[..], &["-o", kept.to_str().unwrap()]].concat();
    let ran = home.run(&words).failed(1, &["calibration.toml"]);
    assert!(ran.out.contains("stable (*): layers"), "{}", ran.out);
    let ran = home.run(&[&words[..], &["--json"]].concat()).failed(1, &["calibration.toml"]);
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert!(told["calibration"]["agreement"].is_array(), "{told}");
    assert!(told["error"].as_str().unwrap().contains("calibration.toml") && told["hint"].is_null(), "{told}");
}
