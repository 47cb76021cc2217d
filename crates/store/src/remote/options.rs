//! How an object store is opened.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use std::{fmt, fs};

use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, parse_url_opts};
use tokio::runtime::{Builder, Runtime};

use crate::folder::is_shard;
use crate::{Result, StoreError, make_private_folder};

/// The client's own limit to a request.
const LONGEST_REQUEST: &str = "1 hour";

/// Names in a folder by which Refrain knows it again, beside those of the folders of chunks: those of documents.
const MARKS: [&str; 2] = ["library.json", "changes"];

/// Whether chunks that the object store may have are fetched from it or computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchPolicy {
    /// Chunks are fetched or computed, by which is expected to take less time at the rates that the machine has measured; a late fetch races the
    /// computation.
    #[default]
    Auto,
    /// Chunks are fetched, and computed only if they do not come.
    Fetch,
    /// Chunks are computed.
    Compute,
}

/// A name that is none of `auto`, `fetch` and `compute`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}: use auto, fetch or compute")]
#[non_exhaustive]
pub struct UnknownFetchPolicy(pub String);

impl FromStr for FetchPolicy {
    type Err = UnknownFetchPolicy;

    fn from_str(s: &str) -> std::result::Result<FetchPolicy, UnknownFetchPolicy> {
        match s {
            "auto" => Ok(FetchPolicy::Auto),
            "fetch" => Ok(FetchPolicy::Fetch),
            "compute" => Ok(FetchPolicy::Compute),
            _ => Err(UnknownFetchPolicy(s.to_owned())),
        }
    }
}

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
    /// Whether its chunks are fetched or computed.
    pub policy: FetchPolicy,
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
        let (url, policy) = (url.into(), FetchPolicy::Auto);
        RemoteOptions { url, options, timeout: Duration::from_secs(2), policy, objects: None }
    }

    /// The object store, and the prefix of all names in it. Whether it answers is not asked.
    pub(super) fn connect(&self) -> Result<(Arc<dyn ObjectStore>, ObjectPath)> {
        let failed = |why: String| StoreError::Remote { url: self.url.clone(), why };
        let url = url::Url::parse(&self.url).map_err(|error| failed(error.to_string()))?;
        if let Some(objects) = &self.objects {
            let prefix = ObjectPath::from_url_path(url.path()).map_err(|error| failed(error.to_string()))?;
            return Ok((objects.clone(), prefix));
        }
        // How long a request may take follows from its size: the client's own limit is only the last.
        let longest = [("timeout", LONGEST_REQUEST.to_owned())];
        let given = self.options.iter().map(|(name, value)| (name.as_str(), value.clone())).chain(longest);
        // Somebody else may have chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (objects, prefix) = parse_url_opts(&url, given).map_err(|error| failed(error.to_string()))?;
        if url.scheme() == "file" {
            // An object whose writing was confirmed must be there after a loss of power: a document without its object counts as lost.
            return Ok((Arc::new(LocalFileSystem::new().with_fsync(true)), prefix));
        }
        Ok((objects.into(), prefix))
    }

    /// Whether objects are files of a folder.
    pub(super) fn is_folder(&self) -> bool {
        self.objects.is_none() && self.url.starts_with("file:")
    }

    /// Refuses a folder that holds other files and none of Refrain's, and makes one that is missing, for its owner alone. One that does
    /// not answer in time, such as a network mount, is left to its first request.
    pub(super) fn prepare_folder(&self) -> Result<()> {
        let url =
            url::Url::parse(&self.url).ok().filter(|url| url.scheme() == "file" && self.objects.is_none());
        let Some(folder) = url.and_then(|url| url.to_file_path().ok()) else { return Ok(()) };
        let (sender, prepared) = channel();
        std::thread::spawn(move || sender.send(prepare_folder(&folder)));
        let prepared = prepared.recv_timeout(self.timeout).unwrap_or(Ok(()));
        prepared.map_err(|why| StoreError::Remote { url: self.url.clone(), why })
    }

    /// The threads of a client.
    pub(super) fn runtime(&self) -> Result<Runtime> {
        Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("remote")
            .enable_all()
            .build()
            .map_err(|error| StoreError::Remote { url: self.url.clone(), why: error.to_string() })
    }
}

fn prepare_folder(folder: &Path) -> Result<(), String> {
    let listed = match fs::read_dir(folder) {
        Ok(listed) => listed,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // The first request has the error of a folder that cannot be made.
            let _ = make_private_folder(folder);
            return Ok(());
        }
        Err(_) => return Ok(()),
    };
    let mut other = None;
    for name in listed.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()) {
        if is_shard(&name) || MARKS.contains(&name.as_str()) {
            return Ok(());
        }
        if !name.starts_with('.') && name != "lost+found" {
            other = Some(name);
        }
    }
    match other {
        Some(name) => Err(format!(
            "the folder holds {name:?}, and nothing that Refrain has written; give an empty folder, or a new one"
        )),
        None => Ok(()),
    }
}

/// Secrets are not shown.
impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions").field("url", &self.url).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_in_a_folder_is_synced_before_its_writing_is_confirmed() {
        let connect = |url: &str| RemoteOptions::new(url).connect();
        let (objects, prefix) = connect("file:///a%20folder/library").unwrap();
        assert!(format!("{objects:?}").contains("fsync: true"), "{objects:?}");
        assert_eq!(prefix.as_ref(), "a folder/library");
        for refused in ["file://host/folder", "folder"] {
            assert!(connect(refused).is_err(), "{refused}");
        }
    }
}
