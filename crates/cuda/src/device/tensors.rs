//! Tensors in a GPU's memory, and copies of them.

use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

use refrain_kernels::{Buffer, Dtype, FillRow, Floats, HostSlice, KvBuffer, Rotary, parallel_each};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::size;
use super::uploads::{Content, LONGEST, Uploads};
use crate::driver::{Arg, Driver};

/// Bytes that a thread of the host copies at a time.
const COPIED: usize = 128 << 10;

/// Bytes from the cosines of a table to its sines.
pub(super) fn table_stride(elements: usize) -> usize {
    (4 * elements).next_multiple_of(16)
}

impl<D: Driver> CudaDevice<D> {
    /// Memory whose content is left open.
    pub(super) fn block(&self, bytes: usize) -> Block<D> {
        let memory = (bytes > 0).then(|| self.alloc(bytes));
        Block { home: self.home.clone(), memory, bytes }
    }

    /// Memory that holds these numbers.
    pub(super) fn block_of<T: bytemuck::NoUninit>(&self, numbers: &[T]) -> Block<D> {
        let block = self.block(size_of_val(numbers));
        self.write(&block, 0, bytemuck::cast_slice(numbers));
        block
    }

    pub(super) fn write(&self, block: &Block<D>, at: usize, from: &[u8]) {
        if let (Some(memory), false) = (&block.memory, from.is_empty()) {
            self.driver.write_with(memory, at, from.len(), 1, &mut |first, to| {
                self.fill(to, COPIED, &|at, to| to.copy_from_slice(&from[first + at..][..to.len()]));
            });
        }
    }

    /// Memory that holds parts of as many bytes each, which come in one copy, and the bytes from one part to the next, a multiple of 16.
    pub(super) fn block_of_parts(&self, parts: &[&[u8]]) -> (Block<D>, usize) {
        let stride = parts.iter().map(|part| part.len()).max().unwrap_or(0).next_multiple_of(16);
        let block = self.block(stride * parts.len());
        if let Some(memory) = &block.memory {
            self.driver.write_with(memory, 0, block.bytes, 1, &mut |first, to| {
                self.fill(to, COPIED, &|at, mut to| {
                    let mut at = first + at;
                    while !to.is_empty() {
                        let (part, begin) = (parts[at / stride], at % stride);
                        let (own, rest) = to.split_at_mut(to.len().min(stride - begin));
                        let from = &part[begin.min(part.len())..(begin + own.len()).min(part.len())];
                        own[..from.len()].copy_from_slice(from);
                        (at, to) = (at + own.len(), rest);
                    }
                });
            });
        }
        (block, stride)
    }

