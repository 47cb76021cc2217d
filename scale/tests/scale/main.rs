//! Workers and gateways as processes on loopback.

mod answers;
#[cfg(feature = "dynamo")]
mod dynamo;
mod failures;
mod harness;
mod sharing;
mod tenancy;
