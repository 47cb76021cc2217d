//! Addresses of models on the Hugging Face hub, and its cache on this machine, which other programs share.

use std::path::PathBuf;

use hf_hub::{Cache, Repo, RepoType};

use crate::folders::named;
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

    /// The GGUF files that the address names, none for a folder: a part of a model in several files names all parts. The file to open is the last one.
    pub fn files(&self) -> Vec<String> {
        self.file
            .as_deref()
            .map_or_else(Vec::new, |file| parts(file).unwrap_or_else(|| vec![file.to_owned()]))
    }

    /// The GGUF file, of several the first part, or the folder, if it has been fetched whole.
    pub fn cached(&self) -> Option<PathBuf> {
        let cache = hub_cache().repo(self.repo());
        match &self.file {
            Some(_) => self.files().iter().map(|file| cache.get(file)).collect::<Option<Vec<_>>>()?.pop(),
            None => {
                let config = cache.get("config.json")?;
                let weights =
                    cache.get("model.safetensors").or_else(|| cache.get("model.safetensors.index.json"));
                weights.and(config.parent().map(PathBuf::from))
            }
        }
    }
}

/// The hub's cache: the folder that `HF_HUB_CACHE` names, else `hub` in that of `HF_HOME`, or in `~/.cache/huggingface`.
pub fn hub_cache() -> Cache {
    named("HF_HUB_CACHE").map_or_else(home_cache, Cache::new)
}

/// The cache that the hub's token lies beside.
fn home_cache() -> Cache {
    named("HF_HOME").map_or_else(Cache::default, |home| Cache::new(home.join("hub")))
}

/// The hub's token: that of `HF_TOKEN`, or the one that `hf auth login` has saved.
pub fn hub_token() -> Option<String> {
    hub_setting("HF_TOKEN").or_else(|| home_cache().token())
}

/// A variable of the hub's; one that is empty counts as none.
pub fn hub_setting(variable: &str) -> Option<String> {
    let text = std::env::var(variable).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// All parts of the model that a file `…-00002-of-00003.gguf` is a part of, the first one last; `None` for a file of another name.
fn parts(file: &str) -> Option<Vec<String>> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let number = |digits: &str| digits.parse::<u32>().ok().filter(|_| digits.len() == 5);
    let (part, count) = (number(part)?, number(count)?);
    let name = |part: u32| format!("{stem}-{part:05}-of-{count:05}.gguf");
    (1..=count).contains(&part).then(|| (2..=count).chain([1]).map(name).collect())
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
        assert!(Address::parse("hf:a/b").unwrap().unwrap().files().is_empty());
        assert_eq!(address.files(), ["sub/file.gguf"]);
        for wrong in
            ["hf:", "hf:a", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b:", "hf:a/b:../x.gguf", "hf:a/b:x.bin"]
        {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_part_names_all_parts() {
        let files = |file: &str| Address::parse(&format!("hf:a/b:{file}")).unwrap().unwrap().files();
        let all = ["q/m-00002-of-00003.gguf", "q/m-00003-of-00003.gguf", "q/m-00001-of-00003.gguf"];
        assert!(all.iter().all(|part| files(part) == all));
        assert_eq!(files("m-00001-of-00001.gguf"), ["m-00001-of-00001.gguf"]);
        for whole in ["m-of-00003.gguf", "m-1-of-3.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf"] {
            assert_eq!(files(whole), [whole]);
        }
    }
}
