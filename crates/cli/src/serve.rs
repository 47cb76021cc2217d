//! `refrain serve` and `refrain key`.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use refrain_server::{App, Keys, Limits, Listener, Options, tls};
use serde_json::json;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::args::{self, Key};
use crate::methods;
use crate::output::{Fail, count, print, print_json};
use crate::settings::{Context, read_documents};

/// `refrain serve`
pub(crate) fn run(context: &Context, args: &args::Serve) -> Result<()> {
    let (method, policy) = (methods::method(&args.method)?, methods::policy(&args.evict)?);
    let filter = EnvFilter::try_new(&args.log).map_err(|error| {
        Fail::usage(format!("--log {:?} is no filter: {error}", args.log)).hint("for example info, or debug")
    })?;
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = match context.json {
        true => log.json().boxed(),
        false => log.with_ansi(std::io::stderr().is_terminal()).with_target(false).boxed(),
    };
    let log = tracing_subscriber::registry().with(log.with_filter(filter));
    #[cfg(feature = "otlp")]
    let export = args.otlp.as_deref().map(crate::otlp::Export::new).transpose()?;
    #[cfg(feature = "otlp")]
    let log = log.with(export.as_ref().map(crate::otlp::Export::layer));
    log.init();
    if args.api_keys.is_some() && !args.docs.is_empty() {
        return Err(Fail::usage(
            "--docs are kept for who needs no key, and --api-keys lets nobody in without one",
        )
        .hint("start without --docs, and bring them with a key: POST /v1/documents")
        .into());
    }
    let documents = read_documents(&args.docs)?;
    let engine = context.open_engine()?;
    let mut options = Options::new(args.name.clone().unwrap_or_else(|| context.global.model.clone()));
    (options.method, options.evict) = (method.spec, policy.spec);
    options.limits = Limits::default();
    options.limits.answers = args.answers.max(1);
    (options.limits.queue, options.limits.deadline) = (args.queue.max(1), args.deadline);
    options.limits.kv_bytes = usize::try_from(args.kv_cache).unwrap_or(usize::MAX);
    options.body = usize::try_from(args.body).unwrap_or(usize::MAX);
    (options.documents, options.arrival, options.drain) = (args.documents, args.arrival, args.drain);
    options.limits.tokens = args.tokens;
    options.cors.clone_from(&args.cors);
    (options.local, options.library) = (args.host.is_loopback(), args.library);
    options.hosts = args.hosts.iter().map(|name| name.to_ascii_lowercase()).collect();
    options.folder = Some(context.store.clone());
    if let Some(path) = &args.api_keys {
        options.keys = Keys::read(path)?;
        if options.keys.is_empty() {
            return Err(Fail::new(format!("{} holds no key", path.display()))
                .hint("`refrain key new NAME` makes one")
                .into());
        }
        options.namespace_key = Some(context.namespace_key()?);
    }
    let open = options.keys.is_empty();
    let encrypted = match (&args.tls_cert, &args.tls_key) {
        (Some(certificates), Some(key)) => Some(tls(certificates, key)?),
        _ => None,
    };
    let scheme = if encrypted.is_some() { "https" } else { "http" };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the threads that serve")?;
    runtime.block_on(async {
        let listener = Listener::bind(SocketAddr::new(args.host, args.port), encrypted).await?;
        let address = listener.address()?;
        let app = App::new(engine, options)?;
        if !documents.is_empty() {
            let kept = app.keep(documents).await.map_err(|problem| anyhow::anyhow!("{problem}"))?;
            context.say(&format!("{} kept", count(kept, "document")));
        }
        if open && !args.host.is_loopback() {
            tracing::warn!(
                "everybody who can reach {address} may ask: --api-keys lets in only who has a key"
            );
        }
        let url = format!("{scheme}://{address}");
        if context.json {
            print_json(&json!({ "url": url, "model": context.global.model }))?;
        } else {
            print(&format!("{} at {url}/v1 (Ctrl-C ends it)\n", context.global.model))?;
        }
        listener.serve(app, stopped()).await;
        context.say("stopped");
        anyhow::Ok(())
    })?;
    // Nothing waits for the tasks that still run.
    runtime.shutdown_timeout(Duration::from_secs(1));
    #[cfg(feature = "otlp")]
    if let Some(export) = export {
        export.end();
    }
    Ok(())
}

/// Waits for Ctrl-C or SIGTERM. A second one ends the program at once.
async fn stopped() {
    told_to_stop().await;
    tokio::spawn(async {
        told_to_stop().await;
        std::process::exit(130);
    });
}

async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// `refrain key`
pub(crate) fn key(context: &Context, command: &Key) -> Result<()> {
    let Key::New { name, file } = command;
    let key = Keys::add(file, name)?;
    if context.json {
        return print_json(&json!({ "name": name, "key": key, "file": file }));
    }
    context.say(&format!("{name}'s key; only its hash is in {}, so keep it now", file.display()));
    print(&format!("{key}\n"))
}
