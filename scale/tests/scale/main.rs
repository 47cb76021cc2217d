//! Workers and gateways as processes on loopback.

mod answers;
#[cfg(feature = "dynamo")]
mod dynamo;
mod failures;
mod figures;
mod harness;
mod logs;
mod object_store;
mod options;
mod planes;
mod sharing;
mod tenancy;
mod upgrade;
