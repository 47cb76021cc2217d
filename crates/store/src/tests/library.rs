//! An object store in memory that a test can have refuse, and come before.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tempfile::{TempDir, tempdir};
use tokio::runtime::Builder;

use crate::{ChunkKey, RemoteOptions, Store};

/// Objects that several stores share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Library(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    objects: InMemory,
    /// Whether conditional requests are refused, as by an object store that has none.
    unconditional: AtomicBool,
    /// Whether nothing can be created, as in a folder without hard links.
    lacks_links: AtomicBool,
    /// So many of the next creating PUTs conflict with another machine's request, which leaves nothing there.
    conflicts: AtomicUsize,
    /// Whether nothing can be written, as to a full disk.
    is_full: AtomicBool,
    /// Names of the PUTs that were refused for want of room.
    refused: Mutex<Vec<String>>,
    /// What another machine does right before the next PUT: it writes these bytes there, or deletes what is there.
    before_put: Mutex<Option<Option<Vec<u8>>>>,
}

impl Library {
    pub(crate) fn refuse_conditions(&self) {
        self.0.unconditional.store(true, Relaxed);
    }

    pub(crate) fn refuse_links(&self) {
        self.0.lacks_links.store(true, Relaxed);
    }

    /// Names of the PUTs that were refused for want of room.
    pub(crate) fn refused(&self) -> Vec<String> {
        self.0.refused.lock().unwrap().clone()
    }

    pub(crate) fn set_full(&self, is_full: bool) {
        self.0.is_full.store(is_full, Relaxed);
    }

    /// So many creating PUTs conflict with a request of another machine that leaves nothing there.
    pub(crate) fn conflict(&self, times: usize) {
        self.0.conflicts.store(times, Relaxed);
    }

    /// Another machine writes these bytes right before the next PUT, to the same name.
    pub(crate) fn write_before_put(&self, bytes: Vec<u8>) {
        *self.0.before_put.lock().unwrap() = Some(Some(bytes));
    }

    /// Another machine deletes the object right before the next PUT to its name.
    pub(crate) fn delete_before_put(&self) {
        *self.0.before_put.lock().unwrap() = Some(None);
    }

    /// A store with a folder of its own that shares its chunks here.
    pub(crate) fn machine(&self) -> (TempDir, Store) {
        let folder = tempdir().unwrap();
        let mut options = RemoteOptions::new("memory:///library");
        options.objects = Some(Arc::new(self.clone()));
        let store = Store::open_shared(folder.path(), 64 << 20, &options).unwrap();
        (folder, store)
    }

    pub(crate) fn write(&self, path: &Path, bytes: Vec<u8>) {
        block_on(self.0.objects.put(path, bytes.into())).unwrap();
    }

    pub(crate) fn read(&self, path: &Path) -> Option<Vec<u8>> {
        let read = async { self.0.objects.get(path).await?.bytes().await };
        block_on(read).ok().map(|bytes| bytes.to_vec())
    }
}

/// The object of a chunk.
pub(crate) fn object(key: &ChunkKey) -> Path {
    let key = key.to_string();
    Path::from(format!("library/{}/{key}.safetensors", &key[..2]))
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    Builder::new_current_thread().build().unwrap().block_on(work)
}

pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn sent(store: &Store) {
    wait_for("all is sent", || store.remote_stats().unwrap().pending == 0);
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("library")
    }
}

#[async_trait]
impl ObjectStore for Library {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if self.0.unconditional.load(Relaxed) && options.mode != PutMode::Overwrite {
            return Err(Error::NotImplemented { operation: "PUT".into(), implementer: "library".into() });
        }
        if self.0.lacks_links.load(Relaxed) && options.mode == PutMode::Create {
            let source = std::io::Error::from_raw_os_error(rustix::io::Errno::PERM.raw_os_error());
            return Err(Error::Generic { store: "library", source: source.into() });
        }
        if self.0.is_full.load(Relaxed) {
            self.0.refused.lock().unwrap().push(path.to_string());
            return Err(Error::Generic { store: "library", source: "no space left on device".into() });
        }
        let left = |conflicts: usize| conflicts.checked_sub(1).filter(|_| options.mode == PutMode::Create);
        if self.0.conflicts.fetch_update(Relaxed, Relaxed, left).is_ok() {
            return Err(Error::AlreadyExists { path: path.to_string(), source: "409".into() });
        }
        let before = self.0.before_put.lock().unwrap().take();
        match before {
            Some(Some(bytes)) => _ = self.0.objects.put(path, bytes.into()).await?,
            Some(None) => self.0.objects.delete(path).await?,
            None => {}
        }
        self.0.objects.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.objects.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.objects.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.objects.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.objects.copy_opts(from, to, options).await
    }
}
