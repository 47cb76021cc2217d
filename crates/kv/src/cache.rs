//! The working KV cache: what attention reads during one request.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_kernels::{CacheHeads, Device, Dtype, Floats, KvBuffer, KvRows, Rotary};

/// Sizes of one layer's keys (and values).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of layers.
    pub layers: usize,
    /// KV heads of a layer, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
}

impl Shape {
    /// Heads of one layer.
    pub fn heads(&self) -> CacheHeads {
        CacheHeads { kv_heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Elements of one token's keys at one layer, `Hkv·d`.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes that one token's keys and values take over all layers.
    pub fn token_bytes(&self, dtype: Dtype) -> usize {
        2 * self.layers * self.width() * dtype.size()
    }
}

/// Keys (rotated) and values of one layer, each `Hkv × capacity × d`.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Rotated keys.
    pub k: KvBuffer,
    /// Values.
    pub v: KvBuffer,
}

impl LayerCache {
    /// Room for `capacity` tokens, filled with zeros.
    pub fn new(device: &dyn Device, shape: Shape, dtype: Dtype, capacity: usize) -> LayerCache {
        let elements = shape.width() * capacity;
        LayerCache { k: device.kv(dtype, elements), v: device.kv(dtype, elements) }
    }

    /// Rotates the keys of `slots.len()` tokens and places them and their values into `slots`.
    ///
    /// Fresh and cached keys both come through here, so that equal stored values give equal bits.
    pub fn place(
        &mut self,
        device: &dyn Device,
        shape: Shape,
        kv: (KvRows<'_>, KvRows<'_>),
        rotary: Rotary<'_>,
        slots: &[u32],
    ) {
        device.rope_and_place(None, kv, shape.heads(), rotary, slots, (&mut self.k, &mut self.v));
    }

    /// [`LayerCache::place`] of tokens that are computed, whose queries, `heads` a token, are rotated in place.
    #[allow(clippy::too_many_arguments)]
    pub fn place_with_queries(
        &mut self,
        device: &dyn Device,
        shape: Shape,
        (q, heads): (&mut Floats, usize),
        kv: (KvRows<'_>, KvRows<'_>),
        rotary: Rotary<'_>,
        slots: &[u32],
    ) {
        let into = (&mut self.k, &mut self.v);
        device.rope_and_place(Some((q, heads)), kv, shape.heads(), rotary, slots, into);
    }

    /// Bytes allocated for keys and values.
    pub fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }

    /// The key and value of one slot of a head go to another, `capacity` slots being a head's.
    pub fn move_slot(
        &mut self,
        device: &dyn Device,
        (head_dim, capacity): (usize, usize),
        head: usize,
        from: usize,
        to: usize,
    ) {
        let (from, to) = ((head * capacity + from) * head_dim, (head * capacity + to) * head_dim);
        for buffer in [&mut self.k, &mut self.v] {
            device.copy_kv_within(buffer, from..from + head_dim, to);
        }
    }

    /// [`Device::gather_slots`] of keys and values.
    pub fn gather(
        &self,
        device: &dyn Device,
        head_dim: usize,
        from: usize,
        kept: &[u32],
        copies: usize,
        to: usize,
    ) -> LayerCache {
        let gather = |buffer| device.gather_slots(buffer, head_dim, from, kept, copies, to);
        LayerCache { k: gather(&self.k), v: gather(&self.v) }
    }
}

/// Layers of caches that are no longer used, kept for those to come: fresh memory costs more than filling it.
#[derive(Debug, Default)]
pub struct KvBufferPool {
    layers: Mutex<Vec<LayerCache>>,
    /// Whether nothing is kept.
    is_off: bool,
}

impl KvBufferPool {
    /// A pool for `device`. It keeps nothing where the device has memory of its own, and a pool of it: what is kept there counts as free.
    pub fn of(device: &dyn Device) -> KvBufferPool {
        KvBufferPool { is_off: device.memory().is_some(), ..KvBufferPool::default() }
    }

    /// A layer for `capacity` tokens, in pooled memory if there is some that is large enough and at most twice as large. Its
    /// slots hold zeros or what they held before.
    ///
    /// An empty pool gets the other layers of such a cache, too, before any of them is written to: layers that are smaller than a huge page
    /// can then share it with their neighbours.
    pub fn acquire(&self, device: &dyn Device, shape: Shape, dtype: Dtype, capacity: usize) -> LayerCache {
        let pooled = {
            let mut layers = self.layers();
            if layers.is_empty() && !self.is_off {
                layers.extend((0..shape.layers).map(|_| LayerCache::new(device, shape, dtype, capacity)));
            }
            layers.pop()
        };
        let elements = shape.width() * capacity;
        let fits = |buffer: &KvBuffer| {
            buffer.dtype() == dtype && (elements..=2 * elements).contains(&buffer.capacity())
        };
        match pooled {
            Some(mut cache) if fits(&cache.k) && fits(&cache.v) => {
                device.resize_kv(&mut cache.k, elements);
                device.resize_kv(&mut cache.v, elements);
                cache
            }
            _ => LayerCache::new(device, shape, dtype, capacity),
        }
    }

    /// Keeps the memory of at most `layers` layers.
    pub fn trim(&self, layers: usize) {
        self.layers().truncate(layers);
    }

    /// Takes over the layers of a cache in place of all that the pool holds.
    pub fn replace(&self, cache: &mut KvCache) {
        if self.is_off {
            return cache.layers.clear();
        }
        let mut pooled = self.layers();
        pooled.clear();
        pooled.append(&mut cache.layers);
    }

