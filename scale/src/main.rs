//! `refrain-scale`: Refrain on many machines. A `worker` answers with the router of `refrain serve`; a `gateway` speaks the same interface
//! towards clients, and sends each request to the worker that holds its chunks. What connects them stands behind [`cluster::Cluster`].

mod args;
mod cluster;
mod complaints;
#[cfg(feature = "dynamo")]
mod dynamo;
mod gateway;
mod probe;
mod simulated;
mod static_list;
mod worker;

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use axum::http::HeaderValue;
use clap::FromArgMatches as _;
use refrain::store::raise_open_files;
use refrain_server::{
    ApiKeys, LOG_LEVELS, Listener, Options, log_directives, shows_colours, sign_tenant, stop_signal, tls,
};
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, Common, Discovery};
use crate::cluster::Cluster;
use crate::gateway::Gateway;
use crate::static_list::StaticList;

fn main() -> Result<()> {
    raise_open_files();
    // Two providers are linked, and without a choice the first connection would panic.
    let _ = rustls::crypto::ring::default_provider().install_default();
    refrain_server::end_as_first_process();
    let matches = args::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Worker(args) => {
                log(&args.common)?;
                worker::run(*args).await
            }
            Command::Gateway(args) => {
                log(&args.common)?;
                run_gateway(*args).await
            }
            Command::Probe(args) => probe::run(&args).await,
        }
    });
    // No client is left that blocking work could still serve.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

fn log(common: &Common) -> Result<()> {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr);
    log.with_ansi(shows_colours(&std::io::stderr())).with_env_filter(log_filter(&common.log)?).init();
    Ok(())
}

/// # Errors
/// If the text is no filter of a log.
fn log_filter(text: &str) -> Result<EnvFilter> {
    let filter =
        log_directives(text).and_then(|it| EnvFilter::try_new(it).map_err(|error| error.to_string()));
    filter.map_err(|wrong| anyhow!("--log {text:?} is no filter: {wrong}; {LOG_LEVELS}"))
}

async fn run_gateway(args: args::Gateway) -> Result<()> {
    let common = &args.common;
    let mut options = Options::new("");
    options.max_body = usize::try_from(common.max_body).unwrap_or(usize::MAX);
    (options.body_timeout, options.shutdown_timeout) = (common.body_timeout, common.shutdown_timeout);
    options.allowed_origins.clone_from(&args.allowed_origins);
    options.allowed_hosts = args.allowed_hosts.iter().map(|name| name.to_ascii_lowercase()).collect();
    options.is_local = common.host.is_loopback();
    if let Some(path) = &args.api_key_file {
        options.api_keys = ApiKeys::read(path)?;
        if options.api_keys.is_empty() {
            bail!("{} holds no key: `refrain key new NAME` makes one", path.display());
        }
    }
    let encrypted = match (&args.ssl_certfile, &args.ssl_keyfile) {
        (Some(certificates), Some(key)) => Some(tls(certificates, key)?),
        _ => None,
    };
    let scheme = if encrypted.is_some() { "https" } else { "http" };
    let is_open = options.api_keys.is_empty();
    let listener = Listener::bind(SocketAddr::new(common.host, common.port), encrypted).await?;
    let address = listener.address()?;
    let cluster = cluster_of(&args).await?;
    let (is_lost, runtime) = (Arc::new(AtomicBool::new(false)), cluster.clone());
    let stop = stop_or(Some(async move { runtime.stopped().await }), is_lost.clone());
    let gateway = Gateway::new(cluster, options, common.key()?, args.rule.into());
    let follower = tokio::spawn(gateway.clone().follow());
    if is_open && !common.host.is_loopback() {
        tracing::warn!(
            "everyone who can reach {address} can send requests: --api-key-file restricts them to holders of a key"
        );
    }
    say(&format!("gateway at {scheme}://{address}/v1"))?;
    let (router, limit) = (gateway::router(gateway.clone()), common.body_timeout);
    let shutdown = common.shutdown_timeout;
    listener
        .counting(gateway.refusals())
        .serve_routes(router, (limit, shutdown), stop, gateway.drain(shutdown))
        .await;
    follower.abort();
    anyhow::ensure!(
        !is_lost.load(Relaxed),
        "the discovery was lost for longer than its lease: the gateway is to be started anew"
    );
    Ok(())
}

/// The workers that the options name.
///
/// # Errors
/// If they name none, or wrong ones, or the discovery cannot be joined.
async fn cluster_of(args: &args::Gateway) -> Result<Arc<dyn Cluster>> {
    let common = &args.common;
    let signature = HeaderValue::from_str(&sign_tenant(&common.key()?, "", ""))?;
    match common.discovery {
        Discovery::None if args.workers.is_empty() => bail!(
            "a gateway without a discovery has to be given its workers: --workers http://HOST:PORT,…, or --discovery file or etcd"
        ),
        Discovery::None => Ok(Arc::new(StaticList::new(&args.workers, signature)?)),
        #[cfg(feature = "dynamo")]
        discovery => Ok(Arc::new(dynamo::Dynamo::join(common, discovery, signature).await?)),
        #[cfg(not(feature = "dynamo"))]
        _ => bail!("this program was built without the feature `dynamo`: give --workers"),
    }
}

/// Prints a line on standard output, where a program may read it.
fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Waits for a signal to stop, or until `lost` completes, which `is_lost` tells then.
async fn stop_or(lost: Option<impl Future<Output = ()>>, is_lost: Arc<AtomicBool>) {
    let lost = async {
        match lost {
            Some(lost) => lost.await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = stop_signal() => {}
        () = lost => is_lost.store(true, Relaxed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_of_the_log_has_levels() {
        assert!(log_filter("info, tantivy=warn").is_ok());
        let error = log_filter("verbose").unwrap_err().to_string();
        assert!(error.contains("verbose is no level; levels are error, warn"), "{error}");
    }

    #[tokio::test]
    async fn a_gateway_without_workers_says_what_to_give() {
        let key = "ab".repeat(32);
        let words = ["refrain-scale", "gateway", "--namespace-key", &key];
        for more in [&[][..], &["--discovery=none"]] {
            let matches = args::command().try_get_matches_from(words.iter().chain(more)).unwrap();
            let Command::Gateway(args) = Cli::from_arg_matches(&matches).unwrap().command else { panic!() };
            let error = cluster_of(&args).await.err().unwrap();
            assert!(error.to_string().contains("--workers http://HOST:PORT"), "{error}");
        }
    }
}
