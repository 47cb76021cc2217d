//! A cluster on Dynamo's runtime: workers are found by files or by etcd, requests and responses travel by TCP, and reports by ZMQ or NATS.
//! All calls of Dynamo stand here, for gateways, and in [`worker`].

mod asks;
mod worker;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use axum::http::{HeaderName, HeaderValue, Request, Response};
use bytes::Bytes;
use dynamo_runtime::component::{Client, Component, Endpoint};
use dynamo_runtime::distributed::DistributedConfig;
use dynamo_runtime::engine::{AsyncEngineContext, AsyncEngineContextProvider as _};
use dynamo_runtime::error::DynamoError;
use dynamo_runtime::pipeline::network::egress::push_router::{PushRouter, RouterMode};
use dynamo_runtime::pipeline::{Context, ManyOut};
use dynamo_runtime::protocols::maybe_error::MaybeError;
use dynamo_runtime::transports::event_plane::EventSubscriber;
use dynamo_runtime::{DistributedRuntime, Runtime};
use futures_util::FutureExt as _;
use futures_util::stream::{BoxStream, StreamExt as _, unfold};
use refrain_server::{Report, TENANT_HEADER};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use self::asks::Asks;
pub(crate) use self::worker::register;
use crate::args::{Common, Discovery};
use crate::cluster::{BodyStream, Cluster, Lost, WorkerEvent, WorkerId};

/// Component and endpoint of workers in Dynamo's discovery.
const COMPONENT: &str = "backend";
const ENDPOINT: &str = "answer";
/// Topic of the workers' reports.
const REPORTS: &str = "refrain_reports";
/// Time between two looks at the discovery, and at workers that have been silent.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Time without a report after which a worker is asked for one: workers publish twice a second.
const MAX_SILENCE: Duration = Duration::from_millis(2000);
/// Most time that a worker may take to answer then.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Dynamo's variable of the most bytes of a message, and its value where it is not set.
const MAX_MESSAGE: &str = "DYN_TCP_MAX_MESSAGE_SIZE";
const DEFAULT_MAX_MESSAGE: u64 = 32 << 20;
/// Most bytes of a message beside a request's body: hyper takes no longer head.
const HEAD_BYTES: u64 = 512 << 10;

/// A request on its way to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Call {
    method: String,
    /// Path and query.
    target: String,
    headers: Vec<(String, Bytes)>,
    body: Bytes,
}

/// A part of a response: its head, then its body piece by piece.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Piece {
    head: Option<Head>,
    data: Option<Bytes>,
    error: Option<DynamoError>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Head {
    status: u16,
    headers: Vec<(String, Bytes)>,
}

/// A report as it is published.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Published {
    /// The worker in the discovery.
    instance: u64,
    /// Epoch and sequence number of the report that this one is the difference to.
    since: Option<(u64, u64)>,
    report: Report,
}

