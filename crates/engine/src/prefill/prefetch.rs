//! Loading beside computing: while one layer is computed, later ones are read, verified, rotated and placed.

mod place;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use refrain_fusion::PassPlan;
use refrain_kernels::{Device, DeviceFailure, Dtype};
use refrain_kv::{KvAllocator, LayerCache, RopeTables, Shape};
use refrain_store::Layer;

use self::place::{Means, Placement, RUN_BYTES};
use super::reuse::Segment;
use super::stats::{LoadStats, SharedClock, count_within};
use crate::device_chunks::DeviceChunks;

/// A layer of the prompt's cache with all reused keys and values in place.
#[derive(Debug)]
pub(crate) struct PrefetchedLayer {
    pub(crate) cache: LayerCache,
    /// Every segment's keys (before RoPE) and values, if the pass compares fresh ones with them at this layer.
    pub(crate) cached: Vec<Layer>,
}

/// A layer that was asked for.
#[derive(Debug)]
pub(crate) enum Prefetched {
    Ready(PrefetchedLayer),
    /// The layer has not come yet.
    Waiting,
    /// A segment turned out broken.
    Broken,
    /// The device could not bring the layer in.
    Failed(DeviceFailure),
}

impl Prefetched {
    /// The end of a layer's loading, which has none if a segment is broken.
    fn of(loaded: Result<Option<PrefetchedLayer>, DeviceFailure>) -> Prefetched {
        match loaded {
            Ok(Some(ready)) => Prefetched::Ready(ready),
            Ok(None) => Prefetched::Broken,
            Err(failure) => Prefetched::Failed(failure),
        }
    }
}

/// Threads that load, of so many of the host. More gain nothing: together they read faster than memory is written, and where the device has memory
/// of its own (`is_apart`) they copy faster than its bus does.
pub(crate) fn loaders(threads: usize, is_apart: bool) -> usize {
    threads.min(if is_apart { 12 } else { 8 })
}

/// Threads that load where the device copies all by itself: one has the next copies ready while another waits. The more there are, the later
/// comes the first layer, since each brings one of its own.
const LOADERS_OF_PINNED: usize = 2;

/// Bytes that threads which load take at most beside the cache: a segment each, of `segment` bytes at a layer, or what the device copies at a time of
/// all segments, of `all` bytes.
pub(crate) fn loading_bytes(threads: usize, segment: u64, all: u64) -> u64 {
    let loaders = loaders(threads, true) as u64;
    (loaders * segment).max(loaders.min(LOADERS_OF_PINNED as u64) * all.min(RUN_BYTES as u64))
}

/// Whether the device copies nearly all by itself: parts of few tokens are not pinned.
fn is_pinned(segments: &[Segment]) -> bool {
    let tokens = |of: &dyn Fn(&&Segment) -> bool| -> usize {
        segments.iter().filter(of).map(|segment| segment.span.len()).sum()
    };
    8 * tokens(&|segment| !segment.reader.is_pinned()) <= tokens(&|_| true)
}

/// Sizes of the layers to be prefetched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefetchSizes {
    pub(crate) shape: Shape,
    pub(crate) dtype: Dtype,
    /// Slots of a head.
    pub(crate) capacity: usize,
    /// The first layer that is needed; of a job the first one of which something is loaded.
    pub(crate) first: usize,
    /// Layers that the pass goes through.
    pub(crate) layers: usize,
    /// Layers that may be loaded beyond the one that is computed.
    pub(crate) ahead: usize,
}

/// One pass's loading, shared by its loader threads, each of which takes the next layer.
///
/// A layer of the cache belongs to one loader until it is handed to the computing thread, so nothing is locked. Each loader has a device of its own
/// beside the computing one, whose queue holds the loader up only where both use the same memory.
#[derive(Debug)]
struct PrefetchJob {
    segments: Arc<[Segment]>,
    /// Tokens computed up to the first check.
    tokens: Vec<u32>,
    /// Whether fresh rows correct cached ones ([`PassPlan::corrects`]), for which those of computed tokens are looked at, too.
    corrects: bool,
    /// Layers at which the active tokens may shrink, with whether fresh rows are compared with cached ones there.
    checks: BTreeMap<usize, bool>,
    placement: Placement,
    sizes: PrefetchSizes,
    progress: Mutex<Progress>,
    changed: Condvar,
    next: AtomicUsize,
    bytes: AtomicU64,
    clock: SharedClock,
}

