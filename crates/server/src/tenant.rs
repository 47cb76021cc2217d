//! The sender of a request.

use refrain::engine::Engine;

/// The holder of an API key, or all senders where none is needed. The engine sees the chunks of the tenant's namespace, and
/// no others.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) engine: Engine,
    /// Name of the API key; empty where none is needed.
    pub(crate) name: String,
}

impl Tenant {
    pub(crate) fn namespace(&self) -> &str {
        &self.engine.settings().namespace
    }
}
