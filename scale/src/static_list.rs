//! A cluster without a runtime: a fixed list of workers' addresses, requests by HTTP, and reports that are polled.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{HeaderValue, Request, Response, Uri};
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt as _, select_all, unfold};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use refrain_server::{Report, TENANT_HEADER};
use tokio::time::{sleep, timeout};

use crate::cluster::{BodyStream, Cluster, Lost, WorkerEvent, WorkerId};
use crate::complaints::Complaints;

/// Time between two reports of a worker.
const POLL_EVERY: Duration = Duration::from_millis(500);
/// Most time that a report may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Reports in a row that may time out before a worker counts as gone: a busy machine is slow at times.
const MAX_TIMEOUTS: u32 = 2;
/// Most time to connect to a worker: more than [`REPORT_TIMEOUT`], so that a machine that is gone counts as silent, and not as one that
/// refuses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Silence on a connection after which the worker's machine is asked whether it is there, and the time between two such questions.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(5));
/// Such questions without an answer that break a connection off.
const KEEPALIVE_RETRIES: u32 = 3;

/// Workers at fixed addresses.
pub(crate) struct StaticList {
    workers: Vec<Authority>,
    client: Client<HttpConnector, Full<Bytes>>,
    /// The signature with which reports are asked for.
    signature: HeaderValue,
}

/// A worker's address that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is no address of a worker: give it as http://HOST:PORT")]
pub(crate) struct InvalidAddress {
    address: String,
}

/// A worker that is polled.
struct Polled {
    id: WorkerId,
    authority: Authority,
    client: Client<HttpConnector, Full<Bytes>>,
    signature: HeaderValue,
    /// Epoch and sequence number of the last report; none where the worker takes no requests.
    seen: Option<(u64, u64)>,
    /// Whether the worker was told of, and not that it left.
    is_known: bool,
    timeouts: u32,
    complaints: Complaints,
}

/// The reason for which a worker gave no report.
enum NoReport {
    TimedOut,
    Failed(String),
}

impl StaticList {
    /// The workers at `addresses`. `signature` is the [`TENANT_HEADER`] with which reports are asked for.
    ///
    /// # Errors
    /// If an address is no URL with a host, or of another scheme than `http`.
    pub(crate) fn new(addresses: &[String], signature: HeaderValue) -> Result<StaticList, InvalidAddress> {
        let parse = |address: &String| {
            let uri = address.trim_end_matches('/').parse::<Uri>().ok().map(Uri::into_parts);
            let uri = uri.filter(|uri| uri.scheme.as_ref().is_none_or(|scheme| *scheme == Scheme::HTTP));
            let bare = uri.filter(|uri| uri.path_and_query.as_ref().is_none_or(|path| path == "/"));
            bare.and_then(|uri| uri.authority).ok_or_else(|| InvalidAddress { address: address.clone() })
        };
        let workers = addresses.iter().map(parse).collect::<Result<_, _>>()?;
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        // An answer that is computed keeps its connection silent for minutes.
        connector.set_keepalive(Some(KEEPALIVE.0));
        connector.set_keepalive_interval(Some(KEEPALIVE.1));
        connector.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(StaticList { workers, client, signature })
    }
}

#[async_trait]
impl Cluster for StaticList {
    fn state_events(&self) -> BoxStream<'static, WorkerEvent> {
        let polled = |(index, authority): (usize, &Authority)| {
            let worker = Polled {
                id: WorkerId(index as u64),
                authority: authority.clone(),
                client: self.client.clone(),
                signature: self.signature.clone(),
                seen: None,
                is_known: false,
                timeouts: 0,
                complaints: Complaints::default(),
            };
            unfold((worker, false), |(mut worker, waits)| async move {
                if waits {
                    sleep(POLL_EVERY).await;
                }
                loop {
                    match worker.poll().await {
                        Some(event) => return Some((event, (worker, true))),
                        None => sleep(POLL_EVERY).await,
                    }
                }
            })
            .boxed()
        };
        select_all(self.workers.iter().enumerate().map(polled)).boxed()
    }

    fn members(&self) -> Vec<WorkerId> {
        (0..self.workers.len() as u64).map(WorkerId).collect()
    }

    async fn dispatch(
        &self,
        worker: WorkerId,
        request: Request<Bytes>,
    ) -> Result<Response<BodyStream>, Lost> {
        let authority =
            self.workers.get(worker.0 as usize).ok_or_else(|| Lost("it is not listed".to_owned()))?;
        send(&self.client, authority, request).await
    }
}