    /// Keys or values of parts of pinned bytes; none where some are not pinned.
    pub(super) fn pinned_kv(&self, parts: &[HostSlice<'_>]) -> Option<KvBuffer> {
        let dtype = parts.first()?.slice().dtype();
        assert!(parts.iter().all(|part| part.slice().dtype() == dtype), "parts are of one type");
        if !parts.iter().all(|part| part.bytes().is_pinned()) {
            return None;
        }
        let kv = self.open_kv(dtype, parts.iter().map(|part| part.slice().len()).sum());
        if let Some(memory) = &kv_block::<D>(&kv).memory {
            self.driver.write_pinned(memory, parts);
        }
        Some(kv)
    }

    /// Has the threads of the host write parts of `bytes` bytes, each from the byte on that it is told.
    fn fill(&self, to: &mut [u8], bytes: usize, part: &(dyn Fn(usize, &mut [u8]) + Sync)) {
        if to.len() <= bytes {
            return part(0, to);
        }
        let mut parts: Vec<&mut [u8]> = to.chunks_mut(bytes).collect();
        parallel_each(self, &mut parts, &|i, to| part(i * bytes, to));
    }

    /// Makes `x` rows of the host, written by `row`, several at a time.
    pub(super) fn write_rows(&self, rows: usize, width: usize, row: &FillRow<'_>, x: &mut Floats) {
        let (block, unit) = (self.resized(x, rows * width), 4 * width);
        let Some(memory) = block.memory.as_ref().filter(|_| rows * width > 0) else { return };
        self.driver.write_with(memory, 0, rows * unit, unit, &mut |first, to| {
            self.fill(to, COPIED.next_multiple_of(unit), &|at, to| {
                let to = bytemuck::cast_slice_mut(to).chunks_exact_mut(width);
                to.zip((first + at) / unit..).for_each(|(to, index)| row(index, to));
            });
        });
    }

    pub(super) fn zero(&self, block: &Block<D>, at: usize, bytes: usize) {
        if let (Some(memory), true) = (&block.memory, bytes > 0) {
            self.driver.zero(memory, at, bytes);
        }
    }

    /// Copies numbers from a byte on to the host, when all before is done.
    ///
    /// # Panics
    /// With a [`DeviceFailure`](refrain_kernels::DeviceFailure) if that has failed.
    pub(super) fn read<T: bytemuck::Pod>(&self, block: &Block<D>, at: usize, to: &mut [T]) {
        let Some(memory) = block.memory.as_ref().filter(|_| !to.is_empty()) else { return };
        let bytes = size_of_val(to);
        let done = self.driver.read(memory, at, bytemuck::cast_slice_mut(to));
        done.unwrap_or_else(|error| self.broken(&format!("reading {bytes} bytes"), &error).unwind());
    }

    /// All numbers of a block, when all before is done.
    ///
    /// # Panics
    /// With a [`DeviceFailure`](refrain_kernels::DeviceFailure) if that has failed.
    pub(super) fn read_floats(&self, block: &Block<D>) -> Vec<f32> {
        let mut out = vec![0.0; block.bytes() / 4];
        self.read(block, 0, &mut out);
        out
    }

    fn copy_bytes(&self, from: &Block<D>, range: Range<usize>, to: &Block<D>, at: usize) {
        assert!(range.end <= from.bytes && at + range.len() <= to.bytes, "copies lie inside of tensors");
        if let (Some(from), Some(to), false) = (&from.memory, &to.memory, range.is_empty()) {
            self.driver.copy(from, range.start, to, at, range.len());
        }
    }

    // Uploads that are kept.

    pub(super) fn uploads(&self) -> MutexGuard<'_, Uploads<D>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared_tables(&self) -> MutexGuard<'_, Uploads<D>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of uploads that are kept.
    pub(super) fn uploaded_bytes(&self) -> usize {
        self.uploads().bytes() + self.shared_tables().bytes()
    }

    /// Gives the memory of uploads back.
    pub(super) fn clear_uploads(&self) {
        self.uploads().clear();
        self.shared_tables().clear();
    }

    /// An array in the GPU's memory.
    pub(super) fn kept_block_of<T: bytemuck::NoUninit>(&self, numbers: &[T]) -> Arc<Block<D>> {
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        if bytes.len() > LONGEST {
            return Arc::new(self.block_of(bytes));
        }
        let found =
            self.uploads().find(|content| matches!(content, Content::Bytes(kept) if **kept == *bytes));
        found.unwrap_or_else(|| {
            let block = Arc::new(self.block_of(bytes));
            self.uploads().keep(Content::Bytes(bytes.into()), &block);
            block
        })
    }

    /// Cosines, and [`table_stride`] further on sines.
    pub(super) fn table_of(&self, rotary: Rotary<'_>) -> Arc<Block<D>> {
        let Rotary { cos, sin, entries } = rotary;
        let (stride, bytes) = (table_stride(cos.len()), 4 * sin.len());
        let open = || Arc::new(self.block(if cos.is_empty() { 0 } else { stride + bytes }));
        let write = |block: &Block<D>| {
            self.write(block, 0, bytemuck::cast_slice(cos));
            self.write(block, stride, bytemuck::cast_slice(sin));
        };
        let Some(content) = entries.map(|entries| Content::Entries(entries, cos.len())) else {
            let block = open();
            write(&block);
            return block;
        };
        if let Some(found) = self.shared_tables().find(|kept| *kept == content) {
            return found;
        }
        let block = open();
        // No other queue copies it meanwhile, or uses it before it is written.
        let mut tables = self.shared_tables();
        if let Some(found) = tables.find(|kept| *kept == content) {
            return found;
        }
        write(&block);
        tables.keep(content, &block);
        block
    }

    // Activations.

    pub(super) fn new_floats(&self, len: usize) -> Floats {
        Floats::new(self.block(4 * len), len)
    }

    /// The storage, made `len` long. Elements are left open unless it has been the length already.
    pub(super) fn resized<'x>(&self, x: &'x mut Floats, len: usize) -> &'x Block<D> {
        let (block, x_len) = x.storage_mut::<Block<D>>();
        if block.bytes < 4 * len {
            *block = self.block(4 * len);
        }
        *x_len = len;
        block
    }

    pub(super) fn copy_floats(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize) {
        assert!(from.end <= x.len() && at + from.len() <= to.len(), "copies lie inside of tensors");
        let bytes = 4 * from.start..4 * from.end;
        self.copy_bytes(floats(x), bytes, floats(to), 4 * at);
    }

    /// Gathers `count` rows of `width` elements of some bytes: from, indices of rows, to. The first is a whole tensor, or begins at a row of one.
    pub(super) fn gather(&self, args: [Arg<'_, D::Memory>; 3], count: usize, width: usize, element: usize) {
        let (kernel, width) = match (width * element, element) {
            (bytes, _) if bytes.is_multiple_of(16) => ("gather_rows_128", bytes / 16),
            (_, 2) => ("gather_rows_16", width),
            _ => ("gather_rows_32", width),
        };
        let [from, rows, to] = args;
        self.launch_each(kernel, count * width, &[from, rows, to, size(count), size(width)]);
    }

    // Keys and values.

    /// Keys or values whose elements are left open.
    pub(super) fn open_kv(&self, dtype: Dtype, len: usize) -> KvBuffer {
        KvBuffer::new(self.block(len * dtype.size()), dtype, len, len)
    }

    pub(super) fn zeroed_kv(&self, dtype: Dtype, len: usize) -> KvBuffer {
        let kv = self.open_kv(dtype, len);
        self.zero(kv_block(&kv), 0, len * dtype.size());
        kv
    }

    pub(super) fn set_kv_len(&self, kv: &mut KvBuffer, len: usize) {
        let (old, size) = (kv.len(), kv.dtype().size());
        if len > kv.capacity() {
            let grown = self.block(len * size);
            self.copy_bytes(kv_block(kv), 0..old * size, &grown, 0);
            *kv.storage_mut::<Block<D>>() = grown;
        }
        if len > old {
            self.zero(kv_block(kv), old * size, (len - old) * size);
        }
        let capacity = kv_block::<D>(kv).bytes / size;
        kv.set_len(len, capacity);
    }

    pub(super) fn read_kv(&self, kv: &KvBuffer, range: Range<usize>) -> Buffer {
        assert!(range.end <= kv.len(), "elements lie inside of the tensor");
        let mut buffer = Buffer::zeros(kv.dtype(), range.len());
        let (block, at) = (kv_block(kv), range.start * kv.dtype().size());
        match &mut buffer {
            Buffer::F32(to) => self.read(block, at, to),
            Buffer::F16(to) => self.read(block, at, to),
            Buffer::Bf16(to) => self.read(block, at, to),
        }
        buffer
    }

    pub(super) fn copy_kv_elements(&self, kv: &KvBuffer, from: Range<usize>, to: &mut KvBuffer, at: usize) {
        assert_eq!(kv.dtype(), to.dtype(), "keys and values are copied to those of their type");
        assert!(from.end <= kv.len() && at + from.len() <= to.len(), "copies lie inside of tensors");
        let size = kv.dtype().size();
        self.copy_bytes(kv_block(kv), from.start * size..from.end * size, kv_block(to), at * size);
    }

    pub(super) fn move_kv_elements(&self, kv: &mut KvBuffer, from: Range<usize>, to: usize) {
        assert!(from.end <= kv.len() && to + from.len() <= kv.len(), "copies lie inside of the tensor");
        let size = kv.dtype().size();
        let (block, bytes) = (kv_block(kv), from.start * size..from.end * size);
        if from.start.abs_diff(to) >= from.len() {
            return self.copy_bytes(block, bytes, block, to * size);
        }
        // Places that overlap go by way of a third.
        let between = self.block(bytes.len());
        self.copy_bytes(block, bytes.clone(), &between, 0);
        self.copy_bytes(&between, 0..bytes.len(), block, to * size);
    }
}

pub(super) fn floats<D: Driver>(x: &Floats) -> &Block<D> {
    x.storage()
}

pub(super) fn kv_block<D: Driver>(kv: &KvBuffer) -> &Block<D> {
    kv.storage()
}
