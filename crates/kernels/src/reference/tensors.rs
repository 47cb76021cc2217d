//! Tensors of the reference device.

use crate::buffer::{Buffer, Dtype, Slice};
use crate::device::{Floats, KvBuffer};

/// Numbers, back to front.
#[derive(Clone)]
pub(super) struct Back(pub(super) Vec<f32>);

impl Back {
    pub(super) fn of(values: &[f32]) -> Back {
        Back(values.iter().rev().copied().collect())
    }

    pub(super) fn values(&self) -> Vec<f32> {
        self.0.iter().rev().copied().collect()
    }
}

pub(super) fn values(x: &Floats) -> Vec<f32> {
    x.storage::<Back>().values()
}

pub(super) fn set(x: &mut Floats, values: &[f32]) {
    let (storage, len) = x.storage_mut::<Back>();
    (*storage, *len) = (Back::of(values), values.len());
}

pub(super) fn kv_values(kv: &KvBuffer) -> Vec<f32> {
    kv.storage::<Back>().values()
}

/// Rounds the values to the tensor's type.
pub(super) fn set_kv(kv: &mut KvBuffer, values: &[f32]) {
    let values = rounded(kv.dtype(), values);
    *kv.storage_mut::<Back>() = Back::of(&values);
    kv.set_len(values.len(), values.len());
}

pub(super) fn new_kv(dtype: Dtype, values: &[f32]) -> KvBuffer {
    let values = rounded(dtype, values);
    KvBuffer::new(Back::of(&values), dtype, values.len(), values.len())
}

pub(super) fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    let mut buffer = Buffer::zeros(dtype, values.len());
    buffer.write_f32(0, values);
    floats_of(buffer.as_slice())
}

pub(super) fn floats_of(slice: Slice<'_>) -> Vec<f32> {
    (0..slice.len()).map(|i| slice.get(i)).collect()
}