/// Sends a request to the server at `authority`.
async fn send(
    client: &Client<HttpConnector, Full<Bytes>>,
    authority: &Authority,
    request: Request<Bytes>,
) -> Result<Response<BodyStream>, Lost> {
    let lost = |error: &dyn std::error::Error| Lost(format!("{authority}: {}", with_causes(error)));
    let (mut parts, body) = request.into_parts();
    let mut uri = parts.uri.into_parts();
    uri.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    (uri.scheme, uri.authority) = (Some(Scheme::HTTP), Some(authority.clone()));
    parts.uri = Uri::from_parts(uri).map_err(|error| lost(&error))?;
    let request = Request::from_parts(parts, Full::new(body));
    let response = client.request(request).await.map_err(|error| lost(&error))?;
    let authority = authority.clone();
    Ok(response.map(|body| {
        let piece = move |piece: Result<Bytes, hyper::Error>| {
            piece.map_err(|error| Lost(format!("{authority}: {}", with_causes(&error))))
        };
        body.into_data_stream().map(piece).boxed()
    }))
}

/// An error with the errors that caused it.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

impl Polled {
    /// Asks for a report; none where nothing is known anew.
    async fn poll(&mut self) -> Option<WorkerEvent> {
        let asked = timeout(REPORT_TIMEOUT, self.report()).await;
        match asked.unwrap_or(Err(NoReport::TimedOut)) {
            Ok(report) if report.takes_requests() => {
                (self.seen, self.timeouts) = (Some((report.epoch, report.sequence)), 0);
                self.is_known = true;
                self.complaints.settle();
                return Some(WorkerEvent::Reported(self.id, report));
            }
            Err(NoReport::TimedOut) if self.timeouts + 1 < MAX_TIMEOUTS => {
                self.timeouts += 1;
                return None;
            }
            Err(NoReport::TimedOut) => {
                self.complain("it is silent");
                (self.seen, self.timeouts) = (None, 0);
                return std::mem::take(&mut self.is_known).then_some(WorkerEvent::Left(self.id));
            }
            Ok(report) if self.seen.is_some() => {
                tracing::info!(worker = %self.authority, report.stopping, "a worker takes no requests now");
            }
            // A worker that ends its last requests takes no more connections, and one that has ended has broken them off.
            Err(NoReport::Failed(reason)) => self.complain(&reason),
            Ok(_) => {}
        }
        self.timeouts = 0;
        self.seen.take().map(|_| WorkerEvent::Closed(self.id))
    }

    /// Logs why the worker gives no report.
    fn complain(&mut self, reason: &str) {
        if self.complaints.is_due(reason) {
            tracing::warn!(worker = %self.authority, reason, "a worker cannot be asked");
        }
    }

