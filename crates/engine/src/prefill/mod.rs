//! Prefill of a prompt: reused parts are opened, the method's passes go through the layers, and a cache to decode in is left.

mod attend;
mod capture;
mod context;
mod correct;
mod job;
mod layers;
mod pass;
mod prefetch;
mod reports;
mod reuse;
mod selected;
mod spans;
mod stats;
mod take_over;

pub(crate) use capture::{AttentionCapture, AttentionMap};
pub(crate) use job::{BackgroundLoad, PrefillJob, PrefillRequest, Prefilled};
#[cfg(test)]
pub(crate) use prefetch::{LayerPrefetcher, PrefetchSizes, Prefetched};
pub(crate) use prefetch::{loaders, loading_bytes};
pub(crate) use reuse::ReusedSegments;
pub(crate) use stats::PrefillStats;
