//! The device interface: all that is ever done to a tensor, over storage that only its device can look into.
//!
//! A device is one object behind `dyn Device`, so that engine, methods and policies are compiled once for all devices. Tensors
//! ([`Floats`], [`KvBuffer`], [`PackedLinear`]) hold storage of their device, of which the host knows the length alone; what
//! the host is to see comes out of a method as a vector of the host's.

mod failure;
mod inputs;
mod tensors;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Precision;
use crate::attention::GumbelNoise;
use crate::buffer::{Dtype, HostElements, Slice};
use crate::host_bytes::{HostBytes, HostSlice};
use crate::isa::Isa;
use crate::linear::PackedPanels;

pub use failure::DeviceFailure;
pub use inputs::{
    CacheHeads, CachedAttention, DeviceMemory, Distance, Experts, FillRow, GatedMlp, HeadKeys, KvRows,
    LayerTail, Mlp, Norm, QkNorms, Rotary, RowUnavailable, TableEntries, TableNumber, WeightAggregation,
    WeightMatrix,
};
pub use tensors::{Floats, KvBuffer, PackedLinear, Storage};

/// Rows that a device with memory of its own takes at most through a product of a layer at a time: they bound the memory of what lies between
/// a layer's steps.
pub const MAX_BLOCK_ROWS: usize = 8192;

