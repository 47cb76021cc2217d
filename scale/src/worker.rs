//! A worker: the server of `refrain serve` in process, or a simulation of it, that answers gateways.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::{Context as _, Result};
use axum::Router;
use refrain::engine::{Engine, Instructions, Prefix};
use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use refrain::quantities::Quota;
use refrain::store::{FetchPolicy, Limits, RemoteOptions, Store};
use refrain::{AUTO, EngineOptions, Settings, choice, fingerprint, folders};
use refrain_server::{App, Listener, Options, router};

use crate::args;
#[cfg(feature = "dynamo")]
use crate::args::Discovery;
use crate::simulated::Simulated;
use crate::{say, stop_or};

/// What answers requests.
pub(crate) enum Served {
    Engine(App),
    Simulated(Simulated),
}

impl Served {
    pub(crate) fn router(&self) -> Router {
        match self {
            Served::Engine(app) => router(app.clone()),
            Served::Simulated(simulated) => simulated.router(),
        }
    }

    /// Waits for running requests; no more are taken.
    async fn drain(self) {
        match self {
            Served::Engine(app) => _ = tokio::task::spawn_blocking(move || app.drain()).await,
            Served::Simulated(simulated) => simulated.drain().await,
        }
    }
}

/// Serves until a signal comes.
pub(crate) async fn run(args: args::Worker) -> Result<()> {
    let common = &args.common;
    // A model takes its time, during which the address should be known to be free.
    let listener = Listener::bind(SocketAddr::new(common.host, common.port), None).await?;
    let address = listener.address()?;
    let served = open(&args)?;
    let (routes, limit) = (served.router(), common.body_timeout);
    #[cfg(feature = "dynamo")]
    let registered = match common.discovery {
        Discovery::None => None,
        discovery => Some(crate::dynamo::register(common, discovery, routes.clone(), &name(&args)).await?),
    };
    #[cfg(not(feature = "dynamo"))]
    anyhow::ensure!(
        common.discovery == args::Discovery::None,
        "this program was built without the feature `dynamo`: give --discovery none"
    );
    say(&format!("worker at http://{address}"))?;
    let is_lost = Arc::new(AtomicBool::new(false));
    #[cfg(feature = "dynamo")]
    let lost = registered.as_ref().map(|registered| registered.lost());
    #[cfg(not(feature = "dynamo"))]
    let lost = None::<std::future::Pending<()>>;
    let stop = stop_or(lost, is_lost.clone());
    let drain = async move {
        #[cfg(feature = "dynamo")]
        if let Some(registered) = registered {
            // Gateways send nothing more before the last requests end.
            registered.leave().await;
        }
        served.drain().await;
    };
    listener.serve_routes(routes, (limit, common.shutdown_timeout), stop, drain).await;
    anyhow::ensure!(
        !is_lost.load(Relaxed),
        "the discovery was lost for longer than its lease: the worker is to be started anew"
    );
    Ok(())
}

/// What answers the requests of a worker with these options.
///
/// # Errors
/// If an option is wrong, or model or store cannot be opened.
pub(crate) fn open(args: &args::Worker) -> Result<Served> {
    let store = store(args).with_context(|| format!("the chunk store {}", args.store.display()))?;
    if let Some(simulation) = args.simulate.clone() {
        return Ok(Served::Simulated(Simulated::new(simulation, store, name(args), args.common.key()?)));
    }
    let warn = |text: &str| tracing::warn!("{text}");
    let mut options = options(args)?;
    let engine = engine(args, store, &options.instructions)?;
    let data = folders::data_folder();
    let chosen = choice(&args.model, &fingerprint(&engine), data.as_deref(), &mut { warn })?;
    let prefix = args.prefix.0.as_ref().unwrap_or(&chosen.prefix);
    if args.method == AUTO {
        (options.method, options.method_reason) = (chosen.method.clone(), chosen.why_behind(prefix));
    } else {
        options.method = METHODS.select(&args.method)?.spec;
        options.method_reason = "given to the worker".to_owned();
    }
    options.evict = POLICIES.select(&args.evict)?.spec;
    options.prefix = match prefix {
        // Clients have no use for a path of this machine.
        Prefix::Text(_) => "text".to_owned(),
        prefix => prefix.to_string(),
    };
    let prefix_cache = usize::try_from(args.prefix_cache_memory_bytes).unwrap_or(usize::MAX);
    Ok(Served::Engine(App::new(engine.with_prefix_cache(prefix_cache), options)?))
}

fn limits(args: &args::Worker) -> Limits {
    let mut limits = Limits::memory(args.memory);
    (limits.disk, limits.time_to_live) = (args.disk, args.ttl);
    Quota::set_all(&args.quota, &mut limits);
    limits
}

fn store(args: &args::Worker) -> refrain::store::Result<Store> {
    let limits = limits(args);
    let Some(url) = &args.remote else { return Store::open(&args.store, limits) };
    let mut options = RemoteOptions::new(url);
    options.timeout = args.remote_timeout;
    // The simulation asks for those chunks alone that its rates have fetched.
    options.policy = if args.simulate.is_some() { FetchPolicy::Fetch } else { args.remote_policy };
    Store::open_shared(&args.store, limits, &options)
}