    fn keep(&self, layer: LayerCache) {
        if !self.is_off {
            self.layers().push(layer);
        }
    }

    fn layers(&self) -> MutexGuard<'_, Vec<LayerCache>> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of keys and values that one request holds, and the most that it held at a time.
#[derive(Debug, Default)]
pub struct MemoryMeter {
    held: AtomicUsize,
    peak: AtomicUsize,
}

impl MemoryMeter {
    /// Counts bytes that were allocated.
    pub fn add(&self, bytes: usize) {
        let held = self.held.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(held, Relaxed);
    }

    /// Counts bytes that were freed.
    pub fn subtract(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Relaxed);
    }

    /// Counts bytes until the guard is dropped.
    pub fn hold(&self, bytes: usize) -> HeldBytes<'_> {
        self.add(bytes);
        HeldBytes { meter: self, bytes }
    }

    /// The most bytes that were held at a time.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }
}

/// Bytes that a [`MemoryMeter`] counts while this lives.
#[derive(Debug)]
pub struct HeldBytes<'a> {
    meter: &'a MemoryMeter,
    bytes: usize,
}

impl Drop for HeldBytes<'_> {
    fn drop(&mut self) {
        self.meter.subtract(self.bytes);
    }
}

/// Layers for one request: from a pool, and counted by a meter. Clones share both.
#[derive(Clone, Debug)]
pub struct KvAllocator {
    device: Arc<dyn Device>,
    pool: Arc<KvBufferPool>,
    meter: Arc<MemoryMeter>,
}

impl KvAllocator {
    /// A request's allocator over `pool`, with a meter of its own.
    pub fn new(device: Arc<dyn Device>, pool: Arc<KvBufferPool>) -> KvAllocator {
        KvAllocator { device, pool, meter: Arc::default() }
    }

    /// An allocator on the pool and meter of this one, for a thread that works on `device`, which is beside the computing one
    /// ([`Device::beside`]).
    pub fn on(&self, device: &Arc<dyn Device>) -> KvAllocator {
        KvAllocator { device: device.clone(), ..self.clone() }
    }

    /// [`KvBufferPool::acquire`], counted.
    pub fn acquire(&self, shape: Shape, dtype: Dtype, capacity: usize) -> LayerCache {
        let layer = self.pool.acquire(&*self.device, shape, dtype, capacity);
        self.meter.add(layer.bytes());
        layer
    }

    /// Gives a layer back to the pool.
    pub fn release(&self, layer: LayerCache) {
        self.meter.subtract(layer.bytes());
        self.pool.keep(layer);
    }

    /// The meter of the request.
    pub fn meter(&self) -> &MemoryMeter {
        &self.meter
    }
}

/// Keys and values of all layers, in slots; allocated once at its capacity.
#[derive(Clone, Debug)]
pub struct KvCache {
    shape: Shape,
    dtype: Dtype,
    capacity: usize,
    layers: Vec<LayerCache>,
}

impl KvCache {
    /// Room for `capacity` tokens.
    pub fn new(device: &dyn Device, shape: Shape, dtype: Dtype, capacity: usize) -> KvCache {
        let layers = (0..shape.layers).map(|_| LayerCache::new(device, shape, dtype, capacity)).collect();
        KvCache { shape, dtype, capacity, layers }
    }

    /// A cache whose layers have no room until they are [installed](KvCache::install).
    pub fn vacant(device: &dyn Device, shape: Shape, dtype: Dtype, capacity: usize) -> KvCache {
        let layers = (0..shape.layers).map(|_| LayerCache::new(device, shape, dtype, 0)).collect();
        KvCache { shape, dtype, capacity, layers }
    }

    /// Puts a layer in its place.
    ///
    /// # Panics
    /// If it has another type or capacity than the cache, or there is no such layer.
    pub fn install(&mut self, layer: usize, cache: LayerCache) {
        let elements = self.shape.width() * self.capacity;
        for buffer in [&cache.k, &cache.v] {
            assert_eq!((buffer.dtype(), buffer.len()), (self.dtype, elements), "a layer of this cache");
        }
        self.layers[layer] = cache;
    }

    /// Sizes of a layer.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Slots of a KV head.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }

    /// Keys and values of a layer.
    pub fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    /// Keys and values of a layer, to be placed.
    pub fn layer_mut(&mut self, layer: usize) -> &mut LayerCache {
        &mut self.layers[layer]
    }
}

#[cfg(test)]
mod tests {
    use refrain_kernels::{Cpu, Dtype};

    use super::{KvBufferPool, Shape};

    #[test]
    fn an_empty_pool_gets_all_layers_of_a_cache_at_once() {
        let device = Cpu::new(1).unwrap();
        let shape = Shape { layers: 3, kv_heads: 2, head_dim: 4 };
        let pool = KvBufferPool::of(&device);
        let left = || pool.layers().len();
        let first = pool.acquire(&device, shape, Dtype::F16, 5);
        assert_eq!((first.k.len(), left()), (40, 2));
        let larger = pool.acquire(&device, shape, Dtype::F16, 50);
        assert_eq!((larger.k.len(), left()), (400, 1), "a layer that does not fit goes");
        pool.keep(first);
        assert_eq!(
            (pool.acquire(&device, shape, Dtype::F16, 4).k.len(), left()),
            (32, 1),
            "a larger one serves"
        );
    }
}
