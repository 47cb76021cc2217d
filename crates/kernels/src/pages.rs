//! Advice to the system and the allocator about memory pages.

/// Memory of this many bytes and more asks for huge pages: a tile or a row of keys touches many small pages.
const LARGE: usize = 512 << 10;

/// Asks the system to back fresh memory with huge pages, if it has them and the memory is large. The advice changes
/// neither the contents nor the validity of the memory.
///
/// Memory that is smaller than a huge page has one only together with what lies beside it: neighbours must have been advised upon before
/// the first of them is written to.
pub fn advise_huge_pages<T>(memory: &[T]) {
    let bytes = std::mem::size_of_val(memory);
    if bytes < LARGE {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        // SAFETY: it may be called at any time, from any thread.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        // Pages that belong to neighbours in part, too: a page without the advice would divide the memory.
        let start = memory.as_ptr().addr() / page * page;
        let end = (memory.as_ptr().addr() + bytes).next_multiple_of(page);
        // SAFETY: the pages hold parts of `memory`, and so are mapped; the advice changes neither contents nor validity of what lies
        // there. An error means that there are no huge pages.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Returns the allocator's free memory to the system, where the allocator can (glibc). Otherwise glibc keeps free memory
/// in pieces that are too small for large requests, and a process grows with every burst of requests. Takes some
/// milliseconds.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Memory of this many bytes and more is not taken from the allocator's heap.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const APART: i32 = 4 << 20;
/// Free bytes at the heap's end that stay there.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: i32 = 1 << 20;

/// Has the allocator take each large piece of memory from the system, and give it back once it is free, where the allocator can (glibc). By itself
/// glibc begins to take such pieces from its heap once one was freed, and buffers that grow leave holes there: 8 MiB after a prompt of
/// 4,096 tokens with a model of 1.5 billion parameters. It is for programs to call as they start: it holds for all of the process.
pub fn keep_large_memory_apart() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: they may be called at any time, from any thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, APART);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}
