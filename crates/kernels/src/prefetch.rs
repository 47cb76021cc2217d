//! Hints to bring memory into a core's caches before it is needed.
//!
//! A hint is no access: the memory may be gone, or another thread may be writing to it. Where there is no stable way to give one,
//! nothing happens.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_ET0 as WRITE, _MM_HINT_T0 as READ, _MM_HINT_T1 as READ_LATER};

#[cfg(not(target_arch = "x86_64"))]
const READ: i32 = 0;
#[cfg(not(target_arch = "x86_64"))]
const READ_LATER: i32 = 1;
#[cfg(not(target_arch = "x86_64"))]
const WRITE: i32 = 2;

/// Asks for `bytes` bytes that are read next.
#[inline(always)]
pub(crate) fn to_read(from: *const u8, bytes: usize) {
    each_line::<READ>(from, bytes);
}

/// Asks for `bytes` bytes that are read later, in the second-level cache.
#[inline(always)]
pub(crate) fn to_read_later(from: *const u8, bytes: usize) {
    each_line::<READ_LATER>(from, bytes);
}

/// Asks for `bytes` bytes that are written next, and that other cores may hold.
#[inline(always)]
pub(crate) fn to_write(from: *const u8, bytes: usize) {
    each_line::<WRITE>(from, bytes);
}

#[inline(always)]
fn each_line<const HINT: i32>(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "aarch64")]
    for line in (0..bytes).step_by(64) {
        macro_rules! prefetch {
            ($kind:literal) => {
                // SAFETY: every 64-bit Arm processor has the instruction, and it accesses nothing.
                unsafe {
                    std::arch::asm!(concat!("prfm ", $kind, ", [{}]"), in(reg) from.wrapping_add(line),
                                    options(readonly, nostack, preserves_flags));
                }
            };
        }
        // The standard library's intrinsic is not stable.
        match HINT {
            READ => prefetch!("pldl1keep"),
            READ_LATER => prefetch!("pldl2keep"),
            _ => prefetch!("pstl1keep"),
        }
    }
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        // SAFETY: every x86-64 processor has the instruction, and it accesses nothing.
        unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(from.wrapping_add(line).cast()) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (from, bytes);
}
