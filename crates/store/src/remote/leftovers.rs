//! Files that killed processes have left in a folder that machines share. An object is written to `NAME#N` before it gets its name, and no
//! listing shows `NAME#N`.

use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::client::{Client, Failure};

impl Client {
    /// Removes what was left of objects in a folder and those below it, where it was written `age` ago or earlier and `goes` says so of
    /// the object's last name. Other object stores leave nothing. Each folder has the time of a request, and one that cannot be read
    /// does not stop the others: the first failure comes in the end. It does not say that the object store fails.
    pub(super) async fn remove_leftovers(
        &self,
        folder: &ObjectPath,
        age: Duration,
        goes: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<(), Failure> {
        if !self.is_folder {
            return Ok(());
        }
        let mut folders = vec![LocalFileSystem::new().path_to_filesystem(folder).map_err(Failure::of)?];
        let (goes, mut outcome) = (Arc::new(goes), Ok(()));
        while let Some(folder) = folders.pop() {
            let goes = goes.clone();
            let removing = spawn_blocking(move || remove_in(&folder, age, &*goes));
            let Ok(removed) = timeout(self.timeout, removing).await else {
                return Err(Failure::Refused(format!("no answer within {:?}", self.timeout)));
            };
            let (below, removed) = removed.unwrap_or_else(|error| (Vec::new(), Err(error.into())));
            folders.extend(below);
            outcome = outcome.and(removed);
        }
        outcome.map_err(|error| Failure::Refused(error.to_string()))
    }
}

/// Removes what was left in a folder. Gives the folders in it, and the first failure.
fn remove_in(folder: &Path, age: Duration, goes: &dyn Fn(&str) -> bool) -> (Vec<PathBuf>, io::Result<()>) {
    let (mut below, mut outcome) = (Vec::new(), Ok(()));
    match fs::read_dir(folder) {
        Ok(listed) => {
            for entry in listed {
                let looked = entry.and_then(|entry| remove_entry(&entry, age, goes, &mut below));
                outcome = outcome.and(unless_missing(looked));
            }
        }
        Err(error) => outcome = unless_missing(Err(error)),
    }
    (below, outcome)
}

/// Removes an entry of a folder if it was left, or adds it to `below` if it is a folder.
fn remove_entry(
    entry: &DirEntry,
    age: Duration,
    goes: &dyn Fn(&str) -> bool,
    below: &mut Vec<PathBuf>,
) -> io::Result<()> {
    if entry.file_type()?.is_dir() {
        below.push(entry.path());
        return Ok(());
    }
    let name = entry.file_name();
    let name = name.to_string_lossy();
    let is_number = |end: &str| !end.is_empty() && end.bytes().all(|byte| byte.is_ascii_digit());
    let Some((name, _)) = name.rsplit_once('#').filter(|(_, end)| is_number(end)) else { return Ok(()) };
    // A time that is ahead is that of another machine's clock, or of a writer at work.
    if goes(name) && entry.metadata()?.modified()?.elapsed().unwrap_or_default() >= age {
        fs::remove_file(entry.path())?;
    }
    Ok(())
}

/// A file or folder that is not there any more was removed by another process.
fn unless_missing(looked: io::Result<()>) -> io::Result<()> {
    looked.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
