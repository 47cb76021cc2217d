//! The CPU's tensors as slices.

use crate::attention::{Attention, AttentionOutputs, GumbelNoise};
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::device::{CachedAttention, Floats, KvBuffer, PackedLinear};
use crate::floats::CpuFloats;
use crate::linear::Linear;

pub(crate) fn floats(x: &Floats) -> &CpuFloats {
    x.storage()
}

/// The storage, made `len` long.
pub(crate) fn resized(x: &mut Floats, len: usize) -> &mut CpuFloats {
    let (storage, x_len) = x.storage_mut::<CpuFloats>();
    storage.resize(len);
    *x_len = len;
    storage
}

pub(crate) fn floats_mut(x: &mut Floats) -> &mut CpuFloats {
    x.storage_mut().0
}

pub(crate) fn buffer(kv: &KvBuffer) -> &Buffer {
    kv.storage()
}

pub(crate) fn buffer_mut(kv: &mut KvBuffer) -> &mut Buffer {
    kv.storage_mut()
}

pub(crate) fn kv_buffer(buffer: Buffer) -> KvBuffer {
    let (dtype, len, capacity) = (buffer.dtype(), buffer.len(), buffer.capacity());
    KvBuffer::new(buffer, dtype, len, capacity)
}

pub(crate) fn linear(w: &PackedLinear) -> &Linear {
    w.storage()
}

/// The rows that attend, on slices.
pub(crate) fn slices<'a>(a: &CachedAttention<'a>) -> Attention<'a> {
    let CachedAttention { heads, kv_heads, head_dim, capacity, visible, scale, precision, .. } = *a;
    let q = &floats(a.q)[a.first_row * a.width()..(a.first_row + visible.len()) * a.width()];
    let (k, v) = (buffer(a.k).as_slice(), buffer(a.v).as_slice());
    Attention { q, k, v, heads, kv_heads, head_dim, capacity, visible, scale, precision }
}

/// Entries of the rows that attend, among those of all rows of `a.q`.
pub(crate) fn rows_of<'l>(a: &CachedAttention<'_>, lse: &'l Floats) -> &'l [f32] {
    &floats(lse)[a.first_row * a.heads..(a.first_row + a.visible.len()) * a.heads]
}

/// [`Device::attention`](crate::Device::attention), with the sums of [`Device::attention_with_mass`](crate::Device::attention_with_mass) and
/// their noise if they are wanted.
pub(crate) fn attend(
    cpu: &Cpu,
    a: &CachedAttention<'_>,
    out: &mut Floats,
    lse: Option<&mut Floats>,
    (mass, noise): (Option<&mut [f32]>, Option<&GumbelNoise<'_>>),
) {
    assert_eq!(out.len(), a.q.len(), "out has the rows of q");
    let rows = a.first_row..a.first_row + a.visible.len();
    let out = &mut floats_mut(out)[rows.start * a.width()..rows.end * a.width()];
    let lse = lse.map(|lse| {
        let all = resized(lse, a.q.len() / a.width() * a.heads);
        &mut all[rows.start * a.heads..rows.end * a.heads]
    });
    cpu.attention_with_outputs(&slices(a), out, AttentionOutputs { lse, mass, noise });
}
