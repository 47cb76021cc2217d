//! The number of files that the system lets this process have open.

#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Most open files that are asked for. macOS refuses more.
#[cfg(unix)]
const MOST: u64 = if cfg!(target_os = "macos") { 10_240 } else { 65_536 };
/// Most files that readers of a store keep open: a prompt may have more chunks than a process may have files.
const READER_FILES: usize = 256;

/// Raises the number of files that this process may have open to the hard limit, or to 65,536 where that is more. It is for programs to call as they
/// start: it holds for all of the process.
pub fn raise_open_files() {
    #[cfg(unix)]
    {
        let limit = getrlimit(Resource::Nofile);
        let wanted = limit.maximum.map_or(MOST, |most| most.min(MOST));
        if limit.current.is_some_and(|current| current < wanted) {
            // A limit that the system does not raise stays, and bounds connections and readers.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit });
        }
    }
}

/// Most files that this process may have open.
pub fn max_open_files() -> usize {
    #[cfg(unix)]
    let limit = getrlimit(Resource::Nofile).current;
    #[cfg(not(unix))]
    let limit = None::<u64>;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Most files that the readers of a store keep open: a quarter of what the process may have at most.
pub fn max_reader_files() -> usize {
    READER_FILES.min(max_open_files() / 4)
}
