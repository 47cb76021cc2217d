//! HTTP server: OpenAI's interface for chat, with documents whose chunks were prefilled once.
//!
//! [`App`] is the server without a socket, [`router`] its routes, [`Listener`] what takes connections. One thread computes
//! for all requests (`schedule`): answers are decoded together, a token each in a pass over the weights, and prompts are
//! computed between, layer by layer.

mod api;
mod app;
mod error;
mod keys;
mod library;
mod listen;
mod metrics;
mod schedule;
mod search;
mod work;

use std::io;
use std::net::SocketAddr;

/// Target of log lines that have prompts and answers.
const TEXTS: &str = "refrain::text";

pub use api::router;
pub use app::{App, Options};
pub use error::Problem;
pub use keys::{Keys, KeysError};
pub use library::LibraryError;
pub use listen::{Listener, tls};
pub use work::Limits;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A method or policy of the options.
    #[error(transparent)]
    Registry(#[from] refrain_registry::Error),
    /// The documents.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Documents that are kept cannot be searched.
    #[error("the documents cannot be entered into the search: {0}")]
    Documents(String),
    /// Keys without what their namespaces are derived with.
    #[error("API keys need a namespace key")]
    NoNamespaceKey,
    /// No thread.
    #[error("cannot start the thread that computes: {0}")]
    Thread(io::Error),
    /// The address.
    #[error("cannot listen on {address}: {source}; give another with --host or --port")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Certificate or key.
    #[error("cannot use {path} for TLS: {why}")]
    Tls {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
}
