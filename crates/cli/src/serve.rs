//! `refrain serve` and `refrain key`.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, Result};
use refrain::engine::{Document, Engine, Prefix};
use refrain_server::{
    ApiKeys, App, LOG_LEVELS, Listener, Options, log_directives, shows_colours, stop_signal, tls,
};
use serde_json::json;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::args::{self, Key};
use crate::documents::{Documents, read_documents, unread};
use crate::ingest::{progress_bar, stored_documents};
use crate::methods;
use crate::output::{Fail, broken, count, json_path, print, print_json};
use crate::settings::Context;

/// `refrain serve`
pub(crate) fn run(context: &Context, args: &args::Serve) -> Result<()> {
    let filter = log_filter(&args.log)?;
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = match context.json {
        true => log.json().boxed(),
        false => log.with_ansi(shows_colours(&std::io::stderr())).with_target(false).boxed(),
    };
    let log = tracing_subscriber::registry().with(log.with_filter(filter));
    #[cfg(feature = "otlp")]
    let collector = crate::otlp::collector(args.otlp_traces_endpoint.as_deref());
    #[cfg(feature = "otlp")]
    let export = collector.as_deref().map(crate::otlp::Export::new).transpose()?;
    #[cfg(feature = "otlp")]
    let log = log.with(export.as_ref().map(crate::otlp::Export::layer));
    log.init();
    let mut context = context.clone();
    context.console.logs = context.json;
    let context = &context;
    let (method, policy) = (methods::asked(context, &args.method)?, methods::policy(&args.evict)?);
    if args.api_key_file.is_some() && !args.docs.is_empty() {
        return Err(Fail::usage(
            "--docs are for requests without an API key, and --api-key-file refuses those",
        )
        .hint("start without --docs, and add the documents with a key: POST /v1/documents")
        .into());
    }
    let Documents { documents, failures, .. } = read_documents(context.console, &args.docs)?;
    let mut options = options(context, args)?;
    let engine = context.open_engine(&options.instructions)?;
    let prefix_cache = usize::try_from(args.prefix_cache_memory_bytes).unwrap_or(usize::MAX);
    let engine = engine.with_prefix_cache(prefix_cache);
    let chosen = context.reason_of(&method.spec)?;
    #[cfg(feature = "otlp")]
    if export.is_some() {
        options.set_parent = Some(crate::otlp::set_parent);
    }
    options.method_reason = chosen.unwrap_or_else(|| "given to the server".to_owned());
    options.prefix = match context.prefix()? {
        // Clients have no use for a path of this machine.
        Prefix::Text(_) => "text".to_owned(),
        prefix => prefix.to_string(),
    };
    let in_one_piece = !method.built.statistics().is_empty();
    (options.method, options.evict) = (method.spec, policy.spec);
    let open = options.api_keys.is_empty();
    let encrypted = match (&args.ssl_certfile, &args.ssl_keyfile) {
        (Some(certificates), Some(key)) => Some(tls(certificates, key)?),
        _ => None,
    };
    let scheme = if encrypted.is_some() { "https" } else { "http" };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the threads that serve")?;
    let served = runtime.block_on(async {
        let mut stop = pin!(stop_signal());
        let address = SocketAddr::new(args.host, args.port);
        let mut listener = Listener::bind(address, encrypted.clone()).await?;
        let ingesting = engine.clone();
        let app = App::new(engine, options)?;
        if !documents.is_empty() {
            // Connections are refused while nothing would answer on them.
            drop(listener);
            let Some(ingested) = ingest(context, &app, &documents, stop.as_mut()).await? else {
                app.drain();
                return stopped(context, &ingesting, &documents, in_one_piece);
            };
            context.say(&format!("{} ingested{}", count(ingested, "document"), unread(failures.len())));
            listener = Listener::bind(address, encrypted).await?;
        }
        drop((ingesting, documents));
        let address = listener.address()?;
        if open && !args.host.is_loopback() {
            tracing::warn!(
                "everyone who can reach {address} can send requests: --api-key-file restricts them to holders of a key"
            );
        }
        let url = format!("{scheme}://{address}");
        if context.json {
            print_json(&json!({ "url": url, "model": context.global.model }))?;
        } else {
            let model = &context.global.model;
            let said = format!(
                "{model} answers at {url}/v1 (OpenAI's interface), with a page at {url}/ (Ctrl-C ends it)"
            );
            print(&format!("{}\n", broken(&said, &io::stdout())))?;
        }
        let requests_under_way = app.requests_under_way();
        let stop = async {
            stop.await;
            let under_way = requests_under_way();
            if under_way > 0 {
                context.say(&format!(
                    "stopping: {} under way may go on for {:?}, and another Ctrl-C ends the server at once",
                    count(under_way, "request"),
                    args.shutdown_timeout
                ));
            }
        };
        listener.serve(app, stop).await;
        context.say("stopped");
        anyhow::Ok(())
    });
    // No client is left that blocking work could still serve.
    runtime.shutdown_timeout(Duration::from_secs(1));
    #[cfg(feature = "otlp")]
    if let Some(export) = export {
        export.end();
    }
    served
}

