//! The device interface: all that is ever done to a tensor, over storage that only its device can look into.
//!
//! A device is one object behind `dyn Device`, so that engine, methods and policies are compiled once for all devices. Tensors
//! ([`Floats`], [`KvBuffer`], [`PackedLinear`]) hold storage of their device, of which the host knows the length alone; what
//! the host is to see comes out of a method as a vector of the host's.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::GumbelNoise;
use crate::buffer::{Buffer, Dtype, Slice};
use crate::linear::{Activation, Precision, WeightRows};

/// Memory of a device. Any type that can be cloned is one.
pub trait Storage: Any + Send + Sync {
    /// A copy of the memory.
    fn boxed_clone(&self) -> Box<dyn Storage>;
}

impl<T: Any + Clone + Send + Sync> Storage for T {
    fn boxed_clone(&self) -> Box<dyn Storage> {
        Box::new(self.clone())
    }
}

/// The storage as its device knows it.
fn known<S: Storage>(storage: &dyn Storage) -> &S {
    let any: &dyn Any = storage;
    any.downcast_ref().unwrap_or_else(|| panic!("{FOREIGN}"))
}

fn known_mut<S: Storage>(storage: &mut dyn Storage) -> &mut S {
    let any: &mut dyn Any = storage;
    any.downcast_mut().unwrap_or_else(|| panic!("{FOREIGN}"))
}

const FOREIGN: &str = "a tensor is used on the device that has made it";

/// Activations, `f32`, row-major.
pub struct Floats {
    storage: Box<dyn Storage>,
    len: usize,
}

impl Floats {
    /// A tensor of `len` elements in a device's storage. Devices call this.
    pub fn new(storage: impl Storage, len: usize) -> Floats {
        Floats { storage: Box::new(storage), len }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The storage, for its device.
    ///
    /// # Panics
    /// If another device has made the tensor.
    pub fn storage<S: Storage>(&self) -> &S {
        known(&*self.storage)
    }

    /// The storage, for its device, with the length.
    ///
    /// # Panics
    /// As [`Floats::storage`].
    pub fn storage_mut<S: Storage>(&mut self) -> (&mut S, &mut usize) {
        (known_mut(&mut *self.storage), &mut self.len)
    }
}

impl Clone for Floats {
    fn clone(&self) -> Floats {
        Floats { storage: self.storage.boxed_clone(), len: self.len }
    }
}

impl fmt::Debug for Floats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} floats", self.len)
    }
}

/// Keys or values of one layer.
pub struct KvBuffer {
    storage: Box<dyn Storage>,
    dtype: Dtype,
    len: usize,
    capacity: usize,
}

impl KvBuffer {
    /// A tensor of `len` elements in a device's storage, which has room for `capacity`. Devices call this.
    pub fn new(storage: impl Storage, dtype: Dtype, len: usize, capacity: usize) -> KvBuffer {
        KvBuffer { storage: Box::new(storage), dtype, len, capacity }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Elements for which there is memory.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.capacity * self.dtype.size()
    }

    /// The storage, for its device.
    ///
    /// # Panics
    /// If another device has made the tensor.
    pub fn storage<S: Storage>(&self) -> &S {
        known(&*self.storage)
    }

    /// The storage, for its device.
    ///
    /// # Panics
    /// As [`KvBuffer::storage`].
    pub fn storage_mut<S: Storage>(&mut self) -> &mut S {
        known_mut(&mut *self.storage)
    }

    /// Notes the length and the capacity that the storage has now. Devices call this.
    pub fn set_len(&mut self, len: usize, capacity: usize) {
        (self.len, self.capacity) = (len, capacity);
    }
}

impl Clone for KvBuffer {
    fn clone(&self) -> KvBuffer {
        KvBuffer { storage: self.storage.boxed_clone(), ..*self }
    }
}

impl fmt::Debug for KvBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.len, self.dtype)
    }
}

/// Packed weights of a product.
pub struct PackedLinear {
    storage: Box<dyn Any + Send + Sync>,
    bytes: usize,
}

impl PackedLinear {
    /// Weights of `bytes` bytes in a device's storage. Devices call this.
    pub fn new(storage: impl Any + Send + Sync, bytes: usize) -> PackedLinear {
        PackedLinear { storage: Box::new(storage), bytes }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The storage, for its device.
    ///
    /// # Panics
    /// If another device has packed the weights.
    pub fn storage<S: Any>(&self) -> &S {
        self.storage.downcast_ref().unwrap_or_else(|| panic!("{FOREIGN}"))
    }
}

impl fmt::Debug for PackedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "packed weights of {} bytes", self.bytes)
    }
}

/// A row of weights cannot be had: packing stops, and whoever gave the rows knows why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowUnavailable;

