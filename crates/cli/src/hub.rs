//! Models of the Hugging Face hub, in its own cache, which other programs share.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use client::Client;
use download::Downloads;
use refrain::{Address, hub_cache, hub_token};
use serde::Deserialize;

use crate::output::{Console, Fail};

mod client;
mod download;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Fetches and explains, by an address.
pub(crate) struct Fetch<'a>(pub(crate) &'a Address);

impl Fetch<'_> {
    /// Fetches files that the cache lacks. Returns the file or folder and whether anything was fetched.
    ///
    /// # Errors
    /// A [`Fail`] if this machine or the repository is to blame, any other error if the hub or the way there is; [`Fetch::explain`] says what to do then.
    pub(crate) fn pull(&self, console: &Console) -> Result<(PathBuf, bool)> {
        let client = Client::from_env();
        let (repo, cache) = (self.0.repo(), hub_cache().repo(self.0.repo()));
        let downloads = Downloads { console, cache: &cache, client: &client };
        let mut fetched = false;
        let mut fetch = |file: &str| -> Result<()> {
            if cache.get(file).is_some() {
                return Ok(());
            }
            console.say(&format!("fetching {file}"));
            fetched = true;
            downloads.file(&client.url(&repo, file), file)
        };
        match &self.0.file {
            Some(_) => self.0.files().iter().try_for_each(|file| fetch(file))?,
            None => {
                let files = match (client.files(&repo), self.0.cached()) {
                    (Ok(files), _) => files,
                    // The configuration is fetched last, so that the folder is whole.
                    (Err(error), Some(path)) if !error.is::<Fail>() => {
                        console.warn(&format!(
                            "hf:{} is taken as the cache has it, since the hub does not list its files: {error:#}",
                            self.0.repository
                        ));
                        return Ok((path, false));
                    }
                    (Err(error), _) => return Err(error),
                };
                let lists = |name: &str| files.iter().any(|file| file == name);
                let weights = if lists(WEIGHTS) {
                    vec![WEIGHTS.to_owned()]
                } else if lists(INDEX) {
                    fetch(INDEX)?;
                    let lost = || Fail::new("the cache lost the index of the weights");
                    let index = cache.get(INDEX).with_context(lost)?;
                    shards(&index).with_context(|| Fail::new(format!("cannot read {}", index.display())))?
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
            .with_context(|| Fail::new(format!("hf:{} lacks config.json or weights", self.0.repository)))?;
        Ok((path, fetched))
    }

    /// The error of a pull with what to do about it; `otherwise` is another way to the model than the hub.
    pub(crate) fn explain(&self, error: anyhow::Error, otherwise: &str) -> anyhow::Error {
        // An error of this machine says what to do.
        if error.is::<Fail>() {
            return error;
        }
        let text = format!("{error:#}");
        let about = format!("cannot fetch hf:{} at revision {}", self.0.repository, self.0.revision);
        let hint = if text.contains("status: 404") {
            "is the name right? https://huggingface.co/models lists them".to_owned()
        } else if text.contains("status: 401") && hub_token().is_none() {
            // The hub does not tell strangers which repositories there are.
            "is the name right? https://huggingface.co/models lists them; private and gated models need a token in HF_TOKEN"
                .to_owned()
        } else if text.contains("status: 401") || text.contains("status: 403") {
            "private and gated models need a token in HF_TOKEN that may read them".to_owned()
        } else if text.contains("certificate") {
            "a proxy that reads what it passes on has an authority of its own: its certificate belongs to those of the system, or in \
             the file that SSL_CERT_FILE names"
                .to_owned()
        } else {
            format!("is the hub reachable? HF_ENDPOINT names another, HTTPS_PROXY a proxy; {otherwise}")
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
