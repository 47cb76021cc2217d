//! An object store in memory that answers reads only when a test lets it: late, half, or never.

use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, once};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::watch;

/// Objects that several stores share. A clone has the same objects.
#[derive(Clone, Debug)]
pub(crate) struct HeldObjects(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    objects: InMemory,
    /// Bytes of each object that pass; the answer itself waits at 0.
    passes: watch::Sender<usize>,
    reads: AtomicUsize,
}

impl HeldObjects {
    pub(crate) fn new() -> HeldObjects {
        let passes = watch::Sender::new(usize::MAX);
        HeldObjects(Arc::new(Inner { objects: InMemory::new(), passes, reads: AtomicUsize::new(0) }))
    }

    /// Lets so many bytes of an object pass from now on, and holds the rest until [`Self::release`].
    pub(crate) fn hold(&self, bytes: usize) {
        self.0.passes.send_replace(bytes);
    }

    pub(crate) fn release(&self) {
        self.0.passes.send_replace(usize::MAX);
    }

    /// Reads until now.
    pub(crate) fn reads(&self) -> usize {
        self.0.reads.load(Relaxed)
    }
}

impl fmt::Display for HeldObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("held objects")
    }
}

#[async_trait]
impl ObjectStore for HeldObjects {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
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
        if options.head {
            return self.0.objects.get_opts(path, options).await;
        }
        self.0.reads.fetch_add(1, Relaxed);
        let mut gate = self.0.passes.subscribe();
        let passes = *gate.borrow();
        if passes == 0 {
            let _ = gate.wait_for(|passes| *passes == usize::MAX).await;
        }
        let found = self.0.objects.get_opts(path, options).await?;
        let GetResult { meta, range, attributes, extensions, .. } = &found;
        let (meta, range) = (meta.clone(), range.clone());
        let (attributes, extensions) = (attributes.clone(), extensions.clone());
        let mut bytes = found.bytes().await?;
        let first = bytes.split_to(passes.min(bytes.len()));
        let rest = async move {
            if passes < usize::MAX && passes > 0 && !bytes.is_empty() {
                let _ = gate.wait_for(|passes| *passes == usize::MAX).await;
            }
            Ok(bytes)
        };
        let payload = GetResultPayload::Stream(once(ready(Ok(first))).chain(once(rest)).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
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
