//! The folder of chunk files: names, atomic writes, what lies in it.
//!
//! A chunk lies at `<first two digits>/<64 digits>.safetensors`, its aux tensors beside it: `<64 digits>.<kind>.summary`.
//! While a file is written it is called `.tmp-…` in the same folder and locked, so that a process that cleans up can tell a
//! writer at work from one that died.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use refrain_kv::AuxTensors;

use crate::chunk_file::{Header, MAX_HEADER};
use crate::clock::now;
use crate::file_names::{
    BROKEN_INDEX, DOCUMENTS, INDEX, INDEX_LOCK, NAMESPACE_KEY, NEW_DOCUMENTS, TEMPORARY,
};
use crate::layer::Layer;
use crate::private::make_one_private_folder;
use crate::{Chunk, ChunkId, ChunkKey, Problem, Result, StoreError, aux_file};

const EXTENSION: &str = ".safetensors";
const AUX_EXTENSION: &str = ".summary";
/// Files of the store's own beside the chunks, and those of the documents that lie with them.
const OWN_FILES: [&str; 6] = [INDEX, INDEX_LOCK, BROKEN_INDEX, NAMESPACE_KEY, DOCUMENTS, NEW_DOCUMENTS];
/// A temporary file younger than this may belong to a writer that has not locked it yet, and an aux tensors file to a chunk that
/// is about to be written.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(60);

/// Whether a folder has a file of a store's, or a folder of chunks. One that cannot be read has none.
pub fn holds_store(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let name = entry.file_name();
        let is_name = |name: &str| OWN_FILES.contains(&name) || is_shard(name) && entry.path().is_dir();
        name.to_str().is_some_and(is_name)
    })
}

#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    /// Bytes that fit on the pretended disk.
    #[cfg(test)]
    pub(crate) room: std::sync::atomic::AtomicU64,
}

/// A file that is to be written.
pub(crate) struct NewFile<'a> {
    pub(crate) path: PathBuf,
    header: Vec<u8>,
    data: Vec<&'a [u8]>,
}

impl NewFile<'_> {
    pub(crate) fn bytes(&self) -> u64 {
        (self.header.len() + self.data.iter().map(|part| part.len()).sum::<usize>()) as u64
    }
}

/// Something in the folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FolderEntry {
    Chunk(ChunkKey, PathBuf),
    /// Of this chunk and kind.
    Aux(ChunkKey, String, PathBuf),
    Temporary(PathBuf),
    Other(PathBuf),
}

impl FolderEntry {
    pub(crate) fn path(&self) -> &Path {
        match self {
            FolderEntry::Chunk(_, path)
            | FolderEntry::Aux(.., path)
            | FolderEntry::Temporary(path)
            | FolderEntry::Other(path) => path,
        }
    }

    /// The chunk that it is of.
    pub(crate) fn key(&self) -> Option<&ChunkKey> {
        match self {
            FolderEntry::Chunk(key, _) | FolderEntry::Aux(key, ..) => Some(key),
            FolderEntry::Temporary(_) | FolderEntry::Other(_) => None,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.path().metadata().map_or(0, |metadata| metadata.len())
    }
}

impl Folder {
    pub(crate) fn open(root: &Path) -> Result<Folder> {
        // The program may change its working directory while the store is open.
        let root = std::path::absolute(root).map_err(io("find the folder", root))?;
        create_dir(&root)?;
        fs::read_dir(&root).map_err(io("read the folder", &root))?;
        Ok(Folder {
            root,
            #[cfg(test)]
            room: u64::MAX.into(),
        })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Where the chunk is, or would be.
    pub(crate) fn path(&self, key: &ChunkKey) -> PathBuf {
        chunk_path(&self.root, key)
    }

    /// The path of the aux tensors, whether they are there or not.
    pub(crate) fn aux_path(&self, key: &ChunkKey, kind: &str) -> PathBuf {
        aux_path(&self.root, key, kind)
    }

    /// The chunk's file and its header, or nothing if there is no such file.
    pub(crate) fn open_chunk(&self, key: &ChunkKey) -> Result<Option<(File, Header)>, Problem> {
        open_chunk(&self.path(key), key)
    }

    /// The file of a chunk, if its header has this identity. It stands at its first layer.
    pub(crate) fn open_known(&self, id: &ChunkId, key: &ChunkKey) -> Result<Option<(File, Header)>, Problem> {
        let opened = open_file(&self.path(key))?;
        match opened.as_ref().and_then(|(_, header)| header.id.difference(id)) {
            Some(field) => Err(Problem::Identity(field)),
            None => Ok(opened),
        }
    }

    /// The chunk's file, if it is there.
    pub(crate) fn open_file(&self, key: &ChunkKey) -> Result<Option<File>, Problem> {
        open_plain(&self.path(key))
    }

    /// The file of a chunk.
    pub(crate) fn chunk_file<'a>(&self, chunk: &'a Chunk) -> Result<NewFile<'a>> {
        let path = self.path(&chunk.key());
        let header = Header::of(chunk).encode();
        if header.len() > MAX_HEADER as usize {
            return Err(unwritten(&path, "its tokens or label exceed the format's 16 MiB of header"));
        }
        Ok(NewFile { path, header, data: chunk.data().iter().map(Layer::as_bytes).collect() })
    }