impl MaybeError for Piece {
    fn from_err(error: impl std::error::Error + 'static) -> Piece {
        let error = DynamoError::from(Box::new(error) as Box<dyn std::error::Error + 'static>);
        Piece { head: None, data: None, error: Some(error) }
    }

    fn err(&self) -> Option<DynamoError> {
        self.error.clone()
    }
}

/// Joins the cluster that options and Dynamo's own variables name.
async fn runtime(common: &Common, discovery: Discovery) -> Result<DistributedRuntime> {
    check_max_body(common.max_body, std::env::var(MAX_MESSAGE).ok().as_deref())?;
    let backend = match discovery {
        Discovery::None => anyhow::bail!("--discovery none knows no runtime"),
        Discovery::File => "file",
        Discovery::Etcd => "etcd",
    };
    // ZMQ needs no server of its own; DYN_EVENT_PLANE=nats asks for NATS.
    let events = std::env::var("DYN_EVENT_PLANE").unwrap_or_else(|_| "zmq".to_owned());
    let config = DistributedConfig::from_settings_with_overrides(Some(backend), Some("tcp"), Some(&events))?;
    let runtime = DistributedRuntime::new(Runtime::from_current()?, config).await;
    runtime.with_context(|| format!("joining the cluster by discovery {backend}"))
}

/// Checks that the runtime carries requests with bodies of so many bytes, where its variable has this value.
fn check_max_body(max_body: u64, variable: Option<&str>) -> Result<()> {
    let most = variable.and_then(|bytes| bytes.parse().ok()).unwrap_or(DEFAULT_MAX_MESSAGE);
    anyhow::ensure!(
        max_body.saturating_add(HEAD_BYTES) <= most,
        "--max-body is {max_body} bytes, and the messages of Dynamo's runtime have {most}, {HEAD_BYTES} of them for a request's head: give a lower \
         --max-body, or a higher {MAX_MESSAGE} to gateways and workers",
    );
    Ok(())
}

fn component(runtime: &DistributedRuntime, namespace: &str) -> Result<Component> {
    runtime.namespace(namespace)?.component(COMPONENT)
}

/// A gateway's side of the cluster.
#[derive(Clone)]
pub(crate) struct Dynamo {
    runtime: DistributedRuntime,
    endpoint: Endpoint,
    client: Client,
    router: Arc<PushRouter<Call, Piece>>,
    /// The signature with which reports are asked for.
    signature: HeaderValue,
}

impl Dynamo {
    /// Joins the cluster as a gateway.
    ///
    /// # Errors
    /// If the discovery cannot be reached, or a setting of Dynamo's is wrong.
    pub(crate) async fn join(
        common: &Common,
        discovery: Discovery,
        signature: HeaderValue,
    ) -> Result<Dynamo> {
        let runtime = runtime(common, discovery).await?;
        let endpoint = component(&runtime, &common.discovery_namespace)?.endpoint(ENDPOINT);
        let client = endpoint.client().await?;
        // The gateway chooses and retries itself: a worker is neither chosen nor set aside here.
        let router = PushRouter::from_client_no_fault_detection(client.clone(), RouterMode::Direct).await?;
        Ok(Dynamo { runtime, endpoint, client, router: Arc::new(router), signature })
    }

    async fn report(&self, worker: WorkerId) -> Result<Box<Report>, Lost> {
        let request = Request::get("/internal/report").header(TENANT_HEADER, self.signature.clone());
        let request = request.body(Bytes::new()).map_err(|error| Lost(error.to_string()))?;
        let asked = async {
            let response = self.dispatch(worker, request).await?;
            let (head, mut pieces) = response.into_parts();
            let mut body = Vec::new();
            while let Some(piece) = pieces.next().await {
                body.extend_from_slice(&piece?);
            }
            if !head.status.is_success() {
                let text = String::from_utf8_lossy(&body);
                return Err(Lost(format!("it refuses to report: status {}: {text}", head.status)));
            }
            serde_json::from_slice(&body).map_err(|error| Lost(format!("its report is none: {error}")))
        };
        timeout(REPORT_TIMEOUT, asked).await.unwrap_or_else(|_| Err(Lost("it gives no report".to_owned())))
    }
}

#[async_trait]
impl Cluster for Dynamo {
    fn state_events(&self) -> BoxStream<'static, WorkerEvent> {
        let (sender, events) = unbounded_channel();
        tokio::spawn(Follower::new(self.clone(), sender).run());
        unfold(events, |mut events| async move { Some((events.recv().await?, events)) }).boxed()
    }

    fn has(&self, worker: WorkerId) -> bool {
        self.client.is_instance_live(worker.0)
    }

    async fn stopped(&self) {
        self.runtime.primary_token().cancelled().await;
    }

    async fn dispatch(
        &self,
        worker: WorkerId,
        request: Request<Bytes>,
    ) -> Result<Response<BodyStream>, Lost> {
        let (head, body) = request.into_parts();
        let headers = head.headers.iter();
        let headers =
            headers.map(|(name, value)| (name.to_string(), Bytes::copy_from_slice(value.as_bytes())));
        let call = Call {
            method: head.method.to_string(),
            target: head.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned(),
            headers: headers.collect(),
            body,
        };
        let lost = |error: &dyn std::fmt::Display| Lost(format!("{worker}: {error}"));
        let call = Context::new(call);
        // Dropping this future ends the worker's work, too.
        let ended = Ended(call.context());
        let pieces =
            self.router.dispatch_exact(call, worker.0).await.map_err(|error| lost(&format!("{error:#}")))?;
        response(pieces, ended).await
    }
}

