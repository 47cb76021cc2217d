//! Bringing chunks to the object store, in the background.
//!
//! Several machines write the same names. An object is written only where there is none, or, where one was found broken, only
//! over that one, by its entity tag (ETag): no machine replaces or deletes what another has brought meanwhile.

use std::error::Error;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use object_store::path::Path as ObjectPath;
use object_store::{PutMode, PutOptions, PutPayload, UpdateVersion};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::{Client, FIRST_PAUSE, Failure, LONGEST_PAUSE};
use super::objects::WrittenObject;
use crate::disk::Disk;
use crate::{ChunkKey, Result};

/// How often an object is created again after a conflict that leaves nothing there, and the pause before.
const MAX_CONFLICTS: usize = 3;
const CONFLICT_PAUSE: Duration = Duration::from_millis(100);

/// Most chunks of a pass that may be refused: a machine that may not write would send all that it has each time.
const MAX_REFUSALS: usize = 3;

/// Most bytes of an object that is written by one request: S3 takes no more.
const LARGEST_OBJECT: u64 = 5 << 30;

/// Brings what the index notes to the object store, until the store is closed.
pub(super) async fn send_all(client: Arc<Client>, disk: Weak<Disk>) {
    let (mut pause, mut last) = (FIRST_PAUSE, None);
    loop {
        client.recover().await;
        let Some(disk) = disk.upgrade() else { return };
        let trouble = send_pending(&client, disk, &mut last).await;
        let is_stuck = trouble.is_some();
        *client.stuck() = trouble;
        if is_stuck {
            wait(&client, pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        } else if !client.is_down() {
            pause = FIRST_PAUSE;
            client.wake.notified().await;
        }
    }
}

/// Waits for the time of `pause`, in which chunks that are put wait as well, or until the object store has failed: it is to be asked whether it
/// answers again.
async fn wait(client: &Client, pause: Duration) {
    let until = Instant::now() + pause;
    while !client.is_down() {
        tokio::select! {
            () = sleep_until(until) => return,
            () = client.wake.notified() => {}
        }
    }
}

/// Brings what is noted there now, and says what is in the way, if something is. Ends early where any request has failed, since everything waits until
/// [`Client::recover`] has asked the object store again, and after [`MAX_REFUSALS`]. It begins behind `last`, the chunk that a pass before ended
/// with.
async fn send_pending(client: &Client, disk: Arc<Disk>, last: &mut Option<ChunkKey>) -> Option<String> {
    let mut pending = match aside(&disk, Disk::pending).await {
        Ok(pending) => pending,
        Err(why) => return Some(why),
    };
    if let Some(last) = last.take() {
        let behind = pending.iter().position(|(key, _)| *key > last).unwrap_or(0);
        pending.rotate_left(behind);
    }
    let (mut trouble, mut refusals) = (None, 0);
    for (key, noted) in pending {
        if client.is_down() {
            break;
        }
        match send_chunk(client, &disk, key, noted).await {
            Ok(()) => continue,
            Err(Failure::Failed(why)) => {
                client.failed(&why);
                return Some(why);
            }
            Err(failure) => trouble = Some(failure.to_string()),
        }
        // Another may go.
        refusals += 1;
        if refusals == MAX_REFUSALS {
            *last = Some(key);
            break;
        }
    }
    trouble
}

async fn send_chunk(client: &Client, disk: &Arc<Disk>, key: ChunkKey, noted: u64) -> Result<(), Failure> {
    let _no_deletion = client.uploading.lock().await;
    let files = aside(disk, move |disk| disk.shared_files(&key)).await.map_err(Failure::Refused)?;
    for (name, path) in files {
        let bytes = tokio::fs::metadata(&path).await.map_or(0, |metadata| metadata.len());
        if bytes > LARGEST_OBJECT && !client.is_folder {
            return Err(Failure::Refused(format!(
                "{} has {bytes} bytes, and an object may have {LARGEST_OBJECT}: shorter documents have smaller chunks",
                path.display()
            )));
        }
        match tokio::fs::read(&path).await {
            Ok(bytes) => client.send(&name, bytes).await?,
            // It went to make room meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::Refused(format!("cannot read {}: {error}", path.display()))),
        }
    }
    aside(disk, move |disk| disk.sent(&key, noted)).await.map_err(Failure::Refused)
}

/// Does something with the disk, which may wait for other processes, where nobody waits for it.
async fn aside<T: Send + 'static>(
    disk: &Arc<Disk>,
    work: impl FnOnce(&Disk) -> Result<T> + Send + 'static,
) -> Result<T, String> {
    let disk = disk.clone();
    let done = spawn_blocking(move || work(&disk)).await;
    done.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

impl Client {
    /// Brings an object there, unless it is there and not known as broken: what a name holds follows from it.
    async fn send(&self, name: &str, bytes: Vec<u8>) -> Result<(), Failure> {
        let (path, size, payload) = (self.path(name), bytes.len() as u64, PutPayload::from(bytes));
        let replaced = match self.known.broken(name) {
            Some(broken) => self.replace(&path, broken, payload.clone()).await?,
            None => false,
        };
        // Megabytes are not sent to be refused. The condition decides where another machine writes in between.
        let created =
            !replaced && !self.is_there(&path).await? && self.create(&path, payload).await?.is_some();
        self.known.found_whole(name);
        let counters = &self.counters;
        counters.replaced.fetch_add(replaced.into(), Relaxed);
        if created || replaced {
            counters.sent.fetch_add(1, Relaxed);
            counters.sent_bytes.fetch_add(size, Relaxed);
        } else {
            counters.already_there.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    /// Writes an object over the broken one of this version, and says whether that one was still there.
    async fn replace(
        &self,
        path: &ObjectPath,
        broken: UpdateVersion,
        payload: PutPayload,
    ) -> Result<bool, Failure> {
        match self.put(path, payload.clone(), PutMode::Update(broken)).await {
            Err(Failure::Conflict) => Ok(false),
            // Another machine's whole object is replaced by its equal, if it came meanwhile.
            Err(Failure::Unsupported) => self.put(path, payload, PutMode::Overwrite).await.map(|_| true),
            done => done.map(|_| true),
        }
    }

    /// Writes an object where there is none; none is written where there is one. Of several machines that do so at once one writes, or, where the
    /// object store has no conditional requests, the last.
    pub(super) async fn create(
        &self,
        path: &ObjectPath,
        payload: PutPayload,
    ) -> Result<Option<WrittenObject>, Failure> {
        let mut conflicts = 0;
        loop {
            match self.put(path, payload.clone(), PutMode::Create).await {
                Err(Failure::Conflict | Failure::Unsupported) if self.is_there(path).await? => {
                    return Ok(None);
                }
                // Another machine's request that is still under way conflicts as well, and may be a deletion.
                Err(Failure::Conflict) if conflicts < MAX_CONFLICTS => conflicts += 1,
                Err(Failure::Unsupported) => {
                    return self.put(path, payload, PutMode::Overwrite).await.map(Some);
                }
                done => return done.map(Some),
            }
            sleep(CONFLICT_PAUSE).await;
        }
    }

    pub(super) async fn put(
        &self,
        path: &ObjectPath,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<WrittenObject, Failure> {
        let creates = matches!(mode, PutMode::Create);
        if creates && self.lacks_links.load(Relaxed) {
            return Err(Failure::Unsupported);
        }
        let longest = self.longest(payload.content_length() as u64);
        let options = PutOptions::from(mode);
        let put = async { Ok(self.objects.put_opts(path, payload, options).await) };
        let put = self.within(longest, put).await?;
        if let Err(error) = &put
            && creates
            && lacks_links(error)
        {
            self.lacks_links.store(true, Relaxed);
            return Err(Failure::Unsupported);
        }
        match put.map_err(Failure::of) {
            Ok(put) => Ok(WrittenObject { e_tag: put.e_tag }),
            // A folder that is full or may not be written to can still be read.
            Err(Failure::Failed(why)) if self.probe().await.is_ok() => Err(Failure::Refused(why)),
            Err(failure) => Err(failure),
        }
    }

    /// Whether an object is known to be there. Where names may not be listed, a missing one is refused.
    pub(super) async fn is_there(&self, path: &ObjectPath) -> Result<bool, Failure> {
        match self.head(path).await {
            Ok(()) => Ok(true),
            Err(Failure::Absent | Failure::Refused(_)) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

/// Whether a file could not get its name because its file system has no hard links, such as exFAT and some network mounts. An object is created as a
/// file by such a link.
fn lacks_links(error: &object_store::Error) -> bool {
    let causes = std::iter::successors(error.source(), |cause| (**cause).source());
    let mut codes = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()?.raw_os_error());
    codes.any(is_of_links)
}

/// Whether a system's error code is that of a file system without hard links.
#[cfg(unix)]
fn is_of_links(code: i32) -> bool {
    use rustix::io::Errno;
    [Errno::PERM, Errno::NOTSUP, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK]
        .iter()
        .any(|errno| errno.raw_os_error() == code)
}

/// Other systems' codes are not known.
#[cfg(not(unix))]
fn is_of_links(_: i32) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tempfile::tempdir;
    use tokio::runtime::Builder;

    use super::*;
    use crate::disk::Origin;
    use crate::tests::library::Library;
    use crate::tests::numbered;
    use crate::{Limits, RemoteOptions};

    /// The passes after the first go on behind those before, so that what is refused for good keeps nothing else back.
    #[test]
    fn a_machine_that_may_not_write_sends_few_chunks_a_pass() {
        let (folder, library) = (tempdir().unwrap(), Library::default());
        let mut options = RemoteOptions::new("memory:///library");
        options.objects = Some(Arc::new(library.clone()));
        let client = Client::new(&options).unwrap();
        let disk = Arc::new(Disk::open(folder.path(), Limits::memory(0), true).unwrap());
        for n in 1..=10 {
            disk.write_chunk(&numbered(n, 50), Origin::Here).unwrap();
        }
        library.set_full(true);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let mut last = None;
        let mut pass = || runtime.block_on(send_pending(&client, disk.clone(), &mut last));
        for n in 1..=4 {
            assert!(pass().unwrap().contains("no space left"));
            assert_eq!(library.refused().len(), n * MAX_REFUSALS);
        }
        let tried: BTreeSet<String> = library.refused().into_iter().collect();
        assert_eq!(tried.len(), 10);
        library.set_full(false);
        assert_eq!(pass(), None);
        assert!(disk.pending().unwrap().is_empty());
    }
}
