//! Addresses of models on the Hugging Face hub, and its cache on this machine, which other programs share.

use std::path::PathBuf;

use hf_hub::{Cache, Repo, RepoType};

use crate::{Error, Result};

const PREFIX: &str = "hf:";

/// An address `hf:ORG/NAME[@REVISION][:FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// `ORG/NAME`.
    pub repository: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// A GGUF file; none for a folder of safetensors.
    pub file: Option<String>,
}

impl Address {
    /// Nothing if the name does not begin with `hf:`.
    ///
    /// # Errors
    /// If it does, and is no address.
    pub fn parse(name: &str) -> Result<Option<Address>> {
        let Some(rest) = name.strip_prefix(PREFIX) else { return Ok(None) };
        let (rest, file) = rest.split_once(':').map_or((rest, None), |(rest, file)| (rest, Some(file)));
        let (repository, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let plain = |text: &str| {
            let right = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !text.is_empty() && text != "." && text != ".." && text.chars().all(right)
        };
        let words: Vec<&str> = repository.split('/').collect();
        let right = words.len() == 2
            && words.iter().all(|word| plain(word))
            && revision.split('/').all(plain)
            && file.is_none_or(|file| file.split('/').all(plain));
        let wrong = |reason| Err(Error::Address { name: name.to_owned(), reason });
        if !right {
            return wrong("is no address of the hub; it should be hf:ORG/NAME[@REVISION][:FILE]");
        }
        if file.is_some_and(|file| !file.to_ascii_lowercase().ends_with(".gguf")) {
            return wrong("names a FILE that is no .gguf file; without one, the safetensors are meant");
        }
        let (repository, revision) = (repository.to_owned(), revision.to_owned());
        Ok(Some(Address { repository, revision, file: file.map(str::to_owned) }))
    }

    /// This address at a revision, if one is given.
    ///
    /// # Errors
    /// If the revision is none.
    pub fn at(self, revision: Option<&str>) -> Result<Address> {
        let Some(revision) = revision else { return Ok(self) };
        let file = self.file.as_ref().map_or(String::new(), |file| format!(":{file}"));
        Ok(Address::parse(&format!("{PREFIX}{}@{revision}{file}", self.repository))?.unwrap_or(self))
    }

    /// The repository at the revision, as the hub's client takes it.
    pub fn repo(&self) -> Repo {
        Repo::with_revision(self.repository.clone(), RepoType::Model, self.revision.clone())
    }

    /// The GGUF file, or the folder, if it has been fetched.
    pub fn cached(&self) -> Option<PathBuf> {
        let cache = Cache::from_env().repo(self.repo());
        match &self.file {
            Some(file) => cache.get(file),
            None => {
                let config = cache.get("config.json")?;
                let weights =
                    cache.get("model.safetensors").or_else(|| cache.get("model.safetensors.index.json"));
                weights.and(config.parent().map(PathBuf::from))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!(Address::parse("model.gguf").unwrap(), None);
        let address = Address::parse("hf:org/name-1.5@refs/pr/1:sub/file.gguf").unwrap().unwrap();
        assert_eq!((&*address.repository, &*address.revision), ("org/name-1.5", "refs/pr/1"));
        assert_eq!(address.file.as_deref(), Some("sub/file.gguf"));
        assert_eq!(Address::parse("hf:a/b").unwrap().unwrap().revision, "main");
        assert_eq!(Address::parse("hf:a/b").unwrap().unwrap().at(Some("v2")).unwrap().revision, "v2");
        for wrong in
            ["hf:", "hf:a", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b:", "hf:a/b:../x.gguf", "hf:a/b:x.bin"]
        {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
    }
}