    /// The file of an aux tensors file.
    pub(crate) fn aux_file<'a>(
        &self,
        key: &ChunkKey,
        kind: &str,
        aux: &'a AuxTensors,
    ) -> Result<NewFile<'a>> {
        let path = self.aux_path(key, kind);
        let header = aux_file::header(key, kind, now(), aux)
            .map_err(|problem| unwritten(&path, &problem.to_string()))?;
        Ok(NewFile { path, header, data: aux_file::data(aux).collect() })
    }

    /// Writes a file under a temporary name, syncs it, gives it its name and syncs the folder. Returns its bytes.
    ///
    /// The temporary file is removed at any failure.
    pub(crate) fn write(&self, file: &NewFile<'_>) -> Result<u64> {
        let NewFile { path, header, data } = file;
        let failed = |source| StoreError::Io { action: "write", path: path.clone(), source };
        let dir = path.parent().unwrap_or(&self.root);
        create_dir(dir)?;
        let mut temporary = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(dir).map_err(failed)?;
        // Best effort: where there are no locks, only its age tells that a temporary file is stale.
        let _ = temporary.as_file().try_lock();
        let mut out = self.disk(temporary.as_file_mut());
        let mut bytes = 0;
        for part in std::iter::once(header.as_slice()).chain(data.iter().copied()) {
            out.write_all(part).map_err(failed)?;
            bytes += part.len() as u64;
        }
        drop(out);
        temporary.as_file().sync_all().map_err(failed)?;
        temporary.persist(path).map_err(|error| failed(error.error))?;
        sync_dir(dir)?;
        Ok(bytes)
    }

    #[cfg(not(test))]
    fn disk<'a>(&self, file: &'a mut File) -> Box<dyn Write + 'a> {
        Box::new(file)
    }

    #[cfg(test)]
    fn disk<'a>(&'a self, file: &'a mut File) -> Box<dyn Write + 'a> {
        Box::new(crate::tests::SmallDisk { file, room: &self.room })
    }

    /// Everything in the folder, ascending by path.
    pub(crate) fn scan(&self) -> Result<Vec<FolderEntry>> {
        let mut found = Vec::new();
        for (name, path) in entries(&self.root, "")? {
            if OWN_FILES.contains(&name.as_str()) {
                continue;
            }
            if !is_shard(&name) || !path.is_dir() {
                found.push(classify(&self.root, path));
                continue;
            }
            found.extend(self.shard(&name, "")?);
        }
        Ok(found)
    }

    /// The files of a subfolder whose names begin with `prefix`, ascending by path.
    fn shard(&self, name: &str, prefix: &str) -> Result<impl Iterator<Item = FolderEntry>> {
        let files = entries(&self.root.join(name), prefix)?;
        Ok(files.into_iter().map(|(_, path)| classify(&self.root, path)))
    }

    /// A chunk's file and its aux tensors files', by their names alone.
    pub(crate) fn files(&self, key: &ChunkKey) -> Result<Vec<FolderEntry>> {
        let name = key.to_string();
        Ok(self.shard(&name[..2], &name)?.filter(|found| found.key() == Some(key)).collect())
    }

    /// The files of several chunks and of their aux tensors, by their names alone, ascending by path.
    pub(crate) fn files_of(&self, keys: &BTreeSet<ChunkKey>) -> Result<Vec<FolderEntry>> {
        let shards: BTreeSet<String> = keys.iter().map(|key| key.to_string()[..2].to_owned()).collect();
        let mut found = Vec::new();
        for shard in shards {
            found.extend(
                self.shard(&shard, "")?.filter(|found| found.key().is_some_and(|key| keys.contains(key))),
            );
        }
        Ok(found)
    }

    /// A chunk's aux tensors, by their names alone.
    pub(crate) fn aux_files(&self, key: &ChunkKey) -> Result<Vec<FolderEntry>> {
        let files = self.files(key)?.into_iter();
        Ok(files.filter(|found| matches!(found, FolderEntry::Aux(..))).collect())
    }

    /// Keys of the chunk files whose names begin with `prefix`, by their names alone, ascending.
    pub(crate) fn keys(&self, prefix: &str) -> Result<Vec<ChunkKey>> {
        let mut keys = Vec::new();
        for (name, _) in entries(&self.root, prefix.get(..2).unwrap_or(prefix))? {
            if is_shard(&name) {
                let found = self.shard(&name, prefix)?;
                keys.extend(found.filter_map(|found| {
                    if let FolderEntry::Chunk(key, _) = found { Some(key) } else { None }
                }));
            }
        }
        Ok(keys)
    }
}

