//! Loading beside computing: while one layer is computed, later ones are read, verified, rotated and placed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use refrain_fusion::{KeyPositions, Plan};
use refrain_kernels::{Cpu, Dtype};
use refrain_kv::{KvCache, LayerCache, Lender, RopeTables, Shape};
use refrain_store::Layer;

use crate::Result;
use crate::load::Segment;
use crate::prefill::count_within;

/// A layer of the working cache with all reused keys and values in place.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) cache: LayerCache,
    /// Every segment's keys (before RoPE) and values, if the method narrows its rows at this layer.
    pub(crate) raw: Vec<Layer>,
}

/// More threads than this gain nothing: together they read faster than memory is written.
const MOST_LOADERS: usize = 8;

/// A layer that has not come after this time may come from afar.
const LONG: Duration = Duration::from_millis(10);

/// What one prefill loads; loader threads share it, each taking the next layer.
///
/// A layer of the cache belongs to one loader until it is handed to the computing thread, so nothing is locked.
#[derive(Debug)]
pub(crate) struct Load<'a> {
    segments: &'a [Segment],
    plan: &'a Plan,
    tables: &'a RopeTables,
    shape: Shape,
    dtype: Dtype,
    capacity: usize,
    lender: &'a Lender<'a>,
    /// Layers that may be loaded beyond the one that is computed.
    ahead: usize,
    /// Layers that the computing thread has asked for, and who waits for more of them.
    asked: Mutex<usize>,
    more: Condvar,
    /// One thread: the pool is left to the computing thread, whose kernels would run alone while it is taken.
    cpu: Cpu,
    next: AtomicUsize,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    broken: AtomicBool,
}

impl<'a> Load<'a> {
    /// Layers for `cache`. The rows of `plan` are those of the layers up to its first narrowing; `tables` are those of
    /// the cache's slots; `ahead` layers may be loaded beyond the one that is computed.
    pub(crate) fn new(
        segments: &'a [Segment],
        plan: &'a Plan,
        tables: &'a RopeTables,
        cache: &KvCache,
        lender: &'a Lender<'a>,
        ahead: usize,
        cpu: &Cpu,
    ) -> Load<'a> {
        Load {
            segments,
            plan,
            tables,
            shape: cache.shape(),
            dtype: cache.dtype(),
            capacity: cache.capacity(),
            lender,
            ahead,
            asked: Mutex::new(0),
            more: Condvar::new(),
            cpu: cpu.single_threaded(),
            next: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        }
    }

    /// The computing thread asks for a layer, or, with more than there are, for nothing any more.
    fn ask(&self, layer: usize) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = layer;
        self.more.notify_all();
    }

    /// Waits until a layer is not too far ahead.
    fn wait_for(&self, layer: usize) {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let early = |asked: &mut usize| layer > asked.saturating_add(self.ahead);
        drop(self.more.wait_while(asked, early).unwrap_or_else(PoisonError::into_inner));
    }

    /// Bytes loaded, time that it took all threads, and whether a segment is broken.
    pub(crate) fn finish(self) -> (u64, Duration, bool) {
        let busy = Duration::from_nanos(self.nanoseconds.into_inner());
        (self.bytes.into_inner(), busy, self.broken.into_inner())
    }

    /// Whether the segment's keys and values are to be placed at `layer`. Where all its tokens are computed they
    /// would be overwritten; which those are is known up to the first narrowing.
    fn places(&self, layer: usize, segment: &Segment) -> bool {
        let narrowed = self.plan.narrows.first().is_some_and(|first| layer > *first);
        narrowed || count_within(&self.plan.rows, segment.span) < segment.span.len()
    }

    /// Whether the method may compare them with fresh ones at `layer`.
    fn compares(&self, layer: usize) -> bool {
        self.plan.narrows.contains(&layer)
    }

    fn read(&self, layer: usize, segment: &Segment) -> Option<Layer> {
        let data = segment.reader.layer(layer);
        let bytes = data.as_ref().filter(|_| !segment.computed).map_or(0, Layer::stored_bytes);
        self.bytes.fetch_add(bytes as u64, Relaxed);
        data
    }

    /// Brings in a layer; none if a segment is broken.
    fn layer(&self, layer: usize) -> Option<Ready> {
        let mut cache = self.lender.take(self.shape, self.dtype, self.capacity);
        let mut raw = Vec::new();
        for segment in self.segments {
            let (places, compares) = (self.places(layer, segment), self.compares(layer));
            if !places && !compares {
                continue;
            }
            let data = self.read(layer, segment)?;
            if places {
                self.place(layer, segment, &data, &mut cache);
            }
            raw.extend(compares.then_some(data));
        }
        Some(Ready { cache, raw })
    }

    /// Rotates and places the keys and values of a segment at `layer`.
    fn place(&self, layer: usize, segment: &Segment, data: &Layer, cache: &mut LayerCache) {
        let from = match self.plan.positions {
            KeyPositions::Global => segment.span.start,
            KeyPositions::ChunkLocal => segment.first_position,
        } as usize;
        let rotary = self.tables.layer(layer).slice(from, from + segment.span.len());
        let slots: Vec<u32> = segment.span.positions().collect();
        cache.place(&self.cpu, self.shape, (data.k(), data.v()), rotary, &slots);
    }

    /// Reads what nobody needs of a layer from disk: only a chunk that was read and verified whole is kept in memory
    /// for later requests. It comes last, so that nobody waits for it. Says whether all of it is sound.
    fn rest(&self, layer: usize) -> bool {
        let unused =
            |s: &&Segment| !self.places(layer, s) && !self.compares(layer) && s.reader.would_be_kept();
        self.segments.iter().filter(unused).all(|segment| self.read(layer, segment).is_some())
    }

    /// One loader thread: the next layer until there is none, then the next rest of a layer.
    fn work(&self, outbox: &Sender<Message>) {
        let layers = self.shape.layers;
        loop {
            let task = self.next.fetch_add(1, Relaxed);
            if task >= 2 * layers {
                return;
            }
            let sound = if task < layers {
                self.wait_for(task);
                let ready = self.timed(|| self.layer(task));
                let sound = ready.is_some();
                // Nobody listens any more once a broken segment has ended the prefill.
                if outbox.send(ready.map(|ready| (task, ready))).is_err() {
                    return;
                }
                sound
            } else {
                self.timed(|| self.rest(task - layers))
            };
            if !sound {
                self.broken.store(true, Relaxed);
                return;
            }
        }
    }

    fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = work();
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        done
    }
}

