//! Bringing objects from the object store.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use futures_util::StreamExt;
use object_store::{GetOptions, GetResult, ObjectMeta, UpdateVersion};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::client::{Client, Failure};
use super::link::OnDrop;
use crate::Problem;

/// Receiver of an object's bytes. When it is dropped nothing comes any more.
pub(crate) trait ObjectSink: Send {
    /// Most bytes that the object can have.
    fn most(&self) -> u64;

    /// Takes the bytes that come next, of an object that says it has `size` of them.
    ///
    /// # Errors
    /// If the object is broken.
    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem>;

    /// All bytes have been taken.
    ///
    /// # Errors
    /// If the object is broken.
    fn end(&mut self) -> Result<(), Problem>;
}

impl Client {
    /// Brings an object to its sink.
    pub(super) async fn fetch(self: Arc<Self>, name: String, mut sink: Box<dyn ObjectSink>) {
        let Ok(_turn) = self.turns.acquire().await else { return };
        if self.is_down() {
            self.counters.skipped.fetch_add(1, Relaxed);
            return;
        }
        if self.known.is_absent(&name) {
            return;
        }
        match self.get(&name, sink.as_mut()).await {
            Ok(found) => {
                self.counters.fetched.fetch_add(1, Relaxed);
                self.counters.fetched_bytes.fetch_add(found.size, Relaxed);
                // It may write to the disk.
                let ended = spawn_blocking(move || (sink.end(), sink)).await;
                match ended {
                    Ok((Err(problem), _sink)) => self.found_broken(name, &problem, version(&found)),
                    _ => self.known.found_whole(&name),
                }
            }
            Err(Failure::Broken(problem, version)) => self.found_broken(name, &problem, version),
            // Where a key may not be listed, one that is missing is refused.
            Err(Failure::Absent | Failure::Refused(_)) => {
                self.counters.absent.fetch_add(1, Relaxed);
                self.known.found_absent(name);
            }
            Err(failure) => self.failed(&failure.to_string()),
        }
    }

    /// Remembers that an object is broken, so that [`Client::send`] replaces it. It is not deleted, since another machine may have
    /// put a whole one in its place meanwhile. An object of an unknown version is a newer program's, and stays.
    fn found_broken(&self, name: String, problem: &Problem, version: UpdateVersion) {
        if problem.is_permanent() {
            self.counters.broken.fetch_add(1, Relaxed);
            self.known.found_broken(name, version);
        }
    }

    /// Hands an object over as it comes. An object that is still the one known as broken is absent.
    async fn get(&self, name: &str, sink: &mut dyn ObjectSink) -> Result<ObjectMeta, Failure> {
        let broken = self.known.broken(name).and_then(|version| version.e_tag);
        let options = GetOptions::new().with_if_none_match(broken);
        let asked = Instant::now();
        self.link.ask(asked);
        let found = self.within(self.timeout, self.objects.get_opts(&self.path(name), options)).await;
        self.link.answered(asked, Instant::now(), !matches!(found, Err(Failure::Failed(_))));
        let found = found?;
        let (meta, most) = (found.meta.clone(), sink.most());
        let take = |piece: &[u8]| {
            self.link.came(piece.len(), Instant::now());
            sink.take(meta.size, piece).map_err(|problem| Failure::Broken(problem, version(&meta)))
        };
        self.link.begin(Instant::now());
        let arriving = OnDrop(|| self.link.end(Instant::now()));
        let size = self.receive(found, most, take).await;
        drop(arriving);
        Ok(ObjectMeta { size: size?, ..meta })
    }

    /// Hands over the bytes of an object as they come, in the time that `most` of them may take, and gives their number. The size that the
    /// object states is not believed: memory is taken as bytes come.
    pub(super) async fn receive(
        &self,
        found: GetResult,
        most: u64,
        mut take: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        let (path, longest) = (found.meta.location.clone(), self.longest(found.meta.size.min(most)));
        let (mut bytes, mut pieces) = (0, found.into_stream());
        let all = async {
            while let Some(piece) =
                self.within(self.timeout, async { pieces.next().await.transpose() }).await?
            {
                bytes += piece.len() as u64;
                take(&piece)?;
            }
            Ok(bytes)
        };
        let late = |_| Failure::Failed(format!("not all of {path} came within {longest:?}"));
        timeout(longest, all).await.map_err(late)?
    }
}

fn version(meta: &ObjectMeta) -> UpdateVersion {
    UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() }
}
