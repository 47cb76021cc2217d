//! Bringing chunks to the object store, in the background.

use std::io;
use std::sync::{Arc, Weak};

use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::client::{Client, FIRST_PAUSE, Failure, LONGEST_PAUSE};
use crate::disk::Disk;
use crate::{ChunkKey, Result};

/// Brings what the index notes to the object store, until the store is closed.
pub(super) async fn send_all(client: Arc<Client>, disk: Weak<Disk>) {
    let mut pause = FIRST_PAUSE;
    loop {
        client.recover().await;
        let Some(disk) = disk.upgrade() else { return };
        let trouble = send_pending(&client, disk).await;
        let is_stuck = trouble.is_some();
        *client.stuck() = trouble;
        if is_stuck {
            // Chunks that are put meanwhile wait as well.
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        } else {
            pause = FIRST_PAUSE;
            client.wake.notified().await;
        }
    }
}

/// Brings what is noted there now, and says what is in the way, if something is.
async fn send_pending(client: &Client, disk: Arc<Disk>) -> Option<String> {
    let pending = match aside(&disk, Disk::pending).await {
        Ok(pending) => pending,
        Err(why) => return Some(why),
    };
    let mut trouble = None;
    for (key, noted) in pending {
        match send_chunk(client, &disk, key, noted).await {
            Ok(()) => {}
            // Another may go.
            Err(Failure::Refused(why)) => trouble = Some(why),
            Err(Failure::Failed(why)) => {
                client.failed(&why);
                return Some(why);
            }
            Err(Failure::Absent | Failure::Broken(_)) => trouble = Some("there is no such bucket".to_owned()),
        }
    }
    trouble
}

async fn send_chunk(client: &Client, disk: &Arc<Disk>, key: ChunkKey, noted: u64) -> Result<(), Failure> {
    let _no_deletion = client.uploading.lock().await;
    let files = aside(disk, move |disk| disk.shared_files(&key)).await.map_err(Failure::Refused)?;
    for (name, path) in files {
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