/// A layer's index and what is to be installed there; none if a segment is broken.
type Message = Option<(usize, Ready)>;

/// The computing thread's end: layers in order, whatever order they come in.
#[derive(Debug)]
pub(crate) struct Feed<'a> {
    load: &'a Load<'a>,
    inbox: Receiver<Message>,
    loaders: usize,
    early: BTreeMap<usize, Ready>,
    waited: Duration,
}

impl<'a> Feed<'a> {
    /// Starts loading with up to `threads` threads.
    pub(crate) fn start<'scope>(
        scope: &'scope Scope<'scope, 'a>,
        load: &'a Load<'a>,
        threads: usize,
    ) -> Feed<'a> {
        let (outbox, inbox) = channel();
        let loaders = (0..threads.min(MOST_LOADERS).min(load.shape.layers))
            .filter(|i| {
                let outbox = outbox.clone();
                let loader = Builder::new().name(format!("load-{i}"));
                loader.spawn_scoped(scope, move || load.work(&outbox)).is_ok()
            })
            .count();
        Feed { load, inbox, loaders, early: BTreeMap::new(), waited: Duration::ZERO }
    }

    /// The next layer, as soon as it is ready; none if a segment is broken. While it waits long, it pauses for others.
    pub(crate) fn take(&mut self, layer: usize, pause: impl Fn() -> Result<()>) -> Result<Option<Ready>> {
        let started = Instant::now();
        self.load.ask(layer);
        let ready = self.wait(layer, pause);
        self.waited += started.elapsed();
        ready
    }

    fn wait(&mut self, layer: usize, pause: impl Fn() -> Result<()>) -> Result<Option<Ready>> {
        // Where no thread can be started this one loads.
        if self.loaders == 0 {
            return Ok(self.load.timed(|| self.load.layer(layer)));
        }
        loop {
            if let Some(ready) = self.early.remove(&layer) {
                return Ok(Some(ready));
            }
            match self.inbox.recv_timeout(LONG) {
                Ok(Some((arrived, ready))) => _ = self.early.insert(arrived, ready),
                Ok(None) | Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => pause()?,
            }
        }
    }

    /// Time spent waiting for layers.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Feed<'_> {
    fn drop(&mut self) {
        // Whoever waits goes on, and finds that nobody listens.
        self.load.ask(usize::MAX);
    }
}
