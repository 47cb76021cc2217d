//! Files that killed processes have left in a folder that machines share. An object is written to `NAME#N` before it gets its name, and no
//! listing shows `NAME#N`.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use tokio::task::spawn_blocking;

use super::client::{Client, Failure};

impl Client {
    /// Removes what was left of objects in a folder and those below it, where `goes` says so of an object's last name and the age of
    /// what was left. Other object stores leave nothing.
    pub(super) async fn remove_leftovers(
        &self,
        folder: &ObjectPath,
        time: Duration,
        goes: impl Fn(&str, Duration) -> bool + Send + 'static,
    ) -> Result<(), Failure> {
        if !self.is_folder {
            return Ok(());
        }
        let folder = LocalFileSystem::new().path_to_filesystem(folder).map_err(Failure::of)?;
        let removed =
            self.within(time, async { Ok(spawn_blocking(move || remove_in(&folder, &goes)).await) });
        let refused = |error: io::Error| Failure::Refused(error.to_string());
        removed.await?.map_err(|error| refused(error.into()))?.map_err(refused)
    }
}

fn remove_in(folder: &Path, goes: &dyn Fn(&str, Duration) -> bool) -> io::Result<()> {
    let Some(listed) = unless_missing(fs::read_dir(folder))? else { return Ok(()) };
    for entry in listed {
        let entry = entry?;
        let Some(metadata) = unless_missing(entry.metadata())? else { continue };
        if metadata.is_dir() {
            remove_in(&entry.path(), goes)?;
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_number = |end: &str| !end.is_empty() && end.bytes().all(|byte| byte.is_ascii_digit());
        let Some((name, _)) = name.rsplit_once('#').filter(|(_, end)| is_number(end)) else { continue };
        if goes(name, metadata.modified()?.elapsed().unwrap_or_default()) {
            unless_missing(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

/// None where somebody else has removed it.
fn unless_missing<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}