fn engine(args: &args::Worker, store: Store, around: &Instructions) -> Result<Engine> {
    let settings = Settings {
        device: args.device,
        threads: args.threads,
        precision: args.compute.0,
        keep_packed: args.keep_packed,
        device_chunk_bytes: args.device_cache,
        kv: args.kv,
        store_dtype: args.store_dtype,
        ubatch: args.ubatch_size as usize,
        chunk_tokens: args.chunk_tokens,
        left_tokens: args.left_tokens,
        strict_numerics: args.strict_numerics,
        ..Settings::default()
    };
    let warn = |text: &str| tracing::warn!("{text}");
    // The server names the method of each request itself.
    let engine = EngineOptions::new(&args.model).settings(settings).method("vanilla");
    let mut engine = engine.instructions(around.clone()).on_warning(warn);
    if let Some(models) = &args.models {
        engine = engine.models(models);
    }
    if let Some(prefix) = &args.prefix.0 {
        engine = engine.prefix(prefix.clone());
    }
    if let Some(file) = &args.calibration {
        engine = engine.calibration(file);
    }
    Ok(engine.open_on(store)?)
}

/// The server's settings, without method, policy and prefix.
fn options(args: &args::Worker) -> Result<Options> {
    let (common, bytes) = (&args.common, |size: u64| usize::try_from(size).unwrap_or(usize::MAX));
    let mut options = Options::new(name(args));
    options.instructions.before_question.clone_from(&args.instruction);
    options.limits.num_speculative_tokens = args.num_speculative_tokens;
    options.limits.max_num_seqs = args.max_num_seqs.max(1);
    options.limits.max_queued_requests = args.max_queued_requests.max(1);
    if let Some(most) = args.kv_cache_memory_bytes {
        options.limits.kv_cache_memory_bytes = bytes(most);
        options.limits.kv_cache_memory_given = true;
    }
    options.limits.max_tokens_per_request = args.max_tokens_per_request;
    options.limits.default_max_tokens = args.default_max_tokens.map(|tokens| tokens as usize);
    options.limits.request_timeout = args.request_timeout;
    options.max_body = bytes(common.max_body);
    options.max_documents_per_request = args.max_documents_per_request;
    (options.body_timeout, options.shutdown_timeout) = (common.body_timeout, common.shutdown_timeout);
    (options.is_local, options.document_quota) = (common.host.is_loopback(), args.document_quota);
    (options.folder, options.sync_interval) = (Some(args.store.clone()), args.sync_interval.0);
    options.namespace_key = Some(common.key()?);
    Ok(options)
}

fn name(args: &args::Worker) -> String {
    args.served_model_name.clone().unwrap_or_else(|| args.model.clone())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn options_reach_store_engine_and_server() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, "ab".repeat(32)).unwrap();
        let text = "refrain-scale worker --host=localhost --device=auto --threads=1 --ubatch-size=32 --left-tokens=7 --strict-numerics=true --chunk-tokens=64 \
                    --compute=auto --prefix=auto \
                    --keep-packed=false --device-cache=10B --quota=1KiB --ttl=2h --sync-interval=off --instruction=x --num-speculative-tokens=3 --kv-cache-memory-bytes=5B \
                    --document-quota=6B --max-documents-per-request=8 --max-tokens-per-request=9 --default-max-tokens=4";
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tiny/llama");
        let paths = ["--model", model, "--store", folder.path().to_str().unwrap()];
        let more = paths.into_iter().chain(["--namespace-key-file", key.to_str().unwrap()]);
        let Command::Worker(args) = Cli::parse_from(text.split_whitespace().chain(more)).command else {
            panic!()
        };
        let options = options(&args).unwrap();
        assert_eq!(options.instructions.before_question, "x");
        assert_eq!(options.limits.num_speculative_tokens, 3);
        assert_eq!(options.limits.kv_cache_memory_bytes, 5);
        assert_eq!(options.limits.max_tokens_per_request, 9);
        assert_eq!(options.limits.default_max_tokens, Some(4));
        assert_eq!((options.document_quota, options.max_documents_per_request), (6, 8));
        assert_eq!(options.sync_interval, None);
        assert_eq!(options.namespace_key, Some("ab".repeat(32).parse().unwrap()));
        let engine = engine(&args, store(&args).unwrap(), &options.instructions).unwrap();
        let settings = engine.settings();
        assert_eq!((settings.ubatch, settings.left_tokens, settings.strict_numerics), (32, 7, true));
        assert!(!settings.keep_packed);
        assert_eq!(settings.device_chunk_bytes, 10);
        assert_eq!(settings.device, refrain::DeviceChoice::Auto);
        let limits = limits(&args);
        assert_eq!((limits.quota, limits.time_to_live), (1024, Some(std::time::Duration::from_secs(7200))));
        assert_eq!(name(&args), model);
    }
}
