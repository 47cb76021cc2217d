//! Random ids and seeds.

use refrain::store::hex;

/// A unique id: a prefix and 24 hexadecimal digits.
pub(crate) fn random_id(prefix: &str) -> String {
    let bits: [u8; 12] = random_bytes();
    format!("{prefix}{}", hex::encode(&bits))
}

/// A seed for a request that gives none. It has 32 bits, so that every client can send it again as it was reported.
pub(crate) fn random_seed() -> u32 {
    u32::from_le_bytes(random_bytes())
}

fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Where the system has no random bits, ids repeat, and nothing that must be secret depends on them.
    let _ = getrandom::fill(&mut bytes);
    bytes
}
