//! A prefix after its prefill.

use refrain_kernels::Buffer;

/// The prefix of an engine, prefilled.
#[derive(Debug)]
pub(crate) struct PrefilledPrefix {
    pub(crate) tokens: Vec<u32>,
    pub(crate) digest: [u8; 32],
    /// Keys before RoPE and values of each layer, `tokens × Hkv × d` each.
    pub(crate) layers: Vec<(Buffer, Buffer)>,
}
