//! Bytes of the host that do not change, and what a device has done to read them by itself.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::buffer::{Dtype, Slice};

/// Bytes of the host that do not change. Clones share them.
///
/// A device that has memory of its own copies from the host's by itself only where that is pinned: the system leaves it where it is
/// ([`Device::pin`](crate::Device::pin)). Bytes stay pinned until the last clone is gone, so that a device that has one may still be copying.
#[derive(Clone, Default)]
pub struct HostBytes(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// A guard, none where the bytes could not be pinned. Dropping it unpins them, and it is dropped before them, as it stands before them.
    pin: OnceLock<Option<Box<dyn Any + Send + Sync>>>,
    bytes: Bytes,
}

impl HostBytes {
    /// Bytes that are not pinned.
    pub fn new(bytes: Bytes) -> HostBytes {
        HostBytes(Arc::new(Inner { pin: OnceLock::new(), bytes }))
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.0.bytes
    }

    /// Whether the bytes are pinned.
    pub fn is_pinned(&self) -> bool {
        matches!(self.0.pin.get(), Some(Some(_)))
    }

    /// Pins the bytes, unless that was tried before: `pin` returns what unpins them when it is dropped; none if they cannot be pinned.
    pub fn pin_by(&self, pin: impl FnOnce(&[u8]) -> Option<Box<dyn Any + Send + Sync>>) {
        self.0.pin.get_or_init(|| pin(&self.0.bytes));
    }

    /// The bytes, unpinned; none if there are other clones.
    pub fn into_bytes(self) -> Option<Bytes> {
        Arc::into_inner(self.0).map(|inner| {
            drop(inner.pin);
            inner.bytes
        })
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pinned = if self.is_pinned() { ", pinned" } else { "" };
        write!(f, "{} bytes{pinned}", self.0.bytes.len())
    }
}

/// Elements that lie in bytes of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostSlice<'a> {
    bytes: &'a HostBytes,
    slice: Slice<'a>,
}

impl<'a> HostSlice<'a> {
    /// The elements in a range of bytes; none if they are no whole elements, or not aligned.
    ///
    /// # Panics
    /// If the range lies outside of the bytes.
    pub fn new(bytes: &'a HostBytes, dtype: Dtype, range: Range<usize>) -> Option<HostSlice<'a>> {
        let slice = Slice::from_bytes(dtype, &bytes.as_slice()[range]).ok()?;
        Some(HostSlice { bytes, slice })
    }

    /// All bytes, of which the elements are a part.
    pub fn bytes(&self) -> &'a HostBytes {
        self.bytes
    }

    /// The elements.
    pub fn slice(&self) -> Slice<'a> {
        self.slice
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    struct Unpin(Arc<AtomicUsize>);

    impl Drop for Unpin {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn bytes_are_pinned_once_and_until_the_last_clone_is_gone() {
        let unpinned = Arc::new(AtomicUsize::new(0));
        let bytes = HostBytes::new(Bytes::from_static(b"keys"));
        assert!(!bytes.is_pinned());
        bytes.pin_by(|bytes| {
            assert_eq!(bytes, b"keys");
            Some(Box::new(Unpin(unpinned.clone())))
        });
        bytes.pin_by(|_| panic!("they are pinned"));
        let copying = bytes.clone();
        assert!(copying.is_pinned());
        assert!(bytes.into_bytes().is_none(), "there is another clone");
        assert_eq!((copying.as_slice(), unpinned.load(SeqCst)), (&b"keys"[..], 0));
        assert_eq!(copying.into_bytes().unwrap(), &b"keys"[..]);
        assert_eq!(unpinned.load(SeqCst), 1);
    }

    #[test]
    fn bytes_that_cannot_be_pinned_are_not_tried_again() {
        let bytes = HostBytes::default();
        bytes.pin_by(|_| None);
        bytes.pin_by(|_| panic!("it was tried"));
        assert!(!bytes.is_pinned());
    }
}
