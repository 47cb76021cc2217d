//! The resolved options: folders, engine, store, methods.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ArgMatches;
use clap::parser::ValueSource;
use indicatif::ProgressBar;
use refrain::corpus::{DocumentStore, LocalDocuments, open_documents};
use refrain::engine::{Engine, Instructions, Prefix, Settings};
use refrain::folders::{data_folder, models_folder, tilde};
use refrain::model::ModelFiles;
use refrain::quantities::Quota;
use refrain::store::{Limits, NamespaceKey, SHARED, Store, StoreError, hex, holds_store};
use refrain::{AUTO, Choice, EngineOptions, choice, resolve};
use sha2::{Digest, Sha256};

use crate::args::{Global, PrefixArg, Shared};
use crate::output::{Console, Fail, show};

/// Least bytes of a store in memory: nothing of a sample may be prefilled again.
const MEMORY: u64 = 4 << 30;

/// The content of the folder that is to hold the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreFolder {
    Missing,
    Empty,
    Store,
    /// Files that are not a store's.
    Other,
}

/// The options of every command, resolved.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) global: Global,
    pub(crate) json: bool,
    pub(crate) console: Console,
    /// Folder of the models fetched by name.
    pub(crate) models: PathBuf,
    /// Folder of the chunk store.
    pub(crate) store: PathBuf,
    /// Folder of the user's data of this program, if it is known.
    pub(crate) data_folder: Option<PathBuf>,
    /// Whether the method was given on the command line, not by environment or file.
    pub(crate) method_typed: bool,
    /// Whether the most tokens of an answer were given, and not left at their default.
    pub(crate) max_tokens_given: bool,
    /// The options that the command line or the environment gives.
    given: BTreeSet<String>,
    /// The method and prefix that `auto` stands for, once they are asked for.
    choice: OnceCell<Choice>,
}