    async fn report(&self) -> Result<Box<Report>, NoReport> {
        let failed = |error: &dyn std::fmt::Display| NoReport::Failed(error.to_string());
        let seen = self.seen.map(|(epoch, sequence)| format!("?epoch={epoch}&sequence={sequence}"));
        let request = Request::get(format!("/internal/report{}", seen.unwrap_or_default()))
            .header(TENANT_HEADER, self.signature.clone())
            .body(Bytes::new());
        let request = request.map_err(|error| failed(&error))?;
        let response = send(&self.client, &self.authority, request).await.map_err(|error| failed(&error))?;
        let (head, mut body) = response.into_parts();
        let mut bytes = Vec::new();
        while let Some(piece) = body.next().await {
            bytes.extend_from_slice(&piece.map_err(|error| failed(&error))?);
        }
        if !head.status.is_success() {
            let text = String::from_utf8_lossy(&bytes);
            return Err(NoReport::Failed(format!("it refuses to report: status {}: {text}", head.status)));
        }
        serde_json::from_slice(&bytes).map_err(|error| failed(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::{Arc, Mutex};

    use axum::Json;
    use axum::http::header;
    use axum::routing::get;
    use refrain_server::{HeldChunks, Listener, ModelCard, Rates};
    use tokio::net::{TcpSocket, TcpStream};
    use tokio::task::JoinHandle;

    use super::*;

    /// A worker's report that it takes requests.
    fn report() -> Report {
        let (name, fingerprint, version) = ("m".into(), "f".into(), "0".into());
        let model = ModelCard { name, fingerprint, kv_bytes_per_token: 1, version, numerics: "n".into() };
        let (chunks, rates) = (HeldChunks::All(Vec::new()), Rates::default());
        let (epoch, sequence, running, waiting, stopping, ready) = (1, 1, 0, 0, false, true);
        Report { epoch, sequence, chunks, running, waiting, rates, stopping, ready, model }
    }

    /// A worker that gives a report, which may be changed, with this header `connection`, and the events of a list of it.
    async fn listed(
        told: &Arc<Mutex<Report>>,
        connection: &'static str,
    ) -> (SocketAddr, JoinHandle<()>, BoxStream<'static, WorkerEvent>) {
        let told = told.clone();
        let answer =
            move || async move { ([(header::CONNECTION, connection)], Json(told.lock().unwrap().clone())) };
        let routes = axum::Router::new().route("/internal/report", get(answer));
        let listener = Listener::bind(([127, 0, 0, 1], 0).into(), None).await.unwrap();
        let address = listener.address().unwrap();
        let minute = Duration::from_secs(60);
        let server =
            tokio::spawn(listener.serve_routes(routes, (minute, minute), std::future::pending(), async {}));
        let list = StaticList::new(&[format!("http://{address}")], HeaderValue::from_static("x")).unwrap();
        (address, server, list.state_events())
    }

    #[tokio::test]
    async fn a_worker_that_stops_or_is_not_ready_is_closed() {
        let told = Arc::new(Mutex::new(report()));
        let (_, server, mut events) = listed(&told, "keep-alive").await;
        assert!(matches!(events.next().await, Some(WorkerEvent::Reported(..))));
        let tell = |stopping, ready| {
            let mut told = told.lock().unwrap();
            (told.stopping, told.ready) = (stopping, ready);
        };
        for (stopping, ready) in [(true, true), (false, false)] {
            tell(stopping, ready);
            let next = events.next().await;
            assert!(matches!(next, Some(WorkerEvent::Closed(WorkerId(0)))), "{next:?}");
            tell(false, true);
            assert!(matches!(events.next().await, Some(WorkerEvent::Reported(..))));
        }
        server.abort();
    }

    /// A listener whose queue is full drops what would open a further connection, as a machine does that is gone.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_worker_whose_machine_is_gone_leaves() {
        let (address, server, mut events) = listed(&Arc::new(Mutex::new(report())), "close").await;
        assert!(matches!(events.next().await, Some(WorkerEvent::Reported(..))));
        server.abort();
        let _ = server.await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let _listener = socket.listen(1).unwrap();
        let mut queued = Vec::new();
        while let Ok(connected) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
            queued.push(connected.unwrap());
        }
        let left = async { while !matches!(events.next().await, Some(WorkerEvent::Left(_))) {} };
        timeout(Duration::from_secs(30), left).await.unwrap();
    }

    /// The kernel's list of connections tells which timer each of them has; 2 is that of keepalive.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn connections_to_workers_are_kept_alive() {
        let (address, server, mut events) = listed(&Arc::new(Mutex::new(report())), "keep-alive").await;
        assert!(matches!(events.next().await, Some(WorkerEvent::Reported(..))));
        let connections = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let remote = format!(":{:04X}", address.port());
        let timer = connections.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            (fields[2].ends_with(&remote) && fields[3] == "01").then(|| fields[5][..2].to_owned())
        });
        assert_eq!(timer.as_deref(), Some("02"), "{connections}");
        server.abort();
    }
}
