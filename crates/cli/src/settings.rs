//! What the options come to: folders, engine, store, methods.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::ArgMatches;
use clap::parser::ValueSource;
use indicatif::ProgressBar;
use refrain_engine::{Document, Engine, Settings};
use refrain_store::{Limits, NamespaceKey, SHARED, Store};

use crate::args::{Global, Quota, Shared};
use crate::output::Fail;
use crate::{calibrate, models, output};

/// The options of every command, resolved.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) global: Global,
    pub(crate) json: bool,
    pub(crate) quiet: bool,
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
}

impl Context {
    pub(crate) fn new(global: Global, matches: &ArgMatches) -> Result<Context> {
        let lacking = "the home folder is not known";
        let models = match &global.models {
            Some(folder) => folder.clone(),
            None => {
                std::env::home_dir().context(lacking).context("give --models")?.join(".cache/refrain/models")
            }
        };
        let store = match &global.store {
            Some(folder) => folder.clone(),
            None => data_folder().context(lacking).context("give --store")?.join("chunks"),
        };
        let (json, quiet) = (global.json, global.quiet);
        let method = matches.try_contains_id("method").unwrap_or(false);
        let method_typed = method && matches.value_source("method") == Some(ValueSource::CommandLine);
        let max_tokens = matches.try_contains_id("max_tokens").unwrap_or(false);
        let max_tokens_given =
            max_tokens && matches.value_source("max_tokens") != Some(ValueSource::DefaultValue);
        let data_folder = data_folder();
        Ok(Context { json, quiet, models, store, data_folder, method_typed, max_tokens_given, global })
    }

    /// What the store may keep.
    pub(crate) fn limits(&self) -> Limits {
        let mut limits = Limits::memory(self.global.memory);
        limits.disk = self.global.disk;
        limits.time_to_live = self.global.ttl;
        for Quota { namespace, bytes } in self.global.quota.iter().cloned() {
            match namespace {
                None => limits.quota = bytes,
                Some(namespace) => _ = limits.quotas.insert(namespace, bytes),
            }
        }
        limits
    }

    /// The store that the options name.
    pub(crate) fn open_store(&self) -> Result<Store> {
        let limits = self.limits();
        #[cfg(feature = "remote")]
        if let Some(url) = &self.global.remote {
            let mut options = refrain_store::RemoteOptions::new(url);
            options.timeout = self.global.remote_timeout;
            return Ok(Store::open_shared(&self.store, limits, &options)?);
        }
        Ok(Store::open(&self.store, limits)?)
    }

    /// The namespace that chunks are stored in.
    pub(crate) fn namespace(&self) -> Result<String> {
        match (self.global.shared, &self.global.credential) {
            (Shared::Own, _) => Ok(SHARED.to_owned()),
            (_, None) => Ok(String::new()),
            (_, Some(credential)) => Ok(self.namespace_key()?.namespace(Some(credential))),
        }
    }

    pub(crate) fn namespace_key(&self) -> Result<NamespaceKey> {
        match &self.global.namespace_key {
            None => {
                std::fs::create_dir_all(&self.store)
                    .with_context(|| format!("cannot create the folder {}", self.store.display()))?;
                Ok(NamespaceKey::of_folder(&self.store)?)
            }
            Some(text) => text.trim().parse().map_err(|()| {
                Fail::usage("--namespace-key is not 64 hexadecimal digits")
                    .hint("`openssl rand -hex 32` makes one")
                    .into()
            }),
        }
    }

    /// The model that the options name, on their store.
    pub(crate) fn open_engine(&self) -> Result<Engine> {
        self.engine_on(self.open_store()?)
    }

    pub(crate) fn engine_on(&self, store: Store) -> Result<Engine> {
        let path = models::resolve(self)?;
        let settings = Settings {
            threads: self.global.threads,
            precision: self.global.compute.0,
            kv: self.global.kv,
            store_dtype: self.global.store_dtype,
            chunk_tokens: self.global.chunk_tokens,
            namespace: self.namespace()?,
            shared: (self.global.shared == Shared::Read).then(|| SHARED.to_owned()),
            ..Settings::default()
        };
        let bar = self.bar("loading the model", "{percent}%");
        let mut engine =
            Engine::open(&path, store, settings, |done, total| show(&bar, done as u64, total as u64))?;
        bar.finish_and_clear();
        let stable_layers = calibrate::known(self, &engine)?;
        engine.use_stable_layers(stable_layers);
        Ok(engine)
    }

    /// A progress bar on standard error; nothing where that is no terminal.
    pub(crate) fn bar(&self, what: &'static str, rest: &str) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { output::bar(what, rest) }
    }

    /// A sign of life on standard error; nothing where that is no terminal.
    pub(crate) fn spinner(&self, what: &'static str) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { output::spinner(what) }
    }

    /// Says something on standard error, unless asked to be quiet.
    pub(crate) fn say(&self, text: &str) {
        if !self.quiet {
            output::say(text);
        }
    }
}

/// Moves a bar.
pub(crate) fn show(bar: &ProgressBar, done: u64, total: u64) {
    bar.set_length(total);
    bar.set_position(done);
}

/// All documents of these files and folders.
pub(crate) fn read_documents(paths: &[PathBuf]) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for path in paths {
        let found = Document::read(path)?;
        if found.is_empty() {
            output::warn(&format!("{} holds no text, Markdown or JSONL document", path.display()));
        }
        documents.extend(found);
    }
    Ok(documents)
}

/// Folder of the user's configuration of this program.
pub(crate) fn config_folder() -> Option<PathBuf> {
    folder("XDG_CONFIG_HOME", "APPDATA", "Library/Application Support", ".config")
}

/// Folder of the user's data of this program.
fn data_folder() -> Option<PathBuf> {
    folder("XDG_DATA_HOME", "LOCALAPPDATA", "Library/Application Support", ".local/share")
}

/// `xdg` holds everywhere if it is set; else the platform's own place.
fn folder(xdg: &str, windows: &str, mac: &str, other: &str) -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = |below: &str| std::env::home_dir().map(|home| home.join(below));
    let base = variable(xdg).or_else(|| {
        if cfg!(windows) {
            variable(windows)
        } else if cfg!(target_os = "macos") {
            home(mac)
        } else {
            home(other)
        }
    });
    base.map(|base| base.join("refrain"))
}

/// A path as a person would write it: `~` for the home folder.
pub(crate) fn tilde(path: &Path) -> String {
    let below = std::env::home_dir().and_then(|home| path.strip_prefix(home).ok().map(Path::to_owned));
    below.map_or_else(|| path.display().to_string(), |below| Path::new("~").join(below).display().to_string())
}
