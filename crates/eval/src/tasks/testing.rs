//! Helpers of the tasks' tests.

#[path = "../../../../tests/common/needs.rs"]
pub(crate) mod needs;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;

use super::TokenText;
use crate::Result;

/// A token is a word with the whitespace before it, or a full stop.
#[derive(Default)]
pub(crate) struct Words(Mutex<(HashMap<String, u32>, Vec<String>)>);

impl TokenText for Words {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens: Vec<String> = Vec::new();
        for c in text.chars() {
            let word_goes_on = |last: &String| {
                last != "." && c != '.' && (!c.is_whitespace() || last.chars().all(char::is_whitespace))
            };
            match tokens.last_mut() {
                Some(last) if word_goes_on(last) => last.push(c),
                _ => tokens.push(c.into()),
            }
        }
        let (ids, texts) = &mut *self.0.lock().unwrap();
        let id = |token: String| {
            *ids.entry(token.clone()).or_insert_with(|| {
                texts.push(token);
                texts.len() as u32 - 1
            })
        };
        Ok(tokens.into_iter().map(id).collect())
    }

    fn decode(&self, ids: &[u32]) -> String {
        ids.iter().map(|id| self.0.lock().unwrap().1[*id as usize].clone()).collect()
    }
}

/// A folder of the benchmarks' data, if it is there.
pub(crate) fn data(folder: &str) -> Option<PathBuf> {
    let data = std::env::var_os("REFRAIN_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    if data.join(folder).is_dir() {
        return Some(data);
    }
    needs::skip(
        "data",
        format!("no {folder} data is in {} (REFRAIN_DATA names another folder)", data.display()),
    );
    None
}

/// A folder with one file of `count` lines.
pub(crate) fn folder_with(name: &str, lines: &[String]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, lines.join("\n")).unwrap();
    folder
}