/// The weights of one or several products of the same input, one below the other.
#[derive(Clone)]
pub struct WeightMatrix<'a> {
    /// How weights are kept and multiplied.
    pub precision: Precision,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
    /// One addend for each row.
    pub bias: Option<Vec<f32>>,
    /// The rows.
    pub rows: WeightRows<'a, RowUnavailable>,
}

/// The parameters of a root-mean-square norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// One weight for each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms of the single heads of queries and keys, applied between their projection and their rotation (Qwen3, Gemma 3).
/// Each weight is as long as a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Norm of each query head.
    pub q: Norm<'a>,
    /// Norm of each key head.
    pub k: Norm<'a>,
}

/// The weights of a layer's second half, from attention's output to the next layer.
#[derive(Debug)]
pub struct LayerTail<'a> {
    /// Attention's output projection O.
    pub output: &'a PackedLinear,
    /// Norm of O's result before it joins the residual stream, in layers with norms on both sides of a branch.
    pub attention_post_norm: Option<Norm<'a>>,
    /// Norm of the MLP's input.
    pub mlp_norm: Norm<'a>,
    /// Gate and up projection, packed by [`Device::pack_gate_up`].
    pub gate_up: &'a PackedLinear,
    /// Activation of the gate.
    pub activation: Activation,
    /// Down projection.
    pub down: &'a PackedLinear,
    /// Norm of the down projection's result before it joins the residual stream.
    pub mlp_post_norm: Option<Norm<'a>>,
}

/// Cosines and sines of the positions of some tokens, `tokens × rotary_dim/2` each. Pairs are half-split: element `i` of a head
/// with element `i + rotary_dim/2`; elements past `rotary_dim` are left alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rotary<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

impl Rotary<'_> {
    /// Elements of a head that are rotated, for `tokens` tokens.
    pub fn dim(&self, tokens: usize) -> usize {
        2 * self.cos.len().checked_div(tokens).unwrap_or(0)
    }
}

/// Keys before RoPE or values of some tokens, `tokens × Hkv × d`, to be written into a cache.
#[derive(Clone, Copy, Debug)]
pub enum KvRows<'a> {
    /// In the host's memory, as a store gives them.
    Host(Slice<'a>),
    /// In the device's memory, from the token of this index on.
    Device(&'a KvBuffer, usize),
}

/// Heads of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHeads {
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
}

impl CacheHeads {
    /// Elements of one token, `Hkv·d`.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Attention of rows of queries over cached keys and values.
///
/// Row `first_row + i` of `q` sees the slots `visible[i].0 .. visible[i].1`; head `h` uses KV head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Rotated queries, rows × heads × head_dim.
    pub q: &'a Floats,
    /// The first row of `q` that attends. Its output goes to the row of the same index.
    pub first_row: usize,
    /// Rotated keys, kv_heads × capacity × head_dim.
    pub k: &'a KvBuffer,
    /// Values, kv_heads × capacity × head_dim, of the keys' type.
    pub v: &'a KvBuffer,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Slots of a KV head.
    pub capacity: usize,
    /// Half-open range of slots that each row sees: 1 <= end − start, end <= capacity. Ascending ends are the fastest
    /// order; every order is right.
    pub visible: &'a [(u32, u32)],
    /// Factor of the dot products before softmax.
    pub scale: f32,
    /// With [`Precision::F32`] a row's result does not depend on the other rows. With another precision, queries, keys,
    /// values and probabilities may be rounded to `bf16`, and fewer rows may be computed by another kernel than more. Sums
    /// are in `f32` in any case.
    pub precision: Precision,
}

impl CachedAttention<'_> {
    /// Elements of one row of queries, `H·d`.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// How far recomputed and cached rows are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// Sum of squared differences.
    L2,
    /// Sum of absolute differences.
    L1,
}

