//! A GPU's context, its memory pool, and the first error of its calls.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, ctx, device, mem_get_info, mem_pool, primary_ctx};
use cudarc::driver::sys;

use super::call::{Describe, error};
use crate::driver::DriverError;

/// The context of a GPU, which all users of CUDA in a process share, and a pool of memory of our own.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pool: sys::CUmemoryPool,
    failed: Mutex<Option<DriverError>>,
}

/// A context's time as that of the calling thread; then the one before, of another user of CUDA in the process, is that again.
#[derive(Debug)]
pub(super) struct Bound {
    replaced: Option<sys::CUcontext>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(before) = self.replaced {
            // SAFETY: the context was the thread's when it was replaced; an error has no receiver.
            let _ = unsafe { ctx::set_current(before) };
        }
    }
}

/// The way in which an allocation meets a pool that has no memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// All streams are waited for, so that what they are about to free is there.
    Waits,
    /// The allocation fails at once.
    Refuses,
}

// SAFETY: handles of the driver may be used by any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context of a GPU current, and a pool of its memory that gives nothing back to the system before it ends.
    pub(super) fn open(device: sys::CUdevice) -> Result<Context, DriverError> {
        // SAFETY: the driver has been asked for the device.
        let context = unsafe { primary_ctx::retain(device) }.describe("opening the GPU")?;
        let mut opened = Context { device, context, pool: ptr::null_mut(), failed: Mutex::default() };
        let _bound = opened.bind()?;
        opened.pool = pool(device)?;
        Ok(opened)
    }

    /// Makes this the context of the calling thread, as every call needs, until the value that is returned is dropped. A thread that had none
    /// keeps it, so that threads of our own enter it once.
    pub(super) fn bind(&self) -> Result<Bound, DriverError> {
        let what = "entering the GPU's context";
        let current = ctx::get_current().describe(what)?;
        if current == Some(self.context) {
            return Ok(Bound { replaced: None });
        }
        // SAFETY: the context lives until this value is dropped.
        unsafe { ctx::set_current(self.context) }.describe(what)?;
        Ok(Bound { replaced: current })
    }

    /// Runs a call in the context. If it fails and no call has before, its error is kept.
    pub(super) fn run(&self, call: impl FnOnce() -> Result<(), DriverError>) {
        if let Err(error) = self.bind().and_then(|_bound| call()) {
            self.keep(error);
        }
    }

    /// Keeps the error of a call unless an earlier one is kept; returns the one that is.
    pub(super) fn keep(&self, error: DriverError) -> DriverError {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error).clone()
    }

    /// The first error of any call.
    pub(super) fn check(&self) -> Result<(), DriverError> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    /// Memory in the order of a stream. Any error but a want of memory is kept.
    pub(super) fn alloc(
        &self,
        bytes: usize,
        stream: sys::CUstream,
        shortage: Shortage,
    ) -> Result<sys::CUdeviceptr, DriverError> {
        let _bound = self.bind().map_err(|error| self.keep(error))?;
        // SAFETY: pool and stream live as long as the context.
        let alloc = || unsafe { mem_pool::alloc_async(self.pool, bytes, stream) };
        alloc()
            .or_else(|failed| {
                if failed.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY || shortage == Shortage::Refuses {
                    return Err(failed);
                }
                self.trim()?;
                alloc()
            })
            .map_err(|failed| {
                let told = error(&format!("allocating {bytes} bytes"), failed);
                if failed.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY { told } else { self.keep(told) }
            })
    }

    /// Waits for all streams, and gives the memory that nobody uses back to the GPU.
    pub(super) fn give_back(&self) -> Result<(), DriverError> {
        let _bound = self.bind()?;
        self.trim().describe("giving memory back")
    }

    /// Waits for all streams of the bound context, so that what they are about to free is in the pool, and empties the pool.
    fn trim(&self) -> Result<(), result::DriverError> {
        ctx::synchronize()?;
        // SAFETY: the pool lives as long as the context.
        unsafe { mem_pool::trim_to(self.pool, 0) }
    }

    /// A property of the GPU.
    pub(super) fn attribute(&self, which: sys::CUdevice_attribute, what: &str) -> Result<c_int, DriverError> {
        // SAFETY: the device is the driver's.
        unsafe { device::get_attribute(self.device, which) }.describe(what)
    }

    /// Bytes of memory, and how many of them are free, those that the pool holds and nobody uses included. All streams are waited for, so that
    /// what they are about to free counts; an error of that wait is one of the GPU, and is kept.
    pub(super) fn memory(&self) -> Result<(u64, u64), DriverError> {
        let _bound = self.bind().map_err(|error| self.keep(error))?;
        ctx::synchronize().describe("waiting for the GPU").map_err(|error| self.keep(error))?;
        let (free, total) = mem_get_info().describe("asking for free memory")?;
        let read = |attribute| {
            let mut value = 0u64;
            // SAFETY: both attributes that are asked for are of 64 bits.
            unsafe { mem_pool::get_attribute(self.pool, attribute, ptr::from_mut(&mut value).cast()) }
                .describe("asking for the pool's memory")?;
            Ok(value)
        };
        let reserved = read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok((total as u64, free as u64 + reserved.saturating_sub(used)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // An error has no receiver: the last user is gone.
        let _bound = self.bind();
        if !self.pool.is_null() {
            // SAFETY: all memory of the pool has been freed, since each piece of it holds this context.
            let _ = unsafe { mem_pool::destroy(self.pool) };
        }
        // SAFETY: it was retained once.
        let _ = unsafe { primary_ctx::release(self.device) };
    }
}

/// The compute capability of Hopper GPUs, whose own kernels run on no other.
const HOPPER: (u32, u32) = (9, 0);

/// A pool of a GPU's memory that keeps what is freed.
fn pool(device: sys::CUdevice) -> Result<sys::CUmemoryPool, DriverError> {
    let properties = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: device,
        },
        win32SecurityAttributes: ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    // SAFETY: the properties are valid, and live until the call has returned.
    let pool = unsafe { mem_pool::create(&raw const properties) }.describe("making a pool of memory")?;
    let set = |attribute, value: *mut c_void| {
        // SAFETY: the values that are given are of the attributes' types.
        unsafe { mem_pool::set_attribute(pool, attribute, value) }.describe("setting up the pool of memory")
    };
    let (threshold, waits) = (
        sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
        sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    );
    // A stream that allocates does not wait for another that is about to free: it gets other memory.
    let (mut keeps, mut may_wait): (u64, c_int) = (u64::MAX, 0);
    let set_up = set(threshold, ptr::from_mut(&mut keeps).cast())
        .and_then(|()| set(waits, ptr::from_mut(&mut may_wait).cast()));
    if set_up.is_err() {
        // SAFETY: the pool has just been made, and nobody has memory of it.
        let _ = unsafe { mem_pool::destroy(pool) };
    }
    set_up.map(|()| pool)
}

/// The properties of a GPU that the driver tells before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvidiaDevice {
    /// Index among the GPUs that the driver shows.
    pub index: usize,
    /// Name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: u64,
}

impl NvidiaDevice {
    /// Whether the GPU runs kernels for Hopper.
    pub(super) fn is_hopper(&self) -> bool {
        self.compute_capability == HOPPER
    }

    /// Asks the driver, which has been initialised.
    pub(super) fn of(index: usize) -> Result<(sys::CUdevice, NvidiaDevice), DriverError> {
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        let handle = device::get(ordinal).describe("finding the GPU")?;
        let name = device::get_name(handle).describe("asking for the GPU's name")?;
        let attribute = |which| {
            // SAFETY: the device is the driver's.
            let value = unsafe { device::get_attribute(handle, which) };
            value.describe("asking for the GPU's properties").map(c_int::unsigned_abs)
        };
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: as above.
        let memory = unsafe { device::total_mem(handle) }.describe("asking for the GPU's memory")?;
        let found = NvidiaDevice {
            index,
            name,
            compute_capability: (major, minor),
            multiprocessors: multiprocessors as usize,
            memory: memory as u64,
        };
        Ok((handle, found))
    }
}
