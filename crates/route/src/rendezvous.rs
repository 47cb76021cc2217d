//! Rendezvous hashing (highest random weight, Thaler and Ravishankar 1998): each key ranks all workers. All gateways find the same
//! worker first, and a worker that leaves moves no other worker's keys.

use crate::state::WorkerId;

/// A bijective mix of 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The weight of a worker for a key; the heaviest worker is the key's own. Two workers never weigh the same.
pub(crate) fn weight(key: u64, worker: WorkerId) -> u64 {
    mix(mix(key) ^ worker.0)
}
