//! A worker: the server of `refrain serve` in process, or a simulation of it, that answers gateways.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::{Context as _, Result};
use axum::Router;
use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use refrain::store::{Limits, RemoteOptions, Store};
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
    listener.serve_routes(routes, limit, stop, drain).await;
    anyhow::ensure!(
        !is_lost.load(Relaxed),
        "the discovery was lost for longer than its lease: the worker is to be started anew"
    );
    Ok(())
}

pub(crate) fn open(args: &args::Worker) -> Result<Served> {
    let mut limits = Limits::memory(args.memory);
    limits.disk = args.disk;
    let store = match &args.remote {
        Some(url) => {
            let mut options = RemoteOptions::new(url);
            options.timeout = args.remote_timeout;
            Store::open_shared(&args.store, limits, &options)
        }
        None => Store::open(&args.store, limits),
    };
    let store = store.with_context(|| format!("the chunk store {}", args.store.display()))?;
    if let Some(simulation) = args.simulate.clone() {
        let key = args.common.namespace_key.clone();
        return Ok(Served::Simulated(Simulated::new(simulation, store, name(args), key)));
    }
    let settings = Settings {
        threads: args.threads,
        precision: args.compute,
        kv: args.kv,
        store_dtype: args.store_dtype,
        chunk_tokens: args.chunk_tokens,
        ..Settings::default()
    };
    let data = folders::data_folder();
    let warn = |text: &str| tracing::warn!("{text}");
    // The server names the method of each request itself.
    let mut engine = EngineOptions::new(&args.model).settings(settings).method("vanilla").on_warning(warn);
    if let Some(models) = &args.models {
        engine = engine.models(models);
    }
    if let Some(prefix) = &args.prefix {
        engine = engine.prefix(prefix.clone());
    }
    let engine = engine.open_on(store)?;
    let chosen = choice(&args.model, &fingerprint(&engine), data.as_deref(), &mut { warn })?;
    let mut options = Options::new(name(args));
    options.method_reason = "given to the worker".to_owned();
    if args.method == AUTO {
        (options.method, options.method_reason) = (chosen.method, chosen.why);
    } else {
        options.method = METHODS.select(&args.method)?.spec;
    }
    options.evict = POLICIES.select(&args.evict)?.spec;
    options.prefix = args.prefix.as_ref().unwrap_or(&chosen.prefix).to_string();
    options.limits.max_num_seqs = args.max_num_seqs.max(1);
    options.limits.max_queued_requests = args.max_queued_requests.max(1);
    options.limits.request_timeout = args.request_timeout;
    options.max_body = usize::try_from(args.common.max_body).unwrap_or(usize::MAX);
    (options.body_timeout, options.shutdown_timeout) =
        (args.common.body_timeout, args.common.shutdown_timeout);
    options.is_local = args.common.host.is_loopback();
    options.namespace_key = Some(args.common.namespace_key.clone());
    options.folder = Some(args.store.clone());
    let engine = engine.with_prefix_cache(PREFIX_CACHE);
    Ok(Served::Engine(App::new(engine, options)?))
}

/// Most bytes of keys and values that are kept for prompts which begin alike.
const PREFIX_CACHE: usize = 1 << 30;

fn name(args: &args::Worker) -> String {
    args.served_model_name.clone().unwrap_or_else(|| args.model.clone())
}