/// Ingests the documents that stand on the command line, with a progress bar, and gives their number; none where `stop` completes first.
async fn ingest(
    context: &Context,
    app: &App,
    documents: &[Document],
    stop: impl Future<Output = ()>,
) -> Result<Option<usize>> {
    tokio::select! {
        ingested = app.ingest(documents.to_vec(), progress_bar(context)) => {
            Ok(Some(ingested.map_err(|error| anyhow::anyhow!("{error}"))?))
        }
        () = stop => Ok(None),
    }
}

/// Ends a server whose ingest was stopped, and says what is kept.
fn stopped(context: &Context, engine: &Engine, documents: &[Document], in_one_piece: bool) -> Result<()> {
    let (_, stored) = stored_documents(engine, documents, in_one_piece)?;
    let are = if stored == 1 { "is" } else { "are" };
    let chunks = count(stored, "chunk");
    context.say(&format!("stopped; {chunks} of the documents {are} kept; the same command goes on there"));
    Ok(())
}

/// The filter of the log.
///
/// # Errors
/// If the text is none.
fn log_filter(text: &str) -> Result<EnvFilter> {
    let filter =
        log_directives(text).and_then(|it| EnvFilter::try_new(it).map_err(|error| error.to_string()));
    filter
        .map_err(|wrong| Fail::usage(format!("--log {text:?} is no filter: {wrong}")).hint(LOG_LEVELS).into())
}

/// The server's settings, without method and policy.
fn options(context: &Context, args: &args::Serve) -> Result<Options> {
    let name = args.served_model_name.clone().unwrap_or_else(|| context.global.model.clone());
    let mut options = Options::new(name);
    options.instructions.before_question.clone_from(&args.instruction);
    options.limits.num_speculative_tokens = args.speculation.num_speculative_tokens;
    options.limits.max_num_seqs = args.max_num_seqs.max(1);
    options.limits.max_queued_requests = args.max_queued_requests.max(1);
    options.limits.request_timeout = args.request_timeout;
    if let Some(bytes) = args.kv_cache_memory_bytes {
        options.limits.kv_cache_memory_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        options.limits.kv_cache_memory_given = true;
    }
    options.limits.max_tokens_per_request = args.max_tokens_per_request;
    options.limits.default_max_tokens = args.default_max_tokens.map(|tokens| tokens as usize);
    options.max_body = usize::try_from(args.max_body).unwrap_or(usize::MAX);
    options.max_documents_per_request = args.max_documents_per_request;
    (options.body_timeout, options.shutdown_timeout) = (args.body_timeout, args.shutdown_timeout);
    options.allowed_origins.clone_from(&args.allowed_origins);
    options.allowed_hosts = args.allowed_hosts.iter().map(|name| name.to_ascii_lowercase()).collect();
    (options.is_local, options.document_quota) = (args.host.is_loopback(), args.document_quota);
    (options.folder, options.sync_interval) = (Some(context.store.clone()), context.sync_interval());
    options.metrics_auth = args.metrics_auth;
    if let Some(path) = &args.api_key_file {
        options.api_keys = ApiKeys::read(path)?;
        if options.api_keys.is_empty() {
            return Err(Fail::new(format!("{} holds no key", path.display()))
                .hint("`refrain key new NAME` makes one")
                .into());
        }
    }
    // A gateway that has the key, too, signs whose a request is.
    if args.api_key_file.is_some() || context.gives_namespace_key() {
        options.namespace_key = Some(context.namespace_key()?);
    }
    Ok(options)
}

/// `refrain key`
pub(crate) fn key(context: &Context, command: &Key) -> Result<()> {
    let Key::New { name, file } = command;
    let key = ApiKeys::add(file, name)?;
    if context.json {
        return print_json(&json!({ "name": name, "key": key, "file": json_path(file) }));
    }
    context.say(&format!("{name}'s key; only its hash is in {}, so keep it now", file.display()));
    print(&format!("{key}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_of_the_log_has_levels() {
        assert!(log_filter("info, tantivy=warn").is_ok());
        let error = log_filter("info,verbose").unwrap_err().to_string();
        assert!(error.contains("verbose is no level"), "{error}");
        assert!(log_filter("info,tantivy=loud").is_err());
    }
}