/// All that is done to tensors. Calls may be queued; those that write to the host's memory wait for what they need.
///
/// Sums are formed in `f32` at least. A result never depends on the number of threads.
///
/// # Panics
/// All methods panic if lengths or types do not fit, or a tensor is of another device.
pub trait Device: fmt::Debug + Send + Sync + 'static {
    /// Name of the kernels in use: an instruction set or a processor.
    fn name(&self) -> String;

    /// Threads of the host that share work.
    fn threads(&self) -> usize;

    /// Runs `f(0..tasks)`, each index exactly once, on the threads of the host; returns when all are done. Called from inside a
    /// task, it runs inline.
    fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync));

    /// This device, computing each row of a product as if it were alone, so that the result of a request does not depend on the
    /// requests computed with it.
    fn batch_invariant(&self) -> Arc<dyn Device>;

    /// This device for a thread that works beside the computing one, whose threads it leaves alone.
    fn beside(&self) -> Arc<dyn Device>;

    // Memory.

    /// Activations whose elements are left open.
    fn floats(&self, len: usize) -> Floats;

    /// Sets the length. What the elements are then is left open. Memory is kept.
    fn resize(&self, x: &mut Floats, len: usize);

    /// Makes `x` `rows` rows of `width` from the host's memory, each written by `row(index, buffer)`.
    fn upload_rows(&self, rows: usize, width: usize, row: &mut dyn FnMut(usize, &mut [f32]), x: &mut Floats);

    /// Copies the elements from `from` on to the host.
    fn download(&self, x: &Floats, from: usize, out: &mut [f32]);

    /// Copies elements of `x` to where `at` begins in `to`.
    fn copy(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize);

    /// out (rows.len() × width) = x\[rows\]; `out` gets its length.
    fn gather_rows(&self, x: &Floats, width: usize, rows: &[u32], out: &mut Floats);

    /// Keys or values, all zeros.
    fn kv(&self, dtype: Dtype, len: usize) -> KvBuffer;

    /// Sets the length; memory is kept, and new elements are zeros.
    fn resize_kv(&self, kv: &mut KvBuffer, len: usize);

    /// Copies elements to the host.
    fn download_kv(&self, kv: &KvBuffer, range: Range<usize>) -> Buffer;

    /// Copies elements of `kv` to where `at` begins in `to`, which is of the same type.
    fn copy_kv(&self, kv: &KvBuffer, from: Range<usize>, to: &mut KvBuffer, at: usize);

    /// Copies elements to where `to` begins in the same tensor.
    fn copy_kv_within(&self, kv: &mut KvBuffer, from: Range<usize>, to: usize);

    // Layers.

    /// Packs weights.
    ///
    /// # Errors
    /// If a row cannot be had.
    fn pack(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable>;

    /// Packs gate and up projections, the rows of the gate first: both together are `matrix`.
    ///
    /// # Errors
    /// If a row cannot be had.
    fn pack_gate_up(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable>;

    /// \[q | k | v\] = norm(x) · Wᵀ + b, then each head of q and k is normed where `heads` is given; `k` and `v`,
    /// m × `kv_width`, are rounded to their type and only grow.
    #[allow(clippy::too_many_arguments)]
    fn project_qkv(
        &self,
        x: &Floats,
        norm: Norm<'_>,
        w: &PackedLinear,
        heads: Option<HeadNorms<'_>>,
        kv_width: usize,
        q: &mut Floats,
        k: &mut KvBuffer,
        v: &mut KvBuffer,
    );

    /// For the rows `rows`, x += post(attn_out · Oᵀ + b), then x += post(down(activation(gate(norm(x))) · up(norm(x)))); a post-norm that
    /// the layer lacks is the identity.
    fn attn_output_and_mlp(
        &self,
        attn_out: &Floats,
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut Floats,
    );

    /// out (m × outputs) = norm(x) · Wᵀ, on the host, which chooses tokens.
    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &PackedLinear, out: &mut Vec<f32>);

    // Positions and caches.

    /// Rotates x (tokens × heads × head_dim) in place.
    fn rope(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>);

    /// Rotates the first `slots.len()` tokens of `rows` and writes token `t` to slot `slots[t]` of a cache, Hkv × capacity × d, of
    /// the same type. Without a rotation, as for values, elements are copied.
    ///
    /// Computes in `f32` and rounds once. Fresh and cached keys both come through here, so that equal stored values give
    /// equal bits.
    fn place(
        &self,
        rows: KvRows<'_>,
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        cache: &mut KvBuffer,
    );

    /// out (rows.len() × width) = kv\[rows\], rows of `width`.
    fn gather_kv_rows(&self, kv: &KvBuffer, width: usize, rows: &[u32]) -> KvBuffer;

    /// The slots `kept` (head after head, equally many each) of a cache of `from` slots a head, copied to the first slots of one
    /// of `to` slots. Each head becomes `copies` equal ones that keep the sets of their own.
    fn gather_slots(
        &self,
        cache: &KvBuffer,
        head_dim: usize,
        from: usize,
        kept: &[u32],
        copies: usize,
        to: usize,
    ) -> KvBuffer;

    /// Keys in the slots `slots` of every head of a cache of `capacity` slots, each rotated by its entry of `rotary`: Hkv ×
    /// slots × d.
    fn rotate_slots(
        &self,
        cache: &KvBuffer,
        heads: CacheHeads,
        capacity: usize,
        slots: &[u32],
        rotary: Rotary<'_>,
    ) -> KvBuffer;

    // Attention.

    /// out = softmax(scale · q · kᵀ) · v, of which `out` has as many rows as `q`. `lse`, resized to the same rows × heads,
    /// gets the logarithm of the softmax's sum of each row and head over the slots that it sees. Rows that do not attend are
    /// left alone in `out` and open in `lse`.
    fn attention(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>);

    /// Attention of a single row, and the weights that it gives to each slot, summed over the heads of a group;
    /// weights: kv_heads × `visible[0].1`.
    fn attention_with_weights(&self, a: &CachedAttention<'_>, out: &mut Floats, weights: &mut [f32]);

    /// Attention over two sets of keys becomes attention over their union: `other` and `other_lse` are those of the one, `out` and
    /// `lse` from entry `first` of `lse` on (rows × heads) those of the other. Any split and order gives the same; −∞ is the sum over no key.
    fn merge_attention(
        &self,
        first: usize,
        out: &mut Floats,
        lse: &mut Floats,
        other: &Floats,
        other_lse: &Floats,
    );

    // Reports to the host.

    /// Mean of the rows `rows` of `width` elements, summed in f64; zeros of no row.
    fn mean_row(&self, x: &Floats, width: usize, rows: Range<usize>) -> Vec<f32>;

    /// Distance of each row of `fresh` (`width` elements) named first in `pairs` from the row of `cached` named second.
    fn row_distances(
        &self,
        fresh: &KvBuffer,
        cached: Slice<'_>,
        width: usize,
        pairs: &[(usize, usize)],
        distance: Distance,
    ) -> Vec<f32>;

    /// Attention mass of each slot: sums (kv_heads × slots.len()), sums\[g, t\] = Σ_r Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\])
    /// over the heads h of KV head g. The softmax of a row is taken over the slots that it sees from `slots.start` on.
    fn attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]);

    /// Attention mass of each slot, as in [`Device::attention_mass`], of softmax((scale · q · k + g) / τ) with Gumbel noise g.
    fn noisy_attention_mass(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        noise: &GumbelNoise<'_>,
        sums: &mut [f32],
    );

    /// Attention mass of each slot with all heads concatenated: Σ_r softmax_t(z\[r, t\]) over the slots that a row sees,
    /// z\[r, t\] = scale · Σ_h q\[r, h\] · k\[h / group, t\] (A³, arXiv 2511.17560, equation 3); sums of the slots `slots`, beyond
    /// which no row sees.
    fn concat_attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]);

    /// Weights of each row: kv_heads × rows × slots.len(), summed over the heads of a KV head.
    fn row_weights(&self, a: &CachedAttention<'_>, slots: Range<usize>, weights: &mut [f32]);

    /// Attention mass of each slot, kv_heads × slots.len(), from the log-sum-exps of an attention, which may have counted slots
    /// that `a.visible` leaves out. Rows may see no slot. `lse` has as many rows as `a.q`.
    fn attention_mass_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: Range<usize>,
        sums: &mut [f32],
    );

    /// Weights that each row gives to some slots, slots.len() × rows, summed over all heads, from log-sum-exps as in
    /// [`Device::attention_mass_from_lse`]. Slots ascend.
    fn column_weights_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: &[u32],
        weights: &mut [f32],
    );

    /// z (rows × slots) = scale · Σ_h q\[r, h\] · k\[t\] over the first slots of one KV head: logits of queries of the host, rows ×
    /// `keys.queries` × d, with all queries of a row concatenated. No mask.
    fn concat_logits(&self, q: &[f32], keys: HeadKeys<'_>, scale: f32, z: &mut [f32]);
}

