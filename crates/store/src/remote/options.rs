//! How an object store is opened.

use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, parse_url_opts};
use tokio::runtime::{Builder, Runtime};

use crate::{Result, StoreError};

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
        Ok((objects.into(), prefix))
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

/// Secrets are not shown.
impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions").field("url", &self.url).finish_non_exhaustive()
    }
}
