//! Memory of the host that is pinned where it lies: CUDA calls it registered.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;

/// Bytes of a page. The system pins whole ones, and none twice: bytes that begin inside of one may share it with others that are pinned.
const PAGE: usize = 4096;

/// Pinned memory of the host, until this value is dropped.
#[derive(Debug)]
pub(super) struct Registered {
    context: Arc<Context>,
    at: *mut c_void,
}

// SAFETY: memory may be unpinned by any thread.
unsafe impl Send for Registered {}
// SAFETY: nothing is done with a shared reference.
unsafe impl Sync for Registered {}

impl Registered {
    /// Pins bytes for all contexts; none if they do not begin at a page, or cannot be pinned. They have to outlive this value.
    pub(super) fn new(context: &Arc<Context>, bytes: &[u8]) -> Option<Registered> {
        let at = bytes.as_ptr();
        if bytes.is_empty() || !at.addr().is_multiple_of(PAGE) {
            return None;
        }
        let _bound = context.bind().ok()?;
        let at = at.cast_mut().cast();
        // SAFETY: the bytes are readable; the GPU writes to none of them.
        unsafe { sys::cuMemHostRegister_v2(at, bytes.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) }
            .result()
            .ok()?;
        Some(Registered { context: context.clone(), at })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // An error has no receiver: it is one of work that was queued before.
        let _bound = self.context.bind();
        // SAFETY: it was pinned by `new`, and no copy from it is under way: a stream holds the bytes, which hold this value.
        let _ = unsafe { sys::cuMemHostUnregister(self.at) };
    }
}