/// All that is done to tensors. Calls may be queued; those that write to the host's memory wait for what they need.
///
/// Sums are formed in `f32` at least. A result never depends on the number of threads.
///
/// # Panics
/// All methods panic if lengths or types do not fit, or a tensor is of another device. A call that a device cannot do, for want of memory
/// or since an operation has failed, unwinds with a [`DeviceFailure`].
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

    /// Rows of a prompt that go through a layer's steps together: enough for all threads, and few where queries have many elements (`width`).
    fn rows_together(&self, width: usize) -> usize;

    /// Most elements of a head that attention takes.
    fn most_head_dim(&self) -> usize {
        usize::MAX
    }

    /// Precision of the weights that methods and policies ask for, beside attention of another: `f32`, unless that were slow.
    fn weights_precision(&self, _attention: Precision) -> Precision {
        Precision::F32
    }

    /// This device for a thread that works beside the computing one, whose threads it leaves alone. Its tensors are those of this device: a
    /// call on a tensor comes after the calls before it on the same tensor, of either.
    fn beside(&self) -> Arc<dyn Device>;

    /// Waits until the calls made here are done; those of a device beside this one are not waited for.
    fn wait(&self) {}

    // Memory.

    /// The device's own memory as it is now; none for a device that computes in the host's. Such a device keeps what is freed in a pool of
    /// its own, which counts as free.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// The failure by which this device computes no more, if there was one. The call waits for nothing.
    fn failure(&self) -> Option<DeviceFailure> {
        None
    }

    /// Activations whose elements are left open.
    fn floats(&self, len: usize) -> Floats;

    /// Sets the length. What the elements are then is left open. Memory is kept.
    fn resize(&self, x: &mut Floats, len: usize);

    /// Makes `x` `rows` rows of `width` from the host's memory, each written by `row(index, buffer)`, in any order.
    fn upload_rows(&self, rows: usize, width: usize, row: &FillRow<'_>, x: &mut Floats);

    /// Copies the elements from `from` on to the host.
    fn download(&self, x: &Floats, from: usize, out: &mut [f32]);

    /// Copies elements of `x` to where `at` begins in `to`.
    fn copy(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize);

    /// out (rows.len() × width) = x\[rows\]; `out` gets its length.
    fn gather_rows(&self, x: &Floats, width: usize, rows: &[u32], out: &mut Floats);

    /// Keys or values, all zeros.
    fn kv(&self, dtype: Dtype, len: usize) -> KvBuffer;

    /// Keys or values from the host's memory.
    fn upload_kv(&self, values: Slice<'_>) -> KvBuffer {
        let mut kv = self.kv(values.dtype(), values.len());
        let heads = CacheHeads { kv_heads: 1, head_dim: values.len() };
        if !values.is_empty() {
            self.place(KvRows::Host(values), heads, Rotary::default(), &[0], &mut kv);
        }
        kv
    }

    /// Has the device copy from these bytes by itself from now on, where it has memory of its own and the system lets it.
    fn pin(&self, _bytes: &HostBytes) {}

    /// Keys or values of parts of one type, one behind the other, which the device copies by itself; none where a part is not pinned, or the
    /// device has no memory of its own.
    fn upload_pinned_kv(&self, _parts: &[HostSlice<'_>]) -> Option<KvBuffer> {
        None
    }

    /// Sets the length; memory is kept, and new elements are zeros.
    fn resize_kv(&self, kv: &mut KvBuffer, len: usize);

    /// Elements in the host's memory: a copy, unless the tensor lies there.
    fn download_kv<'a>(&self, kv: &'a KvBuffer, range: Range<usize>) -> HostElements<'a>;

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

    /// Bytes of the device's own memory that packing takes; 0 for a device that computes in the host's.
    fn packed_bytes(&self, _matrix: &WeightMatrix<'_>) -> usize {
        0
    }

    /// Name of the layout of [`Device::packed_panels`], which is another where packed bits may be others. None for a device whose packed
    /// weights nobody else can use.
    fn packed_layout(&self) -> Option<&'static str> {
        None
    }

    /// The words of packed weights, from which [`Device::pack`] makes them again; none without a [`Device::packed_layout`].
    fn packed_panels<'a>(&self, _weights: &'a PackedLinear) -> Option<PackedPanels<'a>> {
        None
    }

    /// x (rows × inputs) = scale · rows `ids` of packed weights. False, and nothing is done, where the device does not look rows up.
    fn embed(&self, _table: &PackedLinear, _ids: &[u32], _scale: f32, _x: &mut Floats) -> bool {
        false
    }

    /// Tells that the product with these weights is the next but one. A device may begin to read them while it waits.
    fn expect_product(&self, _weights: &PackedLinear) {}

    /// \[q | k | v\] = norm(x) · Wᵀ + b for the m rows `rows` of x, of x itself where `norm` is none; then q and k are normed where `qk_norms`
    /// are given. `q` gets m rows. `k` and `v`, m × `kv_width`, are rounded to their type and only grow.
    #[allow(clippy::too_many_arguments)]
    fn project_qkv(
        &self,
        x: &Floats,
        rows: Range<usize>,
        norm: Option<Norm<'_>>,
        w: &PackedLinear,
        qk_norms: Option<QkNorms<'_>>,
        kv_width: usize,
        q: &mut Floats,
        k: &mut KvBuffer,
        v: &mut KvBuffer,
    );

    /// For the rows `rows` of x, x += post(attn_out · Oᵀ + b), then x += post(mlp(norm(x))); a norm that the layer lacks is the identity.
    /// `attn_out` is a tensor and the row of it that belongs to the first of `rows`.
    fn attn_output_and_mlp(
        &self,
        attn_out: (&Floats, usize),
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut Floats,
    );

    /// out (m × outputs) = norm(x) · Wᵀ, on the host, which chooses tokens.
    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &PackedLinear, out: &mut Vec<f32>);

    // Positions and caches.

    /// Rotates x (tokens × heads × head_dim) in place.
    fn rope(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>);

    /// Rotates tokens of `rows`, as many as `slots`, and writes token `t` to slot `slots[t]` of a cache, Hkv × capacity × d, of
    /// the same type. Without a rotation, as for values, elements are copied. Rows of the host hold these tokens and no others.
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

    /// [`Device::rope`] of `queries`, tokens × heads × head_dim with their number of heads, where there are any, and [`Device::place`] of the
    /// tokens' keys, rotated, and values, as they are, each in its cache.
    fn rope_and_place(
        &self,
        queries: Option<(&mut Floats, usize)>,
        (k, v): (KvRows<'_>, KvRows<'_>),
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        (k_cache, v_cache): (&mut KvBuffer, &mut KvBuffer),
    ) {
        if let Some((q, q_heads)) = queries {
            self.rope(q, q_heads, heads.head_dim, rotary);
        }
        self.place(k, heads, rotary, slots, k_cache);
        self.place(v, heads, Rotary::default(), slots, v_cache);
    }

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

    /// For each group of pairs `(row, slot)`, Σ of row `row` of `fresh` (rows of Hkv × d, not rotated) minus what stands in `slot` of a
    /// cache, Hkv × capacity × d, whose rotation by the row's entry of `rotary` is undone. Without a rotation, as for values, nothing is
    /// undone. groups × Hkv × d; zeros of no pair. `fresh` is a tensor and the number of its first rows that `rotary` has entries of.
    fn sum_changes(
        &self,
        fresh: (&KvBuffer, usize),
        cache: &KvBuffer,
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32>;

    /// Adds a row of the host (spans × Hkv × d), rotated by each slot's entry of `rotary`, to the slots of its span of a cache, Hkv ×
    /// capacity × d. `rotary` has an entry for each slot below the end of the last span; without a rotation, as for values, rows are
    /// added as they are. Spans ascend and are apart.
    fn add_rows(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut KvBuffer,
    );

    // Attention.

    /// out = softmax(scale · q · kᵀ) · v, of which `out` has as many rows as `q`. `lse`, resized to the same rows × heads,
    /// gets the logarithm of the softmax's sum of each row and head over the slots that it sees. Rows that do not attend are
    /// left alone in `out`, and in an `lse` that has this length already; otherwise they are open there.
    fn attention(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>);

    /// [`Device::attention`], and the attention mass of each of the first slots, beyond which no row sees, added to `sums`, kv_heads × slots:
    /// sums\[g, t\] gets Σ_r Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\]) over the heads h of KV head g, with `noise` those of
    /// [`Device::noisy_attention_mass`]. A device with a kernel for both spares the scores' second computation.
    fn attention_with_mass(
        &self,
        a: &CachedAttention<'_>,
        out: &mut Floats,
        lse: &mut Floats,
        noise: Option<&GumbelNoise<'_>>,
        sums: &mut [f32],
    ) {
        self.attention(a, out, Some(lse));
        let (slots, mut more) = (0..sums.len() / a.kv_heads, vec![0.0; sums.len()]);
        match noise {
            Some(noise) => self.noisy_attention_mass(a, slots, noise, &mut more),
            None => self.attention_mass_from_lse(a, lse, slots, &mut more),
        }
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }

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

    /// One score of each slot, slots.len(), from the weights of each row ([`Device::row_weights`]).
    fn aggregated_weights(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        aggregation: WeightAggregation,
        scores: &mut [f32],
    ) {
        assert_eq!(scores.len(), slots.len(), "one score for each slot");
        let weigh =
            |a: &CachedAttention<'_>, weights: &mut [f32]| self.row_weights(a, slots.clone(), weights);
        aggregation.aggregate(a, inputs::HELD_WEIGHTS, weigh, scores);
    }

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

/// The instruction set of the host's kernels, and the name of the device where it is another processor than the CPU.
pub fn processors(device: &dyn Device) -> (String, Option<String>) {
    let name = device.name();
    match name.parse::<Isa>() {
        Ok(_) => (name, None),
        Err(_) => (Isa::selected().map_or_else(|_| String::new(), |isa| isa.to_string()), Some(name)),
    }
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
        device.upload_rows(1, values.len(), &|_, row| row.copy_from_slice(values), &mut x);
    }
    x
}

/// All elements, in the host's memory.
pub fn download(device: &dyn Device, x: &Floats) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    device.download(x, 0, &mut out);
    out
}

/// Makes `to` a copy of the elements `from` of `x`.
pub fn copy_range(device: &dyn Device, x: &Floats, from: Range<usize>, to: &mut Floats) {
    device.resize(to, from.len());
    device.copy(x, from, to, 0);
}

#[cfg(test)]
mod tests;
