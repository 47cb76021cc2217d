//! Deleting chunks from the object store.

use std::collections::BTreeSet;

use futures_util::{StreamExt, stream};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;

use super::client::{Client, Failure};
use super::link::MAX_CONCURRENT;
use crate::ChunkKey;
use crate::folder::STALE_AFTER;

impl Client {
    /// Deletes all objects of chunks whose files are gone, those of aux tensors included, and says what is in the way, if
    /// something is. The other objects go nevertheless.
    ///
    /// An upload under way ends first, since it could land later. An upload that begins later finds no file.
    pub(super) async fn delete(&self, keys: &BTreeSet<ChunkKey>) -> Result<(), String> {
        let _no_upload = self.uploading.lock().await;
        let shards: BTreeSet<String> = keys.iter().map(|key| key.to_string()[..2].to_owned()).collect();
        let delete_shard = |shard: String| async move {
            let objects = self.objects_of(keys, &shard).await?;
            let mut trouble = Ok(());
            for object in objects {
                match self.within(self.timeout, self.objects.delete(&object)).await {
                    Ok(()) | Err(Failure::Absent) => {}
                    Err(failure @ Failure::Failed(_)) => return Err(failure),
                    Err(failure) => trouble = Err(failure),
                }
            }
            let keys = keys.clone();
            let goes = move |name: &str| key_of(name).is_some_and(|key| keys.contains(&key));
            if let Err(why) = self.remove_leftovers(&self.path(&shard), STALE_AFTER, goes).await {
                tracing::warn!(
                    %why,
                    "files that killed processes have left of deleted chunks stay; `refrain store prune --delete` removes them"
                );
            }
            trouble
        };
        let outcomes = stream::iter(shards).map(delete_shard).buffer_unordered(MAX_CONCURRENT);
        let mut outcomes: Vec<Result<(), Failure>> = outcomes.collect().await;
        outcomes.retain(Result::is_err);
        let Some(Err(failure)) = outcomes.pop() else { return Ok(()) };
        if let Failure::Failed(why) = &failure {
            self.failed(why);
        }
        Err(failure.to_string())
    }

    /// The objects of those of the chunks whose keys begin with `shard`.
    ///
    /// Which aux tensors a chunk has is known there alone: its files here may have gone before, and another machine may have
    /// sent further ones.
    async fn objects_of(&self, keys: &BTreeSet<ChunkKey>, shard: &str) -> Result<Vec<ObjectPath>, Failure> {
        let first = keys.iter().map(ToString::to_string).find(|key| key.starts_with(shard));
        let folder = self.path(shard);
        // A name is longer than its key, so that it comes behind the key.
        let before = folder.clone().join(first.unwrap_or_default());
        let mut listed = self.objects.list_with_offset(Some(&folder), &before);
        let mut found = Vec::new();
        while let Some(object) = self.within(self.timeout, async { listed.next().await.transpose() }).await? {
            let key = object.location.filename().and_then(key_of);
            if key.is_some_and(|key| keys.contains(&key)) {
                found.push(object.location);
            }
        }
        Ok(found)
    }
}

/// The key of the chunk whose object, or that of aux tensors beside it, has this last name.
fn key_of(name: &str) -> Option<ChunkKey> {
    name.split('.').next()?.parse().ok()
}
