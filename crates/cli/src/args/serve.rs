//! Options of `refrain serve` and `refrain key`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, Subcommand, ValueHint};
use refrain::engine::Instructions;

use super::answers::SpeculationArgs;
use refrain::AUTO;
use refrain::quantities::{parse_duration, parse_size};

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Address to listen on; 0.0.0.0 or :: for all addresses of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub(crate) port: u16,
    /// Name of the model in requests [default: the value of --model]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Text, Markdown, HTML, PDF, DOCX or JSONL (title, text) files, or folders of them, to ingest before the first request
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// Fusion method of requests that name none; auto is the model's own choice
    #[arg(long, value_name = "METHOD", default_value = AUTO)]
    pub(crate) method: String,
    /// Eviction policy of requests that name none
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub(crate) evict: String,
    /// Text between the documents and the question of a chat
    #[arg(long, value_name = "TEXT", default_value = Instructions::default().before_question, hide_default_value = true)]
    pub(crate) instruction: String,
    /// File of the accepted API keys (`refrain key new`); without it, no request needs a key
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Needs an API key for /metrics, too
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, value_parser = BoolishValueParser::new())]
    pub(crate) metrics_auth: bool,
    /// Certificate chain (PEM) for TLS; a new one is in use within a minute
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key (PEM) of the certificate
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Names of the server beside localhost and addresses; requests to other names are refused while it listens on a loopback
    /// address and needs no API key
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) allowed_hosts: Vec<String>,
    /// Origins of web pages that may send requests, * for all
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) allowed_origins: Vec<String>,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// Most sequences decoded together
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(crate) max_num_seqs: usize,
    /// Most requests that wait; further ones are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_queued_requests: usize,
    /// Most bytes of keys and values of all running sequences; on a GPU also of what prompts take until their first token, and no more than are left
    /// there for requests [default: 4GiB, or what weights and caches leave of the memory that this machine, or its container, has]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) kv_cache_memory_bytes: Option<u64>,
    /// Most bytes of keys and values of answered prompts that are kept for prompts which begin alike (prefix caching); 0 keeps none
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub(crate) prefix_cache_memory_bytes: u64,
    /// Most time that a request may take, waiting included
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub(crate) request_timeout: Duration,
    /// Most time in which a request's head and body may arrive
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub(crate) body_timeout: Duration,
    /// Most time that running requests may go on when the server shuts down
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub(crate) shutdown_timeout: Duration,
    /// Most bytes of a request's body
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size)]
    pub(crate) max_body: u64,
    /// Most bytes of the titles and texts stored for one API key
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub(crate) document_quota: u64,
    /// Most documents of a request
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_documents_per_request: usize,
    /// OpenTelemetry collector to which spans of requests are sent by OTLP over HTTP, such as http://localhost:4318
    /// [default: the value of OTEL_EXPORTER_OTLP_ENDPOINT]
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) otlp_traces_endpoint: Option<String>,
    /// Most tokens of a request: of the documents to ingest, or of prompt and answer
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    pub(crate) max_tokens_per_request: usize,
    /// Most tokens of an answer for which the request gives no number [default: to the end of the context, within the part of
    /// --kv-cache-memory-bytes that each of --max-num-seqs has, or 2048 where these are more]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) default_max_tokens: Option<u32>,
    /// Log filter: error, warn, info, debug, or by module as in `info,tantivy=warn`; `info,refrain::text=trace` also logs
    /// prompts and answers
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,
}

/// An address, or `localhost`.
fn parse_host(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    text.parse().map_err(|_| match text.parse::<SocketAddr>() {
        Ok(both) => format!("give the port apart: --host {} --port {}", both.ip(), both.port()),
        Err(_) => "give an address of this machine, as 127.0.0.1 or 0.0.0.0".to_owned(),
    })
}

/// API keys of the server
#[derive(Debug, Subcommand)]
pub(crate) enum Key {
    /// Make a key and print it; the file stores only its hash
    New {
        /// Name of its holder
        #[arg(value_name = "NAME")]
        name: String,
        /// File of the keys; created if it is missing
        #[arg(long, value_name = "FILE", default_value = "refrain-keys", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}