/// Whether this is the name of a subfolder of chunks: the first two digits of their keys.
pub(crate) fn is_shard(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn chunk_path(root: &Path, key: &ChunkKey) -> PathBuf {
    let name = key.to_string();
    root.join(&name[..2]).join(name + EXTENSION)
}

/// Name of a chunk's file, or of its aux tensors' of this kind, in any store.
#[cfg(feature = "remote")]
pub(crate) fn name(key: &ChunkKey, kind: Option<&str>) -> String {
    let name = key.to_string();
    match kind {
        None => format!("{}/{name}{EXTENSION}", &name[..2]),
        Some(kind) => format!("{}/{name}.{kind}{AUX_EXTENSION}", &name[..2]),
    }
}

fn aux_path(root: &Path, key: &ChunkKey, kind: &str) -> PathBuf {
    chunk_path(root, key).with_file_name(format!("{key}.{kind}{AUX_EXTENSION}"))
}

/// The meaning of a file below the folder `root`, by its name.
pub(crate) fn classify(root: &Path, path: PathBuf) -> FolderEntry {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if let Some(Ok(key)) = file.strip_suffix(EXTENSION).map(str::parse::<ChunkKey>)
        && path == chunk_path(root, &key)
    {
        return FolderEntry::Chunk(key, path);
    }
    if let Some((Ok(key), kind)) = file
        .strip_suffix(AUX_EXTENSION)
        .and_then(|stem| stem.split_once('.'))
        .map(|(key, kind)| (key.parse::<ChunkKey>(), kind))
        && aux_file::is_kind(kind)
        && path == aux_path(root, &key, kind)
    {
        return FolderEntry::Aux(key, kind.to_owned(), path);
    }
    if file.starts_with(TEMPORARY) { FolderEntry::Temporary(path) } else { FolderEntry::Other(path) }
}

/// Opens a chunk file and reads its header, which must be that of a chunk with this key.
pub(crate) fn open_chunk(path: &Path, key: &ChunkKey) -> Result<Option<(File, Header)>, Problem> {
    let opened = open_file(path)?;
    match &opened {
        Some((_, header)) if header.id.key() != *key => Err(Problem::Identity("key than its name")),
        _ => Ok(opened),
    }
}

fn open_file(path: &Path) -> Result<Option<(File, Header)>, Problem> {
    read_header(path, |file, len| Header::read(file, len))
}

/// Opens an aux tensors file and reads its header, which must be that of an aux tensors file of this chunk and kind.
pub(crate) fn open_aux_file(
    path: &Path,
    key: &ChunkKey,
    kind: &str,
) -> Result<Option<(File, aux_file::Header)>, Problem> {
    read_header(path, |file, len| aux_file::Header::read(file, len, key, kind))
}

/// Reads an aux tensors file and verifies all of it.
pub(crate) fn read_aux_file(path: &Path, key: &ChunkKey, kind: &str) -> Result<Option<AuxTensors>, Problem> {
    let read = |(mut file, header): (File, aux_file::Header)| header.aux_tensors(&mut file);
    open_aux_file(path, key, kind)?.map(read).transpose()
}

/// Opens a file and reads its header. The file stands behind it.
fn read_header<H>(
    path: &Path,
    read: impl FnOnce(&mut File, u64) -> Result<H, Problem>,
) -> Result<Option<(File, H)>, Problem> {
    let Some(mut file) = open_plain(path)? else { return Ok(None) };
    let len = file.metadata().map_err(|error| Problem::Io(error.to_string()))?.len();
    let header = read(&mut file, len)?;
    Ok(Some((file, header)))
}

fn open_plain(path: &Path) -> Result<Option<File>, Problem> {
    let trouble = |error: std::io::Error| Problem::Io(error.to_string());
    // Asked before it is opened: opening a pipe would wait for its writer.
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(Problem::Io("it is not a file".to_owned())),
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(trouble(error)),
    }
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(trouble(error)),
    }
}

