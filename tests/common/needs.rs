//! Needs of tests that a machine may lack: a test without one of them is skipped, and says so.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// Notes that the running test is skipped for want of `need`: on stderr, which test runners hide, and in `skipped.txt` of the target folder,
/// which `make test` prints. Where `REFRAIN_TEST_ALL`, a list with commas, names `need`, the test fails instead.
pub(crate) fn skip(need: &str, why: impl Display) {
    let required = std::env::var("REFRAIN_TEST_ALL").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == need), "REFRAIN_TEST_ALL names {need}, but {why}");
    let test = std::thread::current();
    let line =
        format!("{}: {need}: {}\n", test.name().unwrap_or("a test"), why.to_string().replace('\n', " "));
    eprint!("skipped: {line}");
    // The program of a test is <target>/<profile>/deps/<name>.
    let target =
        std::env::current_exe().ok().and_then(|program| Some(program.ancestors().nth(3)?.to_owned()));
    let file =
        target.map(|target| OpenOptions::new().create(true).append(true).open(target.join("skipped.txt")));
    if let Some(Ok(mut file)) = file {
        let _ = file.write_all(line.as_bytes());
    }
}

/// A real model's file in `$REFRAIN_MODELS`, else `~/.cache/refrain/models`; none, which is noted, where it was not fetched.
#[allow(dead_code, reason = "not all tests that can be skipped use a model")]
pub(crate) fn real_model(file: &str) -> Option<PathBuf> {
    let named = std::env::var_os("REFRAIN_MODELS").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let cache = || std::env::home_dir().unwrap_or_default().join(".cache/refrain/models");
    let path = named.unwrap_or_else(cache).join(file);
    if path.is_file() {
        return Some(path);
    }
    let need = if file.starts_with("SmolLM2-135M") { "smollm2" } else { file };
    skip(need, format!("{} is not there; `refrain pull` fetches known models", path.display()));
    None
}