/// Tells a worker that its response is not wanted any more, once this is dropped.
struct Ended(Arc<dyn AsyncEngineContext>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// The response of which these are the pieces, once its head is there.
async fn response(mut pieces: ManyOut<Piece>, ended: Ended) -> Result<Response<BodyStream>, Lost> {
    let first = pieces.next().await.ok_or_else(|| Lost("it gave no response".to_owned()))?;
    if let Some(error) = first.error {
        return Err(Lost(error.to_string()));
    }
    let head = first.head.ok_or_else(|| Lost("its response has no head".to_owned()))?;
    let mut response = Response::builder().status(head.status);
    for (name, value) in head.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_maybe_shared(value)) {
            response = response.header(name, value);
        }
    }
    let body = unfold(Some((pieces, ended)), |state| async move {
        let (mut pieces, ended) = state?;
        loop {
            let piece = pieces.next().await?;
            match (piece.error, piece.data) {
                (Some(error), _) => return Some((Err(Lost(error.to_string())), None)),
                (None, Some(data)) => return Some((Ok(data), Some((pieces, ended)))),
                (None, None) => {}
            }
        }
    });
    response.body(body.boxed()).map_err(|error| Lost(format!("its response has a wrong head: {error}")))
}

/// The longest time for which a worker that the discovery has no more may end the requests that it has.
const MAX_DRAIN: Duration = Duration::from_secs(600);

/// Follows the discovery and the published reports.
struct Follower {
    cluster: Dynamo,
    sender: UnboundedSender<WorkerEvent>,
    known: HashMap<WorkerId, Known>,
    asks: Asks,
    /// Reports that were asked for, each in a task of its own: a worker that does not answer holds up no other.
    answers: JoinSet<(WorkerId, Result<Box<Report>, Lost>)>,
}

/// A worker that the discovery has, or had.
struct Known {
    /// Epoch and sequence number of its last report; none where it takes no requests.
    seen: Option<(u64, u64)>,
    /// When that became known.
    at: Instant,
}

impl Follower {
    fn new(cluster: Dynamo, sender: UnboundedSender<WorkerEvent>) -> Follower {
        let (known, asks, answers) = (HashMap::new(), Asks::default(), JoinSet::new());
        Follower { cluster, sender, known, asks, answers }
    }

