//! Objects that a program keeps beside its chunks, below the same prefix, and reads and writes whole.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStoreExt, PutMode};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::watch;

use super::client::{Client, Failure};
use super::link::MAX_CONCURRENT;
use super::options::RemoteOptions;
use crate::{Result, StoreError};

/// Objects of an object store, by names of `/`-separated parts. Clones share everything.
///
/// Each call waits for the object store, within the time limits of chunks, and fails at once while the object store is left alone
/// after a failure. None may be made by a thread of an asynchronous runtime.
#[derive(Clone)]
pub struct Objects {
    client: Arc<Client>,
    runtime: Handle,
    /// For errors.
    url: Arc<str>,
    closed: watch::Sender<bool>,
    /// The threads of a handle that was opened without a chunk store.
    _own: Option<Arc<OwnRuntime>>,
}

/// A runtime that is shut down with the last handle, without waiting for requests.
struct OwnRuntime(Option<Runtime>);

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// When it was written, by the object store's clock.
    pub written: SystemTime,
    /// Its entity tag, which another content does not have; none if the object store gives none.
    pub e_tag: Option<String>,
}

impl ListedObject {
    /// Its entity tag, or, where there is none, when it was written: another one after each change of its content.
    pub fn version(&self) -> String {
        self.e_tag.clone().unwrap_or_else(|| format!("{:?}", self.written))
    }
}

