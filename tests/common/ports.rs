//! Ports of servers that bind them some time after they were chosen.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// A free port, below those that the system gives to clients and to servers that ask for any: no other program gets it before it is bound.
/// Processes of tests that run beside each other begin apart.
pub(crate) fn own_port() -> u16 {
    let start = std::process::id().wrapping_mul(31);
    let next = || 20_000 + (start.wrapping_add(TAKEN.fetch_add(1, Relaxed)) % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(next).take(10_000).find(is_free).expect("a port from 20000 to 29999 is free")
}
