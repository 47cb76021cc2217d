//! HTTP server with OpenAI's interface for chat, over documents whose chunks are prefilled once.
//!
//! [`App`] is the server without a socket, [`router`] its routes, and [`Listener`] accepts its connections. A request goes
//! from `listener` through a handler of `api`, which tokenises and searches (`refrain::corpus`), into the queue of the `scheduler`.
//! One thread computes for all requests: it decodes all sequences together, one token each in a pass over the weights, and
//! prefills prompts between those passes, layer by layer.

mod api;
mod api_error;
mod api_keys;
mod app;
mod averages;
mod blocking;
mod body;
mod client_stream;
mod clock;
mod compute;
mod device_metrics;
mod error;
mod gateway;
mod host_memory;
mod ingest;
mod job;
mod listener;
mod log;
mod metric_declarations;
mod metrics;
mod options;
mod origin;
mod permits;
mod queue;
mod random;
mod request_id;
mod request_span;
mod running;
mod scheduler;
mod shares;
mod stop_signal;
mod tenant;
#[cfg(test)]
mod testing;
mod tls;

/// Target of log lines that contain prompts and answers.
const TEXT_LOG: &str = "refrain::text";

pub use api::router;
pub use api_error::{ApiError, SERVER_FAILURES};
pub use api_keys::{ApiKeys, ApiKeysError};
pub use app::App;
pub use body::{BytesInFlight, HeldBytes, receive};
pub use error::Error;
pub use gateway::{
    ChunkPlan, HeldChunks, HeldLog, ModelCard, Rates, Report, TENANT_HEADER, short_key, sign_tenant,
    signed_tenant,
};
pub use listener::Listener;
pub use log::{LOG_LEVELS, log_directives, shows_colours};
pub use options::{Limits, Options};
pub use request_id::{REQUEST_ID, request_id};
pub use request_span::RequestSpan;
pub use stop_signal::{end_as_first_process, leave_signals, stop_signal};
pub use tls::{Tls, tls};
