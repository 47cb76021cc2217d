//! Objects that a program keeps beside its chunks, below the same prefix, and reads and writes whole.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::SystemTime;

use futures_util::StreamExt;
use object_store::{Error, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::client::{Client, Failure};
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
}

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its name.
    pub name: String,
    /// When it was written, by the object store's clock.
    pub written: SystemTime,
    /// Its entity tag, which another content does not have; none if the object store gives none.
    pub e_tag: Option<String>,
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
        Objects { client, runtime, url: url.into(), closed: watch::Sender::new(false) }
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
            let longest = client.longest(found.meta.size.min(most));
            // The size that it states is not believed: memory is taken as bytes come.
            let (mut bytes, mut pieces) = (Vec::new(), found.into_stream());
            let all = async {
                while let Some(piece) =
                    client.within(client.timeout, async { pieces.next().await.transpose() }).await?
                {
                    if bytes.len() as u64 + piece.len() as u64 > most {
                        return Ok(Some(None));
                    }
                    bytes.extend_from_slice(&piece);
                }
                Ok(Some(Some(bytes)))
            };
            let late = |_| Failure::Failed(format!("not all of {path} came within {longest:?}"));
            tokio::time::timeout(longest, all).await.map_err(late)?
        })?;
        let too_large =
            || StoreError::ObjectTooLarge { url: self.url.to_string(), name: name.to_owned(), most };
        found.map(|bytes| bytes.ok_or_else(too_large)).transpose()
    }

    /// Writes an object in place of the one that has the name.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn put(&self, name: &str, bytes: Vec<u8>) -> Result<WrittenObject> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        self.wait(async move {
            let longest = client.longest(bytes.len() as u64);
            let put = client.within(longest, client.objects.put(&path, PutPayload::from(bytes))).await?;
            Ok(WrittenObject { e_tag: put.e_tag })
        })
    }

    /// Writes an object; none if there is one of the name. Of several that do so at once, one writes.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> Result<Option<WrittenObject>> {
        let (client, path) = (self.client.clone(), self.client.path(name));
        self.wait(async move {
            let payload = PutPayload::from(bytes);
            let longest = client.longest(payload.content_length() as u64);
            let options = PutOptions::from(PutMode::Create);
            let put = async {
                match client.objects.put_opts(&path, payload.clone(), options).await {
                    Ok(put) => Ok(Some(Some(WrittenObject { e_tag: put.e_tag }))),
                    Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(Some(None)),
                    Err(Error::NotImplemented { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            };
            if let Some(created) = client.within(longest, put).await? {
                return Ok(created);
            }
            // An object store without conditional requests: of several that do so at once, the last one writes.
            match client.within(client.timeout, client.objects.head(&path)).await {
                Ok(_) => Ok(None),
                Err(Failure::Absent) => {
                    let put = client.within(longest, client.objects.put(&path, payload)).await?;
                    Ok(Some(WrittenObject { e_tag: put.e_tag }))
                }
                Err(failure) => Err(failure),
            }
        })
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
                    let (written, e_tag) = (object.last_modified.into(), object.e_tag);
                    found.push(ListedObject { name, written, e_tag });
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
            Ok(Some(Err(Failure::Refused(why)))) => Err(failed(why)),
            Ok(Some(Err(_))) => Err(failed("there is no such bucket".to_owned())),
            Ok(None) | Err(_) => Err(failed("it was closed".to_owned())),
        }
    }
}
