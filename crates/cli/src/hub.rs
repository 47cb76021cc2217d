//! Models of the Hugging Face hub, in its own cache, which other programs share.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::ProgressBar;

use crate::output::{Console, Fail};

const PREFIX: &str = "hf:";
/// Longest wait for the hub to accept a connection and answer.
const REACH: Duration = Duration::from_secs(5);

/// Fails soon where the hub cannot be reached: a download itself would wait and try again. Any HTTP answer is a reply.
pub(crate) fn reach() -> Result<()> {
    let url = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".to_owned());
    let agent = ureq::Agent::config_builder().timeout_global(Some(REACH)).http_status_as_error(false).build();
    agent.new_agent().head(&url).call().with_context(|| format!("{url} cannot be reached"))?;
    Ok(())
}

/// An address `hf:ORG/NAME[@REVISION][:FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    repository: String,
    revision: String,
    /// A GGUF file; none for a folder of safetensors.
    file: Option<String>,
}

impl Address {
    /// Nothing if the name does not begin with `hf:`.
    pub(crate) fn parse(name: &str) -> Result<Option<Address>> {
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
        if !right {
            let message =
                format!("'{name}' is no address of the hub; it should be hf:ORG/NAME[@REVISION][:FILE]");
            return Err(Fail::usage(message).into());
        }
        if file.is_some_and(|file| !file.to_ascii_lowercase().ends_with(".gguf")) {
            let message =
                format!("'{name}': a FILE must be a .gguf file; without one, the safetensors are meant");
            return Err(Fail::usage(message).into());
        }
        let (repository, revision) = (repository.to_owned(), revision.to_owned());
        Ok(Some(Address { repository, revision, file: file.map(str::to_owned) }))
    }

    /// This address at a revision, if one is given.
    pub(crate) fn at(self, revision: Option<&str>) -> Result<Address> {
        let Some(revision) = revision else { return Ok(self) };
        let file = self.file.map_or(String::new(), |file| format!(":{file}"));
        let again = Address::parse(&format!("{PREFIX}{}@{revision}{file}", self.repository))?;
        again.context("an address with its prefix is an address")
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.repository.clone(), RepoType::Model, self.revision.clone())
    }

    /// The GGUF file, or the folder, if it has been fetched.
    pub(crate) fn cached(&self) -> Option<PathBuf> {
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

    /// Fetches files that the cache lacks. Returns the file or folder and whether anything was fetched.
    pub(crate) fn pull(&self, console: &Console) -> Result<(PathBuf, bool)> {
        let mut builder = ApiBuilder::from_env().with_progress(false).with_retries(3);
        if let Ok(token) = std::env::var("HF_TOKEN") {
            builder = builder.with_token(Some(token));
        }
        let repo = builder.build().map_err(|error| self.explain(error))?.repo(self.repo());
        let wanted = match &self.file {
            Some(file) => vec![file.clone()],
            None => {
                let info = repo.info().map_err(|error| self.explain(error))?;
                wanted(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
            }
        };
        if self.file.is_none() && !wanted.iter().any(|file| file.ends_with(".safetensors")) {
            return Err(Fail::new(format!("hf:{} has no safetensors weights", self.repository))
                .hint(format!("for a GGUF file, name it: hf:{}:FILE.gguf", self.repository))
                .into());
        }
        let cache = Cache::from_env().repo(self.repo());
        let mut fetched = false;
        for file in wanted.iter().filter(|file| cache.get(file).is_none()) {
            self.fetch(console, &repo, file)?;
            fetched = true;
        }
        let path =
            self.cached().with_context(|| format!("hf:{} lacks config.json or weights", self.repository))?;
        Ok((path, fetched))
    }

    fn fetch(&self, console: &Console, repo: &ApiRepo, file: &str) -> Result<()> {
        console.say(&format!("fetching {file}"));
        let bar = console.bar("", "{bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
        repo.download_with_progress(file, Bar(&bar)).map_err(|error| self.explain(error))?;
        bar.finish_and_clear();
        Ok(())
    }

    fn explain(&self, error: ApiError) -> anyhow::Error {
        let text = error.to_string();
        let about = format!("cannot fetch hf:{} at revision {}", self.repository, self.revision);
        let hint = if text.contains("404") {
            "is the name right? https://huggingface.co/models lists them"
        } else if text.contains("401") || text.contains("403") {
            "private and gated models need a token in HF_TOKEN that may read them"
        } else if text.contains("Lock") {
            "another program is fetching it; wait for it, or remove the lock file if there is none"
        } else {
            "is the hub reachable? HF_ENDPOINT names another, HTTPS_PROXY a proxy; `refrain pull --list` shows models \
             that also come from the Python package index"
        };
        anyhow::Error::new(error).context(Fail::new(about).hint(hint))
    }
}

/// The files of a repository that make a model.
fn wanted(files: Vec<String>) -> Vec<String> {
    let sharded = files.iter().any(|file| file == "model.safetensors.index.json");
    let part =
        |file: &str| match file.strip_prefix("model").and_then(|rest| rest.strip_suffix(".safetensors")) {
            Some(rest) => {
                if sharded {
                    rest.starts_with('-')
                } else {
                    rest.is_empty()
                }
            }
            None => false,
        };
    let wanted = |file: &String| {
        matches!(file.as_str(), "config.json" | "generation_config.json" | "model.safetensors.index.json")
            || file.starts_with("tokenizer")
            || file.starts_with("chat_template")
            || file == "special_tokens_map.json"
            || part(file)
    };
    files.into_iter().filter(|file| !file.contains('/')).filter(wanted).collect()
}

struct Bar<'a>(&'a ProgressBar);

impl hf_hub::api::Progress for Bar<'_> {
    fn init(&mut self, size: usize, _: &str) {
        self.0.set_length(size as u64);
        self.0.set_position(0);
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {}
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

    #[test]
    fn only_what_makes_a_model_is_fetched() {
        let files = ["README.md", "config.json", "tokenizer.json", "model.safetensors", "onnx/model.onnx"];
        let files =
            |more: &[&str]| files.iter().chain(more).map(|file| (*file).to_owned()).collect::<Vec<_>>();
        assert_eq!(wanted(files(&[])), ["config.json", "tokenizer.json", "model.safetensors"]);
        let sharded = wanted(files(&["model-00001-of-00002.safetensors", "model.safetensors.index.json"]));
        let expected = [
            "config.json",
            "tokenizer.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
        ];
        assert_eq!(sharded, expected);
    }
}
