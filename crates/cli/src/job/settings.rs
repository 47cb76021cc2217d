//! The settings that all runners of a job share, as its manifest has them.
//!
//! A runner takes them from the manifest. An option that it is given must agree with it, but for the model's place, whose fingerprint is compared,
//! and the address of the object store, which may have another name on each machine.

use anyhow::Result;
use refrain::engine::Prefix;
use refrain::quantities::{parse_tokens, tokens_text};
use refrain::store::hex;
use serde::{Deserialize, Serialize};

use crate::args::{self, PrefixArg};
use crate::output::Fail;
use crate::settings::{Context, prefix_hash};

/// How keys and values are computed and kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Computing {
    compute: String,
    kv: String,
    store_dtype: String,
    chunk_tokens: usize,
    /// A number, or `all`.
    left_tokens: String,
    /// Whether chunks of other numerics are others.
    #[serde(default)]
    strict_numerics: bool,
    /// The steps that longer chunks are computed in.
    #[serde(default = "default_ubatch_size")]
    ubatch_size: u32,
}

/// The steps of a manifest that does not tell them.
fn default_ubatch_size() -> u32 {
    args::UBATCH_SIZE
}

/// The settings of an ingest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct IngestSettings {
    pub(super) model: String,
    pub(super) fingerprint: String,
    #[serde(flatten)]
    pub(super) computing: Computing,
    prefix: String,
    /// SHA-256 of the prefix's file, if there is one.
    prefix_text: Option<String>,
    pub(super) system: Option<String>,
    pub(super) method: String,
    namespace: String,
    remote: String,
    /// Whether documents are kept, to be found by searches.
    pub(super) documents: bool,
}

impl Computing {
    /// The settings that the options give.
    pub(super) fn of(context: &Context) -> Computing {
        let global = &context.global;
        Computing {
            compute: global.compute.0.map_or_else(|| "auto".to_owned(), |precision| precision.to_string()),
            kv: global.kv.to_string(),
            store_dtype: global.store_dtype.to_string(),
            chunk_tokens: global.chunk_tokens,
            left_tokens: tokens_text(global.left_tokens),
            strict_numerics: global.strict_numerics,
            ubatch_size: global.ubatch_size,
        }
    }

    /// Sets the options that are not given.
    pub(super) fn apply(&self, context: &mut Context) -> Result<()> {
        fn set<T>(
            context: &mut Context,
            name: &str,
            read: Result<T, String>,
            set: fn(&mut Context, T),
        ) -> Result<()> {
            if !context.is_given(name) {
                let value =
                    read.map_err(|error| Fail::new(format!("{name} of the job's manifest: {error}")))?;
                set(context, value);
            }
            Ok(())
        }
        set(context, "compute", self.compute.parse(), |c, value| c.global.compute = value)?;
        let kv = self.kv.parse().map_err(|error| format!("{error}"));
        set(context, "kv", kv, |c, value| c.global.kv = value)?;
        let store_dtype = self.store_dtype.parse().map_err(|error| format!("{error}"));
        set(context, "store_dtype", store_dtype, |c, value| c.global.store_dtype = value)?;
        set(context, "chunk_tokens", Ok(self.chunk_tokens), |c, value| c.global.chunk_tokens = value)?;
        set(context, "left_tokens", parse_tokens(&self.left_tokens), |c, value| {
            c.global.left_tokens = value
        })?;
        set(context, "strict_numerics", Ok(self.strict_numerics), |c, value| {
            c.global.strict_numerics = value
        })?;
        set(context, "ubatch_size", Ok(self.ubatch_size), |c, value| c.global.ubatch_size = value)
    }
}

impl IngestSettings {
    /// The settings that the options give, for a method with its options and the system message of prompts to come.
    ///
    /// # Errors
    /// If the model is missing or broken, no object store is named, or the prefix cannot be read.
    pub(super) fn of(context: &Context, method: String, system: Option<String>) -> Result<IngestSettings> {
        let remote = context.global.remote.clone().ok_or_else(|| {
            Fail::usage("a job needs an object store for its chunks and documents").hint("give --remote URL")
        })?;
        let prefix = context.prefix()?;
        Ok(IngestSettings {
            model: context.global.model.clone(),
            fingerprint: hex::encode(&context.model_identity()?),
            computing: Computing::of(context),
            prefix_text: match &prefix {
                Prefix::Text(path) => Some(prefix_hash(path)?),
                _ => None,
            },
            prefix: prefix.to_string(),
            system,
            method,
            namespace: context.namespace()?,
            remote,
            documents: context.sync_interval().is_some(),
        })
    }

    /// Options with these settings, where they are not given, and the settings of a runner that has them.
    ///
    /// # Errors
    /// As for [`IngestSettings::of`], and if a setting cannot be read.
    pub(super) fn of_runner(&self, context: &Context) -> Result<(Context, IngestSettings)> {
        let mut own = context.clone();
        self.computing.apply(&mut own)?;
        if !own.is_given("model") {
            own.global.model.clone_from(&self.model);
        }
        if !own.is_given("remote") {
            own.global.remote = Some(self.remote.clone());
        }
        if !own.is_given("prefix") {
            let prefix = self
                .prefix
                .parse()
                .map_err(|error| Fail::new(format!("prefix of the job's manifest: {error}")))?;
            own.global.prefix = PrefixArg::Is(prefix);
        }
        let settings = IngestSettings::of(&own, self.method.clone(), self.system.clone())?;
        let (model, remote, documents) = (self.model.clone(), self.remote.clone(), self.documents);
        Ok((own, IngestSettings { model, remote, documents, ..settings }))
    }
}
