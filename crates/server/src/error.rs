//! Errors of a server that cannot start.

use std::io;
use std::net::SocketAddr;

/// The reason for which a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The default method or policy is unknown, or one of its options is wrong.
    #[error(transparent)]
    Registry(#[from] refrain::registry::Error),
    /// The stored documents cannot be opened or indexed.
    #[error(transparent)]
    Corpus(#[from] refrain::corpus::Error),
    /// The device has too little memory for requests.
    #[error(transparent)]
    Engine(#[from] refrain::engine::Error),
    /// API keys are given without the secret from which their namespaces are derived.
    #[error("API keys need a namespace key")]
    NoNamespaceKey,
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}; give another with --host or --port")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("cannot use {path} for TLS: {reason}")]
    Tls {
        /// The file.
        path: String,
        /// The fault of the file.
        reason: String,
    },
}
