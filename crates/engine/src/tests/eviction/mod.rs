//! Eviction: oracles 9 to 12 on real models, random shapes against a direct evaluation, and kvpress's own choices.

mod kvpress;
mod oracles;
mod random;

use refrain_eviction::{Eviction, POLICIES};

/// A policy as a user asks for it.
fn policy(spec: &str) -> Eviction {
    POLICIES.parse(spec).unwrap()
}
