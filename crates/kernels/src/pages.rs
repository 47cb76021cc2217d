//! What the system is told of memory.

/// Memory of this many bytes and more asks for huge pages: a tile or a row of keys touches many small pages.
const LARGE: usize = 4 << 20;

/// Asks the system to back fresh memory with huge pages, where it has them and the memory is large. Only advice: what
/// the memory holds, and whether it can be used, stays the same.
pub fn advise<T>(memory: &[T]) {
    let bytes = std::mem::size_of_val(memory);
    if bytes < LARGE {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let start = memory.as_ptr().addr().next_multiple_of(PAGE);
        let end = (memory.as_ptr().addr() + bytes) / PAGE * PAGE;
        // SAFETY: the range lies within `memory`; the advice changes neither contents nor validity. An error means
        // that there are no huge pages.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Has the allocator give memory that is free back to the system, where it can: glibc's keeps it, in pieces too small for
/// large requests, and a process would seem to grow with each crowd. Takes some milliseconds.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