/// Keys of one head of a cache.
#[derive(Clone, Copy, Debug)]
pub struct HeadKeys<'a> {
    /// Rotated keys, kv_heads × capacity × head_dim.
    pub k: &'a KvBuffer,
    /// The KV head.
    pub head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Slots of a head.
    pub capacity: usize,
    /// Query heads of a row.
    pub queries: usize,
}

/// Runs `f` on each of the items, as [`Device::parallel`] runs tasks.
pub fn parallel_each<T: Send>(device: &dyn Device, items: &mut [T], f: &(dyn Fn(usize, &mut T) + Sync)) {
    let items: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
    device.parallel(items.len(), &|i| f(i, &mut items[i].lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Activations of a device from the host's memory, in one row.
pub fn upload(device: &dyn Device, values: &[f32]) -> Floats {
    let mut x = device.floats(0);
    if !values.is_empty() {
        device.upload_rows(1, values.len(), &mut |_, row| row.copy_from_slice(values), &mut x);
    }
    x
}

/// Keys or values of a device from the host's memory.
pub fn upload_kv(device: &dyn Device, values: Slice<'_>) -> KvBuffer {
    let mut kv = device.kv(values.dtype(), values.len());
    let heads = CacheHeads { kv_heads: 1, head_dim: values.len() };
    if !values.is_empty() {
        device.place(KvRows::Host(values), heads, Rotary::default(), &[0], &mut kv);
    }
    kv
}
