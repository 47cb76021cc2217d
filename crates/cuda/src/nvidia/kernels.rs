//! The compiled kernels that the program carries.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{function, module};
use cudarc::driver::sys;

use super::call::{Describe, error};
use super::context::Context;
use crate::driver::{DriverError, Grid};

/// Machine code of sm_80 and sm_90a, and PTX for what comes after: `make cuda` writes it.
static FATBIN: &Aligned<[u8]> = &Aligned { bytes: *include_bytes!("../../kernels.fatbin") };

/// Bytes at an address as the driver wants it.
#[repr(C, align(64))]
struct Aligned<B: ?Sized> {
    bytes: B,
}

/// The kernels, loaded into a context, by their names.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    module: sys::CUmodule,
    /// Most bytes of shared memory that a block may have.
    pub(super) shared_limit: c_int,
    /// Whether a kernel may begin while the one before it is still busy, for which it waits itself: kernels as compiled for other GPUs do not wait.
    begins_early: bool,
    functions: Mutex<HashMap<&'static str, Function>>,
}

#[derive(Clone, Copy, Debug)]
struct Function(sys::CUfunction);

// SAFETY: handles of the driver may be used by any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Kernels {}
// SAFETY: as above.
unsafe impl Send for Function {}

impl Kernels {
    /// Loads the kernels. Those of GPUs that came after the program are compiled from PTX meanwhile.
    pub(super) fn load(context: &Arc<Context>, begins_early: bool) -> Result<Kernels, DriverError> {
        let _bound = context.bind()?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_limit = context.attribute(attribute, "asking for the GPU's shared memory")?;
        let image: *const c_void = FATBIN.bytes.as_ptr().cast();
        // SAFETY: the image is whole, and stays where it is.
        let module = unsafe { module::load_data(image) }.describe("loading the kernels")?;
        load_all(module);
        Ok(Kernels {
            context: context.clone(),
            module,
            shared_limit,
            begins_early,
            functions: Mutex::default(),
        })
    }

    /// Launches a kernel in a stream. The context is current. `arguments` are eight bytes each, of which the kernel reads as many as its
    /// parameter has: the lower ones.
    pub(super) fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        stream: sys::CUstream,
        arguments: &mut [u64],
    ) -> Result<(), DriverError> {
        const { assert!(cfg!(target_endian = "little"), "the lower bytes of an argument come first") };
        let function = self.function(name)?;
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| ptr::from_mut(argument).cast()).collect();
        let [x, y, z] = grid.blocks;
        let Grid { threads, shared, .. } = grid;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream,
            attrs: &raw mut early,
            numAttrs: self.begins_early.into(),
        };
        // SAFETY: the function is of this module; that the arguments are its own, and their memory large enough, is up to those that launch
        // it, which the emulator checks.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.0, pointers.as_mut_ptr(), ptr::null_mut())
        }
        .result()
        .map_err(|failed| {
            let shape =
                format!("{x} × {y} × {z} blocks of {threads} threads and {shared} bytes of shared memory");
            error(&format!("launching {name} with {shape}"), failed)
        })
    }

    /// A kernel by its name.
    fn function(&self, name: &'static str) -> Result<Function, DriverError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let function = self.find(name)?;
        functions.insert(name, function);
        Ok(function)
    }

    /// Finds a kernel, and lets its blocks have all shared memory that the GPU has for one: without that, 48 KiB are the most.
    fn find(&self, name: &'static str) -> Result<Function, DriverError> {
        let text = CString::new(name).map_err(|_| DriverError(format!("{name:?} is no name of a kernel")))?;
        // SAFETY: the module is loaded.
        let function = unsafe { module::get_function(self.module, text) }
            .describe(&format!("finding the kernel {name}"))?;
        let own = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function is of this module.
        let own = unsafe { function::get_function_attribute(function, own) }
            .describe(&format!("asking for the shared memory of {name}"))?;
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above.
        unsafe { function::set_function_attribute(function, most, self.shared_limit - own) }
            .describe(&format!("setting the shared memory of {name}"))?;
        Ok(Function(function))
    }
}

/// Loads the code of all kernels to the GPU. The driver loads that of each when it is first asked for, and fails where others have taken the GPU's
/// memory by then. An error here comes again there.
fn load_all(module: sys::CUmodule) {
    let mut count = 0;
    // SAFETY: the module is loaded, and the count is written where it may be.
    if unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) }.result().is_err() {
        return;
    }
    let mut functions = vec![ptr::null_mut(); count as usize];
    // SAFETY: there is room for so many functions.
    if unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result().is_ok() {
        for function in functions {
            // SAFETY: the function is of this module.
            let _ = unsafe { sys::cuFuncLoad(function) };
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // An error has no receiver: the last user is gone.
        let _bound = self.context.bind();
        // SAFETY: the module is loaded, and nothing launches from it any more.
        let _ = unsafe { module::unload(self.module) };
    }
}
