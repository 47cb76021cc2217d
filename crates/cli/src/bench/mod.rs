//! `refrain bench`: measurements of methods, policies, the store and the server.

mod curves;
mod decode;
mod measurement;
mod memory;
mod policies;
mod prompts;
mod serve;
mod store;
mod ttft;

pub(crate) use decode::run as decode;
pub(crate) use measurement::Spread;
pub(crate) use memory::run as memory;
pub(crate) use serve::run as serve;
pub(crate) use store::run as store;
pub(crate) use ttft::run as ttft;
