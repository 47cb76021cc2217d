//! Memory for requests that are computed in the host's memory: the part that weights and caches leave.

use std::fmt;

use refrain::engine::Engine;
use refrain::{memory_limit, system_bytes};

use crate::options::Limits;
use crate::scheduler::LEAST_DEFAULT_TOKENS;

/// One part in so many of the memory is left alone: for prompts under way, connections, and other programs.
const MARGIN: u64 = 8;

/// The memory that the program may have, and the parts of it that are not for requests, in bytes.
#[derive(Clone, Copy, Debug)]
struct HostMemory {
    limit: u64,
    /// Taken now, weights being in place.
    resident: u64,
    /// Most that chunks may take.
    chunks: u64,
    /// Most that the prefix cache may take.
    prefix_cache: u64,
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostMemory { limit, resident, chunks, prefix_cache } = self;
        write!(
            f,
            "of {} of memory, the program has {}, chunks may take {}, the prefix cache {}, and {} stay free: {} are left for requests",
            mib(*limit),
            mib(*resident),
            mib(*chunks),
            mib(*prefix_cache),
            mib(limit / MARGIN),
            mib(self.left())
        )
    }
}

impl HostMemory {
    /// Bytes for requests.
    fn left(&self) -> u64 {
        let others = [self.resident, self.chunks, self.prefix_cache, self.limit / MARGIN];
        others.into_iter().fold(self.limit, u64::saturating_sub)
    }

    /// The limits of a server whose requests fit, and what is to be told where `limits` do not fit. Requests have `least` bytes in any case, and as
    /// many as were asked for.
    fn within(&self, limits: Limits, least: usize) -> (Limits, Option<String>) {
        let asked = limits.kv_cache_memory_bytes;
        let left = usize::try_from(self.left()).unwrap_or(usize::MAX).max(least);
        if asked <= left {
            return (limits, None);
        }
        let remedy = "lower --memory or --prefix-cache-memory-bytes, or give the program more memory";
        if limits.kv_cache_memory_given {
            let told = format!(
                "{self}, fewer than the {} of --kv-cache-memory-bytes, and the system may end the program: {remedy}",
                mib(asked as u64)
            );
            return (limits, Some(told));
        }
        let told =
            format!("{self}, and running sequences have {} together: for more, {remedy}", mib(left as u64));
        (Limits { kv_cache_memory_bytes: left, ..limits }, Some(told))
    }
}

/// The limits of a server whose requests fit into the memory of this machine, or of the control group that the program is in.
pub(crate) fn within_host(engine: &Engine, limits: Limits) -> Limits {
    let resident = system_bytes("/proc/self/status", "VmRSS:");
    let Some((limit, resident)) = memory_limit().zip(resident) else { return limits };
    let decoder = engine.decoder();
    let memory = HostMemory {
        limit,
        // Weights that are mapped from a file come into memory as they are used.
        resident: resident.max(decoder.weight_bytes() as u64),
        chunks: engine.store().memory_bound(),
        prefix_cache: engine.prefix_cache_bound() as u64,
    };
    let least = LEAST_DEFAULT_TOKENS * decoder.shape().token_bytes(engine.settings().kv);
    let (limits, told) = memory.within(limits, least);
    match told {
        Some(told) if limits.kv_cache_memory_given => tracing::warn!("{told}"),
        Some(told) => tracing::info!("{told}"),
        None => {}
    }
    limits
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_sequences_have_the_memory_that_weights_and_caches_leave() {
        let of = |limit: u64| HostMemory {
            limit: limit << 30,
            resident: 1126 << 20,
            chunks: 1216 << 20,
            prefix_cache: 1 << 30,
        };
        let least = 56 << 20;
        let bytes = |limit| of(limit).within(Limits::default(), least).0.kv_cache_memory_bytes;
        assert_eq!((bytes(16), bytes(4), bytes(2)), (4 << 30, 218 << 20, least));
        let (_, told) = of(4).within(Limits::default(), least);
        assert!(told.unwrap().contains("218 MiB are left for requests"));
        assert_eq!(of(16).within(Limits::default(), least).1, None);
        let given = Limits { kv_cache_memory_given: true, ..Limits::default() };
        let (limits, told) = of(4).within(given.clone(), least);
        assert_eq!(limits, given);
        assert!(told.unwrap().contains("fewer than the 4096 MiB of --kv-cache-memory-bytes"));
    }
}
