//! Tensors in a device's memory.

use std::any::Any;
use std::fmt;

use crate::buffer::Dtype;

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
    /// If another device has made the tensor.
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
    /// If another device has made the tensor.
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