/// The options that the command line or the environment gives.
fn given(matches: &ArgMatches) -> BTreeSet<String> {
    let is_given = |id: &&clap::Id| {
        let source = matches.value_source(id.as_str());
        matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    matches.ids().filter(is_given).map(|id| id.as_str().to_owned()).collect()
}

impl Context {
    pub(crate) fn new(global: Global, matches: &ArgMatches) -> Result<Context> {
        let lacking = "the home folder is not known";
        let models = match &global.models {
            Some(folder) => folder.clone(),
            None => models_folder().context("give --models")?,
        };
        let store = match &global.store {
            Some(folder) => folder.clone(),
            None => data_folder().context(lacking).context("give --store")?.join("chunks"),
        };
        let (json, console) = (global.json, Console { quiet: global.quiet, logs: false });
        let method = matches.try_contains_id("method").unwrap_or(false);
        let method_typed = method && matches.value_source("method") == Some(ValueSource::CommandLine);
        let max_tokens = matches.try_contains_id("max_tokens").unwrap_or(false);
        let max_tokens_given =
            max_tokens && matches.value_source("max_tokens") != Some(ValueSource::DefaultValue);
        let given = given(matches);
        let data_folder = data_folder();
        Ok(Context {
            given,
            json,
            console,
            models,
            store,
            data_folder,
            method_typed,
            max_tokens_given,
            global,
            choice: OnceCell::new(),
        })
    }

    /// Whether the command line or the environment gives an option, by its name with underscores.
    pub(crate) fn is_given(&self, option: &str) -> bool {
        self.given.contains(option)
    }

    /// The store's limits.
    pub(crate) fn limits(&self) -> Limits {
        let mut limits = Limits::memory(self.global.memory);
        limits.disk = self.global.disk;
        limits.time_to_live = self.global.ttl;
        Quota::set_all(&self.global.quota, &mut limits);
        limits
    }

    /// The store that the options name.
    pub(crate) fn open_store(&self) -> Result<Store> {
        self.opened_store().map_err(|error| -> anyhow::Error {
            if matches!(error, StoreError::Io { .. }) {
                return Fail::new(error.to_string()).hint("--store names another folder").into();
            }
            error.into()
        })
    }

    fn opened_store(&self) -> Result<Store, StoreError> {
        let limits = self.limits();
        #[cfg(feature = "remote")]
        if let Some(url) = &self.global.remote {
            let mut options = refrain::store::RemoteOptions::new(url);
            options.timeout = self.global.remote_timeout;
            options.policy = self.global.remote_policy;
            return Store::open_shared(&self.store, limits, &options);
        }
        Store::open(&self.store, limits)
    }

    /// The store that the options name, for a command that looks after what is there: nothing is made. An empty folder is an empty store,
    /// and so is the default folder until something is ingested.
    pub(crate) fn existing_store(&self) -> Result<Store> {
        match (self.store_folder(), &self.global.store) {
            (StoreFolder::Store, _) => self.open_store(),
            (StoreFolder::Empty, _) | (StoreFolder::Missing, None) => Ok(Store::in_memory(0)),
            (StoreFolder::Missing, Some(_)) | (StoreFolder::Other, _) => Err(self.no_store()),
        }
    }

    /// Whether the store's folder holds no store, and no object store has its chunks.
    pub(crate) fn lacks_store(&self) -> bool {
        self.store_folder() != StoreFolder::Store
    }

    /// The content of the store's folder. Opening the store tells the error of a folder that cannot be read.
    fn store_folder(&self) -> StoreFolder {
        #[cfg(feature = "remote")]
        if self.global.remote.is_some() {
            return StoreFolder::Store;
        }
        let is_empty = self.store.read_dir().map(|mut entries| entries.next().is_none());
        match is_empty {
            Err(error) if error.kind() == ErrorKind::NotFound => StoreFolder::Missing,
            Err(_) => StoreFolder::Store,
            Ok(true) => StoreFolder::Empty,
            Ok(false) if holds_store(&self.store) => StoreFolder::Store,
            Ok(false) => StoreFolder::Other,
        }
    }

    /// The error of a store that is missing.
    pub(crate) fn no_store(&self) -> anyhow::Error {
        let (folder, hint) =
            (tilde(&self.store), "`refrain ingest FILES` makes one; --store names another folder");
        let fail = match self.store_folder() {
            StoreFolder::Other => Fail::new(format!("{folder} holds no store, but other files")),
            _ => Fail::new(format!("there is no store at {folder}")),
        };
        fail.hint(hint).into()
    }

    /// How often documents are brought in line with other machines; none if they are not shared.
    pub(crate) fn sync_interval(&self) -> Option<Duration> {
        #[cfg(feature = "remote")]
        return self.global.sync_interval.0;
        #[cfg(not(feature = "remote"))]
        None
    }

    /// The documents that are kept beside a chunk store: those of all machines that share it, unless they are not to be shared.
    pub(crate) fn documents(&self, store: &Store) -> refrain::corpus::Result<Box<dyn DocumentStore>> {
        match self.sync_interval() {
            Some(_) => open_documents(store, store.folder(), u64::MAX),
            None => Ok(Box::new(LocalDocuments::open(store.folder(), u64::MAX)?)),
        }
    }

    /// The namespace that chunks are stored in.
    pub(crate) fn namespace(&self) -> Result<String> {
        match (self.global.shared, &self.global.credential) {
            (Shared::Own, _) => Ok(SHARED.to_owned()),
            (_, None) => {
                // A wrong key is told though nothing is derived with it.
                if self.gives_namespace_key() {
                    self.namespace_key()?;
                }
                Ok(String::new())
            }
            (_, Some(credential)) => Ok(self.namespace_key()?.namespace(Some(credential))),
        }
    }

    /// The namespace of [`Context::existing_store`]. Where there is no store, nothing is in any namespace, and no key is made to derive one.
    pub(crate) fn existing_namespace(&self) -> Result<String> {
        if self.lacks_store() && !self.gives_namespace_key() { Ok(String::new()) } else { self.namespace() }
    }

    /// Whether the options give a key of namespaces.
    pub(crate) fn gives_namespace_key(&self) -> bool {
        self.global.namespace_key.is_some() || self.global.namespace_key_file.is_some()
    }

    /// Warns where a key of namespaces is given and nothing is derived with it.
    pub(crate) fn warn_of_unused_key(&self) {
        if self.gives_namespace_key() && self.global.credential.is_none() {
            self.console.warn("a key of namespaces does nothing without --credential: chunks are in the namespace without a name");
        }
    }

    pub(crate) fn namespace_key(&self) -> Result<NamespaceKey> {
        match (&self.global.namespace_key, &self.global.namespace_key_file) {
            (Some(text), _) => text.trim().parse().map_err(|()| {
                Fail::usage("--namespace-key is not 64 hexadecimal digits")
                    .hint("`openssl rand -hex 32` makes one")
                    .into()
            }),
            (None, Some(file)) => Ok(NamespaceKey::read(file)?),
            (None, None) => {
                refrain::store::make_private_folder(&self.store)
                    .with_context(|| format!("cannot create the folder {}", self.store.display()))?;
                Ok(NamespaceKey::of_folder(&self.store)?)
            }
        }
    }

    /// The model that the options name, on their store, for prompts with `around` around their documents.
    pub(crate) fn open_engine(&self, around: &Instructions) -> Result<Engine> {
        self.engine_on(self.open_store()?, around)
    }

    /// The model that the options name, on a store in memory, with room for [`MEMORY`] at least.
    pub(crate) fn memory_engine(&self) -> Result<Engine> {
        self.engine_on(Store::in_memory(self.global.memory.max(MEMORY)), &Instructions::default())
    }

    pub(crate) fn engine_on(&self, store: Store, around: &Instructions) -> Result<Engine> {
        let settings = Settings {
            device: self.global.device,
            threads: self.global.threads,
            precision: self.global.compute.0,
            keep_packed: self.global.keep_packed,
            device_chunk_bytes: self.global.device_cache,
            kv: self.global.kv,
            store_dtype: self.global.store_dtype,
            ubatch: self.global.ubatch_size as usize,
            chunk_tokens: self.global.chunk_tokens,
            left_tokens: self.global.left_tokens,
            namespace: self.namespace()?,
            strict_numerics: self.global.strict_numerics,
            shared: (self.global.shared == Shared::Read).then(|| SHARED.to_owned()),
        };
        // A prefix that is the model's choice is found by hashing the model, with a bar of its own.
        let prefix = self.prefix()?;
        let bar = self.bar("loading the model", "{percent}%");
        let mut options = EngineOptions::new(&self.global.model)
            .models(&self.models)
            .data_folder(self.data_folder.clone())
            .settings(settings)
            .instructions(around.clone())
            .prefix(prefix)
            // Commands name their method themselves.
            .method("vanilla")
            .on_progress(|done, total| show(&bar, done as u64, total as u64))
            .on_warning(|warning| bar.suspend(|| self.console.warn(warning)));
        if let Some(file) = &self.global.calibration {
            options = options.calibration(file);
        }
        let engine = options.open_on(store)?;
        bar.finish_and_clear();
        Ok(engine)
    }

    /// The method and prefix that `auto` stands for.
    pub(crate) fn choice(&self) -> Result<&Choice> {
        if let Some(choice) = self.choice.get() {
            return Ok(choice);
        }
        let warn = &mut |warning: &str| self.console.warn(warning);
        let found = choice(&self.global.model, &self.fingerprint()?, self.data_folder.as_deref(), warn)?;
        Ok(self.choice.get_or_init(|| found))
    }

    /// The prefix of chunks; `auto` is the model's choice.
    pub(crate) fn prefix(&self) -> Result<Prefix> {
        match &self.global.prefix {
            PrefixArg::Is(prefix) => Ok(prefix.clone()),
            PrefixArg::Auto => Ok(self.choice()?.prefix.clone()),
        }
    }

    /// The text of a method; `auto` is the model's choice.
    pub(crate) fn method_text(&self, text: &str) -> Result<String> {
        if text == AUTO { Ok(self.choice()?.method.clone()) } else { Ok(text.to_owned()) }
    }

    /// Why the model's choice is this method, where an answer with it follows the choice.
    pub(crate) fn reason_of(&self, method: &str) -> Result<Option<String>> {
        let Some(choice) = self.choice.get().filter(|choice| choice.method == method) else {
            return Ok(None);
        };
        Ok(Some(choice.why_behind(&self.prefix()?)))
    }

    /// The identity of a model's weights, configuration and precision under these options.
    pub(crate) fn identity(&self, files: &ModelFiles) -> Result<[u8; 32]> {
        let precision = self.global.compute.0.map_or_else(|| files.native_precision(), Ok)?;
        let bar = self.bar("hashing the model", "{percent}%");
        let fingerprint = files.fingerprint(|done, total| show(&bar, done as u64, total as u64));
        bar.finish_and_clear();
        Ok(refrain::engine::identity(fingerprint, precision))
    }

    /// [`Context::identity`] of the model that the options name, which is not loaded.
    pub(crate) fn model_identity(&self) -> Result<[u8; 32]> {
        self.identity(&ModelFiles::open(&resolve(&self.global.model, &self.models)?)?)
    }

    /// First digits of [`Context::model_identity`].
    pub(crate) fn fingerprint(&self) -> Result<String> {
        Ok(hex::encode(&self.model_identity()?[..8]))
    }

    /// [`Context::fingerprint`] of another model.
    pub(crate) fn fingerprint_of(&self, model: &str) -> Result<String> {
        let files = ModelFiles::open(&resolve(model, &self.models)?)?;
        Ok(hex::encode(&self.identity(&files)?[..8]))
    }

    /// [`Console::bar`].
    pub(crate) fn bar(&self, what: &'static str, rest: &str) -> ProgressBar {
        self.console.bar(what, rest)
    }

    /// [`Console::spinner`].
    pub(crate) fn spinner(&self, what: &'static str) -> ProgressBar {
        self.console.spinner(what)
    }

    /// [`Console::say`].
    pub(crate) fn say(&self, text: &str) {
        self.console.say(text);
    }
}

/// SHA-256 of the file of a prefix.
pub(crate) fn prefix_hash(path: &Path) -> Result<String> {
    let bytes =
        std::fs::read(path).with_context(|| format!("cannot read the prefix in {}", path.display()))?;
    Ok(hex::encode(&Sha256::digest(&bytes)))
}