    async fn run(mut self) {
        let subscriber = EventSubscriber::for_endpoint(&self.cluster.endpoint, REPORTS).await;
        let mut published = match subscriber {
            Ok(subscriber) => Some(subscriber.typed::<Published>()),
            Err(error) => {
                tracing::warn!(%error, "reports are not heard, and are asked for instead");
                None
            }
        };
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.sender.is_closed() {
            let next = async {
                match &mut published {
                    Some(published) => published.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = next => match event {
                    Some(Ok((_, event))) => self.heard(event),
                    Some(Err(error)) => tracing::debug!(%error, "a report cannot be read"),
                    None => published = None,
                },
                Some(Ok((worker, report))) = self.answers.join_next() => self.answered(worker, report),
                _ = look.tick() => self.look(),
            }
        }
    }

    /// Takes a published report over, or asks the worker for a whole one where those before it were missed.
    fn heard(&mut self, event: Published) {
        let worker = WorkerId(event.instance);
        let Some(known) = self.known.get_mut(&worker) else {
            return self.asks.hurry(worker);
        };
        if !event.report.takes_requests() {
            return self.close(worker, "it stops, or is not ready");
        }
        let newer = (event.report.epoch, event.report.sequence);
        if known.seen.is_some() && event.since == known.seen {
            *known = Known { seen: Some(newer), at: Instant::now() };
            let _ = self.sender.send(WorkerEvent::Reported(worker, Box::new(event.report)));
        } else if known.seen.is_none_or(|seen| newer.0 != seen.0 || newer.1 > seen.1) {
            tracing::debug!(%worker, "a report was missed");
            self.ask(worker);
        }
    }

    /// Asks workers that are new or silent for reports, and lets go those that are gone.
    fn look(&mut self) {
        let there: Vec<WorkerId> = self.cluster.client.instance_ids().into_iter().map(WorkerId).collect();
        self.asks.retain(&there);
        let gone: Vec<WorkerId> =
            self.known.keys().filter(|worker| !there.contains(worker)).copied().collect();
        for worker in gone {
            // A worker leaves the discovery before it ends its last requests.
            match self.known.get(&worker) {
                Some(known) if known.seen.is_some() => {
                    self.close(worker, "the discovery does not have it any more");
                }
                Some(known) if known.at.elapsed() > MAX_DRAIN => {
                    self.leave(worker, "it has not ended its requests");
                }
                _ => {}
            }
        }
        for worker in there {
            if !self.was_heard(worker) {
                self.ask(worker);
            }
        }
    }

    /// Whether something was heard of a worker a short time ago.
    fn was_heard(&self, worker: WorkerId) -> bool {
        self.known.get(&worker).is_some_and(|known| known.at.elapsed() <= MAX_SILENCE)
    }

    /// Asks a worker for a whole report, unless it is being asked.
    fn ask(&mut self, worker: WorkerId) {
        if self.asks.begin(worker) {
            let cluster = self.cluster.clone();
            self.answers.spawn(async move {
                // An ask that ended without a word would be under way for ever.
                let report = AssertUnwindSafe(cluster.report(worker)).catch_unwind().await;
                (worker, report.unwrap_or_else(|_| Err(Lost("asking it panicked".to_owned()))))
            });
        }
    }

    /// Takes over a report that was asked for, or its absence.
    fn answered(&mut self, worker: WorkerId, report: Result<Box<Report>, Lost>) {
        match report {
            Ok(report) => {
                if !self.asks.answered(worker) {
                    return;
                }
                if !report.takes_requests() {
                    return self.close(worker, "it stops, or is not ready");
                }
                let told = (report.epoch, report.sequence);
                let seen = self.known.get(&worker).and_then(|known| known.seen);
                // Published reports may have come meanwhile.
                if seen.is_none_or(|seen| seen.0 != told.0 || seen.1 <= told.1) {
                    self.known.insert(worker, Known { seen: Some(told), at: Instant::now() });
                    let _ = self.sender.send(WorkerEvent::Reported(worker, report));
                }
            }
            Err(Lost(reason)) => {
                if self.asks.failed(worker, &reason) {
                    tracing::warn!(%worker, reason, "a worker cannot be asked");
                }
                if !self.was_heard(worker) {
                    self.leave(worker, &reason);
                }
            }
        }
    }

    fn close(&mut self, worker: WorkerId, reason: &str) {
        let known = self.known.insert(worker, Known { seen: None, at: Instant::now() });
        if known.is_some_and(|known| known.seen.is_some()) {
            tracing::info!(%worker, reason, "a worker takes no more requests");
            let _ = self.sender.send(WorkerEvent::Closed(worker));
        }
    }

    fn leave(&mut self, worker: WorkerId, reason: &str) {
        if self.known.remove(&worker).is_some() {
            tracing::info!(%worker, reason, "a worker is gone");
            let _ = self.sender.send(WorkerEvent::Left(worker));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_fit_into_messages() {
        for (max_body, variable, fits) in [
            (16 << 20, None, true),
            (32 << 20, None, false),
            (32 << 20, Some("67108864"), true),
            (16 << 20, Some("16777216"), false),
            (u64::MAX, None, false),
        ] {
            assert_eq!(check_max_body(max_body, variable).is_ok(), fits, "{max_body} {variable:?}");
        }
    }
}
