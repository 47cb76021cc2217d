//! Chunks that several machines share, in any object store.
//!
//! Reading: what neither memory nor the folder has is fetched, several objects at once, verified like any file, a layer at a
//! time, and put into the folder; layers are used while later ones still travel. Writing: what is put into the folder is noted in the index as not yet there, in the same transaction, and a task in
//! the background brings it there. The notes are the queue, so nothing is lost with a process and no queue grows in memory.
//!
//! An object store that fails or hangs is left alone after a time, longer each time it fails again, and asked again by the
//! background task alone: a request waits for it at most once.

mod client;
mod delete;
mod objects;
mod upload;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, parse_url_opts};
use tokio::runtime::{Builder, Runtime};

use self::client::Client;
pub(crate) use self::client::ObjectSink;
pub use self::client::RemoteStats;
pub use self::objects::{ListedObject, Objects, WrittenObject};
use crate::disk::Disk;
use crate::{ChunkKey, Result, StoreError};

/// The client's own limit to a request.
const LONGEST_REQUEST: &str = "1 hour";
/// Where chunks are shared.
#[derive(Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`.
    pub url: String,
    /// Further settings of the object store, by the names it has in the environment: `AWS_ENDPOINT`, `AWS_ACCESS_KEY_ID`, ….
    pub options: Vec<(String, String)>,
    /// How long it may be silent before it counts as failed.
    pub timeout: Duration,
    /// An object store that is open already. The URL then gives the prefix by its path, and is not opened.
    pub objects: Option<Arc<dyn ObjectStore>>,
}

impl RemoteOptions {
    /// With what the environment says about object stores.
    pub fn new(url: impl Into<String>) -> RemoteOptions {
        let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|prefix| name.starts_with(prefix));
        let text =
            |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        let options = std::env::vars_os().filter_map(text).filter(|(name, _)| ours(name)).collect();
        RemoteOptions { url: url.into(), options, timeout: Duration::from_secs(2), objects: None }
    }
}

/// Secrets are not shown.
impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions").field("url", &self.url).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Remote {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    client: Arc<Client>,
    /// For errors.
    url: String,
}

impl Remote {
    /// Begins to bring what `disk` notes there.
    pub(crate) fn open(options: &RemoteOptions, disk: &Arc<Disk>) -> Result<Remote> {
        let failed = |why: String| StoreError::Remote { url: options.url.clone(), why };
        let url = url::Url::parse(&options.url).map_err(|error| failed(error.to_string()))?;
        if let Some(objects) = &options.objects {
            let prefix = ObjectPath::from_url_path(url.path()).map_err(|error| failed(error.to_string()))?;
            return Remote::with(objects.clone(), prefix, options, disk);
        }
        // How long a request may take follows from its size: the client's own limit is only the last.
        let longest = [("timeout", LONGEST_REQUEST.to_owned())];
        let given = options.options.iter().map(|(name, value)| (name.as_str(), value.clone())).chain(longest);
        // Somebody else may have chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (objects, prefix) = parse_url_opts(&url, given).map_err(|error| failed(error.to_string()))?;
        Remote::with(objects.into(), prefix, options, disk)
    }

    /// Begins to bring what `disk` notes to `objects`.
    pub(crate) fn with(
        objects: Arc<dyn ObjectStore>,
        prefix: ObjectPath,
        options: &RemoteOptions,
        disk: &Arc<Disk>,
    ) -> Result<Remote> {
        let failed = |why: String| StoreError::Remote { url: options.url.clone(), why };
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("remote")
            .enable_all()
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let client = Arc::new(Client::new(objects, prefix, options.timeout));
        runtime.spawn(upload::send_all(client.clone(), Arc::downgrade(disk)));
        Ok(Remote { runtime: Some(runtime), client, url: options.url.clone() })
    }

    /// There is something new to be brought there.
    pub(crate) fn wake(&self) {
        self.client.wake.notify_one();
    }

    /// Has an object brought to `sink`, which is dropped when nothing comes any more.
    pub(crate) fn fetch(&self, name: String, sink: Box<dyn ObjectSink>) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(self.client.clone().fetch(name, sink));
        }
    }

    /// Deletes the objects of chunks whose files are gone, and returns when the object store has confirmed each. Must not be
    /// called by a thread of an asynchronous runtime, since it waits.
    ///
    /// # Errors
    /// If the object store refuses, or does not answer.
    pub(crate) fn delete(&self, keys: BTreeSet<ChunkKey>) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let (sender, deleted) = channel();
        let client = self.client.clone();
        runtime.spawn(async move {
            // Nobody may be waiting any more.
            let _ = sender.send(client.delete(&keys).await);
        });
        let outcome = deleted.recv().unwrap_or_else(|error| Err(error.to_string()));
        outcome.map_err(|why| StoreError::NotDeleted { url: self.url.clone(), why })
    }

    pub(crate) fn stats(&self) -> RemoteStats {
        self.client.stats()
    }

    /// Objects below the same prefix.
    pub(crate) fn objects(&self) -> Option<Objects> {
        let runtime = self.runtime.as_ref()?.handle().clone();
        Some(Objects::new(self.client.clone(), runtime, &self.url))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Uploads under way are noted in the index; the process that opens the store next does them.
            runtime.shutdown_background();
        }
    }
}