/// The state that loaders and the computing thread wait for.
#[derive(Debug)]
struct Progress {
    /// The layer that the computing thread has asked for last.
    requested: usize,
    /// Layers that the pass needs and that are not loaded.
    left: usize,
}

impl PrefetchJob {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` says that the loader may go on; false if the computing thread wants no layer any more.
    fn wait_until(&self, ready: impl Fn(&Progress) -> bool) -> bool {
        let waiting = |progress: &mut Progress| progress.requested != ABANDONED && !ready(progress);
        let progress =
            self.changed.wait_while(self.progress(), waiting).unwrap_or_else(PoisonError::into_inner);
        progress.requested != ABANDONED
    }

    /// The computing thread asks for a layer. A number beyond all layers releases loaders that wait.
    fn request(&self, layer: usize) {
        self.progress().requested = layer;
        self.changed.notify_all();
    }

    /// Whether the segment's keys and values are to be placed at `layer`. Where all its tokens are computed they would be
    /// overwritten; which tokens are computed is known up to the first check.
    fn places(&self, layer: usize, segment: &Segment) -> bool {
        let shrunk = self.checks.first_key_value().is_some_and(|(first, _)| layer > *first);
        shrunk || self.corrects || count_within(&self.tokens, segment.span) < segment.span.len()
    }

    /// Whether fresh rows may be compared with cached ones at `layer`.
    fn compares(&self, layer: usize) -> bool {
        self.checks.get(&layer).copied().unwrap_or(false)
    }

    fn read(&self, layer: usize, segment: &Segment) -> Option<Layer> {
        let data = segment.reader.layer(layer);
        let bytes = data.as_ref().filter(|_| !segment.computed).map_or(0, Layer::stored_bytes);
        self.bytes.fetch_add(bytes as u64, Relaxed);
        data
    }

    /// Whether nothing of any segment is needed at `layer`.
    fn is_vacant(&self, layer: usize) -> bool {
        self.segments.iter().all(|segment| !self.compares(layer) && !self.places(layer, segment))
    }

    /// A layer of which nothing is loaded.
    fn vacant(&self, means: &Means) -> PrefetchedLayer {
        let PrefetchSizes { shape, dtype, capacity, .. } = self.sizes;
        PrefetchedLayer { cache: means.allocator.acquire(shape, dtype, capacity), cached: Vec::new() }
    }

    /// Brings in a layer; none if a segment is broken.
    fn load(&self, means: &Means, layer: usize) -> Option<PrefetchedLayer> {
        let PrefetchedLayer { mut cache, mut cached } = self.vacant(means);
        let mut pinned = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            let (compares, places) = (self.compares(layer), self.places(layer, segment));
            let own = (index, segment);
            if !compares && (!places || self.placement.place_from_device(means, layer, own, &mut cache)) {
                continue;
            }
            let data = self.read(layer, segment)?;
            if compares {
                cached.push(data.clone());
            } else if self.placement.keep(means, layer, own, &data, &mut cache) {
                continue;
            }
            if places && data.pinned().is_some() {
                pinned.push((segment, data));
            } else if places {
                self.placement.place_from_host(means, layer, segment, &data, &mut cache);
            }
        }
        self.placement.place_pinned(means, layer, &pinned, &mut cache);
        means.device.wait();
        Some(PrefetchedLayer { cache, cached })
    }

    /// [`PrefetchJob::load`], timed. Chunks in the device's memory make room if they have to.
    fn load_making_room(
        &self,
        means: &Means,
        layer: usize,
    ) -> Result<Option<PrefetchedLayer>, DeviceFailure> {
        let load = || DeviceFailure::catch(|| self.load(means, layer));
        self.clock.timed(|| match load() {
            Err(DeviceFailure::OutOfMemory { .. }) => {
                self.placement.clear_chunks();
                load()
            }
            loaded => loaded,
        })
    }

    /// Reads the segments that the pass does not need of a layer: the store keeps a chunk in memory only if it was read and
    /// verified whole, and so none of which a layer came from the device's memory. The prefill does not wait for it.
    fn read_for_cache(&self, layer: usize) -> bool {
        let unused = |(index, s): &(usize, &Segment)| {
            let needed = self.places(layer, s) || self.compares(layer);
            !needed && !self.placement.had(*index) && s.reader.would_be_kept()
        };
        let mut unused = self.segments.iter().enumerate().filter(unused);
        unused.all(|(_, segment)| self.read(layer, segment).is_some())
    }

    /// Has the device copy by itself, the next time, what was found in the store's memory.
    fn pin(&self, device: &dyn Device) {
        let segments = self.segments.iter().enumerate().filter(|(index, _)| !self.placement.had(*index));
        segments.for_each(|(_, segment)| segment.reader.pin(device));
    }

    /// One loader thread: the next layer until there is none, then what no layer needed. That comes after all layers are
    /// loaded: a broken segment that the pass does not need must not break one that it needs.
    fn work(&self, means: &Means, outbox: &Outbox) {
        let layers = self.sizes.layers;
        loop {
            let task = self.next.fetch_add(1, Relaxed);
            let goes_on = match task / layers {
                0 => self.load_next(means, outbox, task),
                1 => {
                    self.wait_until(|progress| progress.left == 0)
                        && self.clock.timed(|| self.read_for_cache(task - layers))
                }
                _ => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Loads a layer when its turn comes. False if no other is wanted.
    fn load_next(&self, means: &Means, outbox: &Outbox, layer: usize) -> bool {
        if !self.wait_until(|progress| layer <= progress.requested.saturating_add(self.sizes.ahead)) {
            return false;
        }
        let loaded = self.load_making_room(means, layer);
        let sound = matches!(loaded, Ok(Some(_)));
        self.progress().left -= 1;
        self.changed.notify_all();
        // The receiver is gone once a broken segment or a failure has ended the prefill.
        outbox.0.send((layer, Prefetched::of(loaded))).is_ok() && sound
    }
}

/// A request for no layer any more.
const ABANDONED: usize = usize::MAX;

/// A layer's index, and how its loading ended.
type Message = (usize, Prefetched);

/// A loader's end of the channel. A loader that panics tells the computing thread, which would wait for its layer for ever.
struct Outbox(Sender<Message>);

impl Drop for Outbox {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.send((ABANDONED, Prefetched::Broken));
        }
    }
}

/// The computing thread's end: layers in order, whatever order they come in.
#[derive(Debug)]
pub(crate) struct LayerPrefetcher {
    job: Arc<PrefetchJob>,
    /// The computing thread's own means.
    means: Means,
    inbox: Receiver<Message>,
    loaders: Vec<JoinHandle<()>>,
    early: BTreeMap<usize, PrefetchedLayer>,
    waited: Duration,
    counted: LoadStats,
}

impl LayerPrefetcher {
    /// Starts loading the layers of a pass with up to `threads` threads. `tables` have an entry for each position of the prompt.
    pub(crate) fn start(
        segments: Arc<[Segment]>,
        plan: &PassPlan,
        tables: Arc<RopeTables>,
        sizes: PrefetchSizes,
        allocator: &KvAllocator,
        (device, chunks): (&Arc<dyn Device>, &Arc<DeviceChunks>),
    ) -> LayerPrefetcher {
        let checks = plan.checks.iter().map(|(layer, needs)| (*layer, needs.deviation.is_some())).collect();
        let placement = Placement::new(&segments, (sizes.shape, plan.key_positions), tables, chunks);
        let mut job = PrefetchJob {
            segments,
            tokens: plan.tokens.clone(),
            corrects: plan.corrects.is_some(),
            checks,
            placement,
            sizes,
            progress: Mutex::new(Progress { requested: sizes.first, left: 0 }),
            changed: Condvar::new(),
            next: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            clock: SharedClock::default(),
        };
        let first = (sizes.first..sizes.layers).find(|layer| !job.is_vacant(*layer)).unwrap_or(sizes.layers);
        job.sizes.first = first;
        job.next = first.into();
        job.progress().left = sizes.layers - first;
        let job = Arc::new(job);
        let (outbox, inbox) = channel();
        let spawn = |i: usize| {
            let (job, outbox) = (job.clone(), Outbox(outbox.clone()));
            let means = Means::new(device.beside(), allocator);
            Builder::new().name(format!("load-{i}")).spawn(move || job.work(&means, &outbox)).ok()
        };
        let most = if chunks.is_apart() && is_pinned(&job.segments) { LOADERS_OF_PINNED } else { usize::MAX };
        let loaders = loaders(device.threads(), chunks.is_apart()).min(sizes.layers - sizes.first).min(most);
        let loaders = (0..loaders).filter_map(spawn).collect();
        LayerPrefetcher {
            job,
            means: Means::new(device.clone(), allocator),
            inbox,
            loaders,
            early: BTreeMap::new(),
            waited: Duration::ZERO,
            counted: LoadStats::default(),
        }
    }

    /// The layer, if it comes within `patience`.
    pub(crate) fn poll(&mut self, layer: usize, patience: Duration) -> Prefetched {
        let started = Instant::now();
        self.job.request(layer);
        let polled = self.wait(layer, patience);
        self.waited += started.elapsed();
        polled
    }

    fn wait(&mut self, layer: usize, patience: Duration) -> Prefetched {
        let started = Instant::now();
        // The first layers, of which nothing is loaded, need no thread that loads.
        if layer < self.job.sizes.first {
            return Prefetched::of(DeviceFailure::catch(|| Some(self.job.vacant(&self.means))));
        }
        // Where no thread could be started this one loads.
        if self.loaders.is_empty() {
            return Prefetched::of(self.job.load_making_room(&self.means, layer));
        }
        loop {
            if let Some(ready) = self.early.remove(&layer) {
                return Prefetched::Ready(ready);
            }
            match self.inbox.recv_timeout(patience.saturating_sub(started.elapsed())) {
                Ok((arrived, Prefetched::Ready(ready))) => _ = self.early.insert(arrived, ready),
                Ok((_, ended)) => return ended,
                Err(RecvTimeoutError::Disconnected) => return Prefetched::Broken,
                Err(RecvTimeoutError::Timeout) => return Prefetched::Waiting,
            }
        }
    }

    /// Time spent waiting for layers.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// The loading so far, and its time.
    fn stats(&self) -> LoadStats {
        let job = &self.job;
        let (elapsed, busy) = job.clock.elapsed_and_summed();
        LoadStats {
            bytes: job.bytes.load(Relaxed),
            copied: job.placement.copied(),
            reused: job.placement.reused(),
            busy,
            hidden: elapsed.saturating_sub(self.waited),
        }
    }

    /// The loading since the last call.
    pub(crate) fn count(&mut self) -> LoadStats {
        let all = self.stats();
        let counted = std::mem::replace(&mut self.counted, all);
        all.since(&counted)
    }

    /// Has a thread pin chunks that were found in the store's memory, since the answer is there: calls that pin would hold up those that compute.
    pub(crate) fn pin(&mut self) {
        let (job, device) = (self.job.clone(), self.means.device.clone());
        if job.placement.is_apart() && !is_pinned(&job.segments) {
            let pinning = Builder::new().name("pin".to_owned()).spawn(move || job.pin(&*device));
            self.loaders.extend(pinning);
        }
    }

    /// Waits until the loaders have ended.
    pub(crate) fn join(&mut self) {
        self.pin();
        self.job.request(self.job.sizes.layers);
        for loader in self.loaders.drain(..) {
            // A loader that panicked has said so in its message.
            let _ = loader.join();
        }
    }
}

impl Drop for LayerPrefetcher {
    fn drop(&mut self) {
        // Loaders that wait for their turn end; those that read for the store's memory go on.
        let mut progress = self.job.progress();
        if progress.requested + 1 < self.job.sizes.layers || progress.left > 0 {
            progress.requested = ABANDONED;
        }
        drop(progress);
        self.job.changed.notify_all();
    }
}