/// An object that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenObject {
    /// Its entity tag; none if the object store gives none.
    pub e_tag: Option<String>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Objects {
    pub(super) fn new(client: Arc<Client>, runtime: Handle, url: &str) -> Objects {
        Objects { client, runtime, url: url.into(), closed: watch::Sender::new(false), _own: None }
    }

    /// Opens the objects at a URL without a chunk store.
    ///
    /// # Errors
    /// If the options name no object store. Whether it answers is not asked.
    pub fn open(options: &RemoteOptions) -> Result<Objects> {
        let (client, runtime) = (Arc::new(Client::new(options)?), options.runtime()?);
        let opened = Objects::new(client.clone(), runtime.handle().clone(), &options.url);
        // An object store that failed is asked after its pause whether it answers again.
        runtime.spawn(async move {
            loop {
                client.recover().await;
                client.wake.notified().await;
            }
        });
        Ok(Objects { _own: Some(Arc::new(OwnRuntime(Some(runtime)))), ..opened })
    }

    /// The URL that the object store was opened by.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The bytes of an object; none if there is no such object.
    ///
    /// # Errors
    /// If the object store does not answer or refuses, or the object has more than `most` bytes.
    pub fn get(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        let found = self.wait(async move {
            let found = match client.within(client.timeout, client.objects.get(&path)).await {
                Ok(found) => found,
                Err(Failure::Absent) => return Ok(None),
                Err(failure) => return Err(failure),
            };
            let mut bytes = Vec::new();
            let take = |piece: &[u8]| {
                if bytes.len() as u64 + piece.len() as u64 > most {
                    return Err(Failure::TooLarge);
                }
                bytes.extend_from_slice(piece);
                Ok(())
            };
            match client.receive(found, most, take).await {
                Ok(_) => Ok(Some(Some(bytes))),
                Err(Failure::TooLarge) => Ok(Some(None)),
                Err(failure) => Err(failure),
            }
        })?;
        let too_large =
            || StoreError::ObjectTooLarge { url: self.url.to_string(), name: name.to_owned(), most };
        found.map(|bytes| bytes.ok_or_else(too_large)).transpose()
    }

    /// Of each name, whether there is an object of it. Several are asked for at once, and none is read.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn exist(&self, names: Vec<String>) -> Result<Vec<bool>> {
        let client = self.client.clone();
        self.wait(async move {
            let exists = |name: String| {
                let (client, path) = (client.clone(), client.path(&name));
                async move {
                    match client.head(&path).await {
                        Ok(()) => Ok(true),
                        Err(Failure::Absent) => Ok(false),
                        Err(failure) => Err(failure),
                    }
                }
            };
            stream::iter(names).map(exists).buffered(MAX_CONCURRENT).try_collect().await
        })
    }

    /// Writes an object in place of the one that has the name.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn put(&self, name: &str, bytes: Vec<u8>) -> Result<WrittenObject> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        self.wait(async move { client.put(&path, bytes.into(), PutMode::Overwrite).await })
    }

    /// Writes an object; none if there is one of the name. Of several that do so at once, one writes.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> Result<Option<WrittenObject>> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        self.wait(async move { client.create(&path, bytes.into()).await })
    }

    /// Deletes an object, if it is there.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn delete(&self, name: &str) -> Result<()> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        self.wait(async move {
            match client.within(client.timeout, client.objects.delete(&path)).await {
                Ok(()) | Err(Failure::Absent) => Ok(()),
                Err(failure) => Err(failure),
            }
        })
    }

    /// Removes what processes that were killed while they wrote have left below a folder, where machines share files and it was written
    /// `age` ago or earlier. A process that still writes has written lately.
    ///
    /// # Errors
    /// If some of it cannot be removed. The rest is.
    pub fn remove_leftovers(&self, folder: &str, age: Duration) -> Result<()> {
        let (client, path) = (self.client.clone(), self.client.path(folder));
        self.wait(async move { client.remove_leftovers(&path, age, |_| true).await })
    }

    /// The objects below a folder, or below the prefix without one, ascending by name: those whose names come behind `after`, another name
    /// below it, or all.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn list(&self, folder: &str, after: Option<&str>) -> Result<Vec<ListedObject>> {
        let client = self.client.clone();
        let folder = if folder.is_empty() { client.prefix.clone() } else { client.path(folder) };
        let after = after.map(|after| self.client.path(after));
        self.wait(async move {
            let mut listed = match &after {
                Some(after) => client.objects.list_with_offset(Some(&folder), after),
                None => client.objects.list(Some(&folder)),
            };
            let mut found = Vec::new();
            loop {
                let next = async { listed.next().await.transpose() };
                let object = match client.within(client.timeout, next).await {
                    Ok(Some(object)) => object,
                    // Where folders are real, one without objects may be missing.
                    Ok(None) | Err(Failure::Absent) => break,
                    Err(failure) => return Err(failure),
                };
                if let Some(parts) = object.location.prefix_match(&client.prefix) {
                    let name = parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/");
                    let (size, written) = (object.size, object.last_modified.into());
                    found.push(ListedObject { name, size, written, e_tag: object.e_tag });
                }
            }
            found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        })
    }

    /// Ends all calls of this handle and its clones, those under way included, with an error.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Whether the handle or a clone of it was closed.
    pub fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Why the object store is left alone, while it is.
    pub fn down(&self) -> Option<String> {
        self.client.stats().down
    }

    /// Waits for a request.
    fn wait<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T> {
        let failed = |why: String| StoreError::Objects { url: self.url.to_string(), why };
        if let Some(why) = self.down() {
            return Err(failed(why));
        }
        let (sender, answer) = channel();
        let mut closed = self.closed.subscribe();
        let ends = async move {
            // The sender is a part of the handle that waits.
            let _ = closed.wait_for(|closed| *closed).await;
        };
        self.runtime.spawn(async move {
            let outcome = tokio::select! {
                outcome = request => Some(outcome),
                () = ends => None,
            };
            // Nobody may be waiting any more.
            let _ = sender.send(outcome);
        });
        match answer.recv() {
            Ok(Some(Ok(value))) => Ok(value),
            Ok(Some(Err(Failure::Failed(why)))) => {
                self.client.failed(&why);
                Err(failed(why))
            }
            Ok(Some(Err(failure))) => Err(failed(failure.to_string())),
            Ok(None) | Err(_) => Err(failed("it was closed".to_owned())),
        }
    }
}