/// Removes a file and says whether there was one.
pub(crate) fn remove(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if is_missing(&error) => Ok(false),
        Err(source) => Err(StoreError::Io { action: "remove", path: path.to_owned(), source }),
    }
}

/// Whether a row was entered so lately that its file may be about to get its name. A time that is ahead is that of a clock that was.
pub(crate) fn is_recent(entered: u64) -> bool {
    entered.abs_diff(now()) < STALE_AFTER.as_secs()
}

/// Removes a file that no writer is or has just been at work on, and says whether it did.
pub(crate) fn remove_stale(path: &Path) -> Result<bool> {
    let Ok(file) = File::open(path) else { return Ok(false) };
    // A time that is ahead is that of a clock that was: the file is as old as it is ahead.
    let age = |time: SystemTime| time.elapsed().unwrap_or_else(|ahead| ahead.duration());
    let age = file.metadata().and_then(|metadata| metadata.modified()).map(age);
    let is_locked = matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock));
    if is_locked || age.is_ok_and(|age| age < STALE_AFTER) {
        return Ok(false);
    }
    remove(path)
}

fn is_missing(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn unwritten(path: &Path, why: &str) -> StoreError {
    io("write", path)(std::io::Error::other(why.to_owned()))
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// Names and paths of what is in a folder and begins with `prefix`, ascending; nothing where there is no such folder.
fn entries(dir: &Path, prefix: &str) -> Result<Vec<(String, PathBuf)>> {
    let listed = match fs::read_dir(dir) {
        Ok(listed) => listed,
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        Err(source) => return Err(io("read the folder", dir)(source)),
    };
    let mut entries = Vec::new();
    for entry in listed {
        let entry = entry.map_err(io("read the folder", dir))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(prefix) {
            entries.push((name, entry.path()));
        }
    }
    entries.sort();
    Ok(entries)
}

/// Creates a folder and those above it, and makes them survive a loss of power.
pub(crate) fn create_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_dir(parent)?;
        make_dir(dir)?;
        return sync_dir(parent);
    }
    make_dir(dir)
}

fn make_dir(dir: &Path) -> Result<()> {
    match make_one_private_folder(dir) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        result => result.map_err(io("create the folder", dir)),
    }
}

#[cfg(unix)]
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync the folder", dir))
}

/// Other systems do not open folders.
#[cfg(not(unix))]
pub(crate) fn sync_dir(_: &Path) -> Result<()> {
    Ok(())
}
