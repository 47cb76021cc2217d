//! Connections: accepted, encrypted where TLS is configured, bounded in number and time, and closed gracefully.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::counter::Counter;
use refrain::store::{max_open_files, max_reader_files};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;

use crate::api::router;
use crate::api_error::ApiError;
use crate::app::App;
use crate::client_stream::{ClientStream, ReadAhead};
use crate::error::Error;
use crate::permits::Permits;
use crate::request_id::{REQUEST_ID, request_id};
use crate::request_span::PROBES;
use crate::tls::Tls;

/// Most open connections for requests of every kind.
const MAX_CONNECTIONS: usize = 1024;

/// Files beside connections and those of chunks: databases, pipes, and files that are read or written for a moment.
const OTHER_FILES: usize = 64;

/// Most open connections beyond [`MAX_CONNECTIONS`], on which [`PROBES`] are answered and all else is refused: a server that is busy must not look
/// dead. Further connections wait to be accepted.
const PROBE_CONNECTIONS: usize = 64;

/// Most of the [`PROBE_CONNECTIONS`] that come from one address: a client that opens ever more leaves the others to those who probe. A proxy in front
/// of the server gets no answer but a refusal or a probe's on them.
const PROBE_CONNECTIONS_OF_PEER: usize = PROBE_CONNECTIONS / 2;

/// Most time from a response to the next request on its connection. Google's balancers use a connection again for 600 seconds and others for
/// less, and a request that is sent while its connection is being closed is lost.
const KEEP_ALIVE: Duration = Duration::from_secs(620);

/// Most time without a byte in which a client's stream is read on behind the last response of its connection.
const LINGER: Duration = Duration::from_secs(2);

/// Seconds after which a request can be sent again that was refused for the number of connections.
const RETRY_CONNECTION: u64 = 5;

/// Time between two looks at the files of the certificate.
const RENEWAL: Duration = Duration::from_secs(60);

/// The least time for the last events of streams, once nothing is computed any more, and the most for what then still waits for a disk or an object
/// store.
const LAST_EVENTS: Duration = Duration::from_secs(5);

/// A bound address.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    tls: Option<Tls>,
    max_connections: usize,
    /// Requests that were refused for the number of connections.
    refused: Counter,
    /// Time between two looks at the files of the certificate.
    pub(crate) renewal: Duration,
    /// [`LAST_EVENTS`].
    last_events: Duration,
}

impl Listener {
    /// Listens on an address, with TLS where a certificate is given.
    ///
    /// # Errors
    /// If the address is in use or is not one of this machine's.
    pub async fn bind(address: SocketAddr, tls: Option<Tls>) -> Result<Listener, Error> {
        let listener = TcpListener::bind(address).await.map_err(|source| Error::Bind { address, source })?;
        let files = max_open_files();
        let max_connections = connections_within(files, max_reader_files());
        if max_connections < MAX_CONNECTIONS {
            tracing::warn!(
                "the system lets the program have {files} files open: it takes {max_connections} connections at a time, and {MAX_CONNECTIONS} where the \
                 hard limit (ulimit -Hn) is higher"
            );
        }
        Ok(Listener {
            listener,
            tls,
            max_connections,
            refused: Counter::default(),
            renewal: RENEWAL,
            last_events: LAST_EVENTS,
        })
    }

    /// Counts requests that are refused for the number of connections.
    pub fn counting(self, refused: Counter) -> Listener {
        Listener { refused, ..self }
    }

    /// The bound address; its port is the one that the system chose for port 0.
    ///
    /// # Errors
    /// If the system cannot tell it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` completes, then accepts no more connections and waits for running requests, for at most
    /// [`Options::shutdown_timeout`], and some seconds for the disk and the object store. Work that still waits for these then goes on on threads
    /// of its own, and the next start does what it leaves.
    ///
    /// [`Options::shutdown_timeout`]: crate::Options::shutdown_timeout
    pub async fn serve(self, app: App, stop: impl Future<Output = ()>) {
        let options = &app.state.options;
        let (router, times) = (router(app.clone()), (options.body_timeout, options.shutdown_timeout));
        let drain = async {
            let app = app.clone();
            let drained = tokio::task::spawn_blocking(move || app.drain());
            let _ = drained.await;
        };
        let status = StatusCode::SERVICE_UNAVAILABLE.as_u16();
        let refused = app.state.metrics.requests.responses.get_or_create_owned(&[("status", status)]);
        let last_events = self.last_events;
        self.counting(refused).serve_routes(router, times, stop, drain).await;
        // An ingest that was not in the scheduler any more may have stored its documents since. The thread that brings documents in line ends with
        // the last of the application.
        let last = tokio::task::spawn_blocking(move || app.state.engine.store().flush());
        let _ = timeout(last_events, last).await;
    }

    /// Serves routes until `stop` completes, then accepts no more connections, closes those that are idle, and waits for `drain`, and for the
    /// ends of responses until `shutdown` is over, but for some seconds in any case. A client has `limit` for the head of its first request, and
    /// for taking what it is sent.
    pub async fn serve_routes(
        self,
        router: Router,
        (limit, shutdown): (Duration, Duration),
        stop: impl Future<Output = ()>,
        drain: impl Future<Output = ()>,
    ) {
        let permits = Arc::new(Semaphore::new(self.max_connections + PROBE_CONNECTIONS));
        let router = self.kept_while_few(router, &permits);
        let probed = router.clone().layer(from_fn_with_state(self.refused.clone(), refuse_all_but_probes));
        let probing = Permits::new(self.max_connections + PROBE_CONNECTIONS, PROBE_CONNECTIONS_OF_PEER);
        let graceful = GracefulShutdown::new();
        let mut renewing = JoinSet::new();
        if let Some(tls) = self.tls.clone() {
            renewing.spawn(tls.follow(self.renewal));
        }
        let mut stop = pin!(stop);
        loop {
            let accept = async {
                let permit = permits.clone().acquire_owned().await;
                (self.listener.accept().await, permit)
            };
            tokio::select! {
                () = &mut stop => break,
                (accepted, permit) = accept => match (accepted, permit) {
                    (Ok((stream, _)), Ok(permit)) if permits.available_permits() >= PROBE_CONNECTIONS => {
                        self.spawn(stream, permit, &router, limit, &graceful);
                    }
                    // One whose address has its part is closed.
                    (Ok((stream, peer)), Ok(permit)) => {
                        if let Some(probe) = probing.acquire(&peer.ip().to_string()).now_or_never() {
                            self.spawn(stream, (permit, probe), &probed, limit, &graceful);
                        }
                    }
                    // Most likely too many files are open, and some will close soon.
                    (Err(error), _) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(Duration::from_millis(100)).await;
                    }
                    (_, Err(_)) => break,
                },
            }
        }
        drop(self.listener);
        let (until, last_events) = (Instant::now() + shutdown, self.last_events);
        // Connections close before `drain` is over: a request on one of them would be refused, and a client would try it there again and again.
        let closed = tokio::spawn(graceful.shutdown());
        let _ = timeout_at(until + last_events, drain).await;
        // Files may still be read and documents stored, and the last events of streams may not have been sent yet.
        let until = until.max(Instant::now() + last_events);
        let _ = timeout_at(until, closed).await;
    }

    /// Routes whose responses close their connections while fewer than a quarter of `permits` are free, so that idle connections leave room for
    /// others.
    fn kept_while_few(&self, router: Router, permits: &Arc<Semaphore>) -> Router {
        let (permits, least) = (permits.clone(), PROBE_CONNECTIONS + self.max_connections / 4);
        router.layer(map_response(move |mut response: Response| {
            if permits.available_permits() < least {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            std::future::ready(response)
        }))
    }

    /// Serves a connection in a task of its own, which holds `permit` until the connection ends.
    fn spawn(
        &self,
        stream: TcpStream,
        permit: impl Send + 'static,
        router: &Router,
        limit: Duration,
        graceful: &GracefulShutdown,
    ) {
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let watcher = graceful.watcher();
        match self.tls.as_ref().map(Tls::config) {
            None => _ = tokio::spawn(serve_connection(stream, router, limit, watcher, permit)),
            Some(tls) => {
                tokio::spawn(async move {
                    // A client that does not finish the handshake in time is disconnected.
                    if let Ok(Ok(stream)) = timeout(limit, TlsAcceptor::from(tls).accept(stream)).await {
                        serve_connection(stream, router, limit, watcher, permit).await;
                    }
                });
            }
        }
    }
}

/// Connections beside those of probes for which a process of so many files at most, of which chunks may take `readers`, has room.
fn connections_within(files: usize, readers: usize) -> usize {
    files.saturating_sub(PROBE_CONNECTIONS + readers + OTHER_FILES).clamp(1, MAX_CONNECTIONS)
}

/// Answers [`PROBES`], refuses all other requests, and has the connection closed.
async fn refuse_all_but_probes(State(refused): State<Counter>, request: Request, next: Next) -> Response {
    let mut response = if PROBES.contains(&request.uri().path()) {
        next.run(request).await
    } else {
        refused.inc();
        let (id, path) = (request_id(request.headers()), request.uri().path());
        tracing::info!(id = id.to_str().unwrap_or_default(), path, "refused: too many connections are open");
        let message = "the server has as many open connections as it takes: send the request again later";
        let mut error =
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("too_many_connections");
        error.retry_after = Some(RETRY_CONNECTION);
        ([(REQUEST_ID, id)], error).into_response()
    };
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Serves one connection until it ends, and takes what its client still sends.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limit: Duration,
    watcher: hyper_util::server::graceful::Watcher,
    permit: impl Send,
) {
    let stream = ClientStream::new(stream, limit);
    let mut client = stream.clone();
    // The connection is dropped first: a shutdown does not wait for the rest.
    if serve_requests(stream, router, limit, watcher).await {
        let _ = timeout(limit, discard_rest(&mut client)).await;
    }
    drop(permit);
}

/// Serves the requests of one connection, and says whether it has ended by itself: its last response is sent, and nothing follows.
async fn serve_requests(
    stream: ClientStream<impl AsyncRead + AsyncWrite + Unpin + Send + 'static>,
    router: Router,
    limit: Duration,
    watcher: hyper_util::server::graceful::Watcher,
) -> bool {
    let client = stream.clone();
    let has_asked = Arc::new(AtomicBool::new(false));
    let (router, asked) = (TowerToHyperService::new(router), has_asked.clone());
    let service = service_fn(move |request| {
        asked.store(true, Relaxed);
        router.call(request)
    });
    // The time for a head is that of an idle connection too.
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(KEEP_ALIVE)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(watcher.watch(connection));
    let mut first_head = pin!(sleep(limit));
    poll_fn(|context| {
        loop {
            // A client may close its connection at any time, which is no error of the server.
            if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                return Poll::Ready(ended.is_ok());
            }
            if !has_asked.load(Relaxed) && first_head.as_mut().poll(context).is_ready() {
                return Poll::Ready(false);
            }
            match client.poll_read_ahead(context) {
                Poll::Ready(ReadAhead::Bytes) => {}
                Poll::Ready(ReadAhead::End) => return Poll::Ready(false),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}

/// Reads and discards what a client still sends, until it closes its stream or sends nothing for [`LINGER`]. The system resets a connection that is
/// closed with bytes unread, such as those of a body that is too large, and a client that is reset while it sends may never see its response.
async fn discard_rest(client: &mut (impl AsyncRead + Unpin)) {
    let mut bytes = vec![0; 16 << 10];
    while matches!(timeout(LINGER, client.read(&mut bytes)).await, Ok(Ok(1..))) {}
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use redb::{Builder, ConcurrencyMode};
    use refrain::store::{Scope, Store};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpSocket;
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
    use tokio::sync::oneshot;

    use super::*;
    use crate::options::Options;
    use crate::testing::engine_of;

    #[test]
    fn connections_leave_files_to_probes_and_chunks() {
        let connections = |files: usize| connections_within(files, (files / 4).min(256));
        let counts = [usize::MAX, 1408, 1024, 300, 64].map(connections);
        assert_eq!(counts, [1024, 1024, 640, 97, 1]);
    }

    /// A request that no job is of, such as one whose files are being read, has the time of the shutdown.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_that_the_scheduler_does_not_know_ends_within_the_shutdown() {
        let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        let address = listener.address().unwrap();
        let ((began, mut begun), (stop, stopped)) = (unbounded_channel(), oneshot::channel::<()>());
        let answer = move || async move {
            began.send(()).unwrap();
            sleep(LAST_EVENTS + Duration::from_millis(500)).await;
            "done"
        };
        let (routes, minute) = (Router::new().route("/", get(answer)), Duration::from_secs(60));
        let stop_of = async { stopped.await.unwrap() };
        let served = tokio::spawn(listener.serve_routes(routes, (minute, minute), stop_of, async {}));
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        begun.recv().await.unwrap();
        stop.send(()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("done"), "{answer}");
        served.await.unwrap();
    }

    /// Another process that writes to the index, or is stopped at it, does not keep the server from ending.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_disk_that_stands_still_holds_up_no_shutdown() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), 1 << 28).unwrap();
        // The index is opened first: opening it waits for those who write.
        assert!(store.list(Scope::All).unwrap().chunks.is_empty());
        let options = Options { shutdown_timeout: Duration::ZERO, ..Options::new("tiny".to_owned()) };
        let app = App::new(engine_of(store.clone()), options).unwrap();
        let mut index = Builder::new();
        let index = index.set_concurrency_mode(ConcurrencyMode::MultiWriter);
        let index = index.create(folder.path().join("index.redb")).unwrap();
        let other_writer = index.begin_write().unwrap();
        // A use that is to be written.
        store.renew(&["0".repeat(64).parse().unwrap()]);
        let mut listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        listener.last_events = Duration::from_millis(20);
        let served = timeout(Duration::from_secs(20), listener.serve(app, async {})).await;
        // A thread that waits would keep the test's runtime from ending.
        other_writer.abort().unwrap();
        served.expect("the server waits for the disk");
    }

    /// A client that leaves is noticed, also where it has sent bytes behind its request.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_ends_when_its_client_leaves() {
        struct Ends(UnboundedSender<()>);
        impl Drop for Ends {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        let address = listener.address().unwrap();
        let ((began, mut begun), (ends, mut ended)) = (unbounded_channel(), unbounded_channel());
        let answer = move || async move {
            let _ends = Ends(ends);
            began.send(()).unwrap();
            std::future::pending::<()>().await;
        };
        let (routes, minute) = (Router::new().route("/", get(answer)), Duration::from_secs(60));
        let _served =
            tokio::spawn(listener.serve_routes(routes, (minute, minute), std::future::pending(), async {}));
        let request = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        for behind in ["", "\r\n", request] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(format!("{request}{behind}").as_bytes()).await.unwrap();
            begun.recv().await.unwrap();
            drop(client);
            timeout(minute / 2, ended.recv()).await.unwrap_or_else(|_| panic!("{behind:?}"));
        }
    }
    /// Everything that a client reads until its connection is closed.
    async fn rest(client: &mut (impl AsyncRead + Unpin)) -> String {
        let mut text = String::new();
        let read = timeout(Duration::from_secs(3600), client.read_to_string(&mut text)).await;
        read.expect("the connection stays open").unwrap();
        text
    }

    /// The first response that a client reads, which ends with `end`.
    async fn response(client: &mut (impl AsyncRead + Unpin), end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let byte = client.read_u8().await.unwrap_or_else(|error| panic!("{error}: {text}"));
            text.push(char::from(byte));
        }
        text
    }

    /// No request comes to a server that stops, by connections that were open before.
    #[tokio::test(flavor = "multi_thread")]
    async fn connections_close_when_the_server_stops() {
        let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        let address = listener.address().unwrap();
        let ((began, mut begun), (release, released)) = (unbounded_channel(), oneshot::channel::<()>());
        let released = Arc::new(tokio::sync::Mutex::new(Some(released)));
        let slow = move || async move {
            began.send(()).unwrap();
            let released = released.lock().await.take().unwrap();
            released.await.unwrap();
            "slow"
        };
        let routes = Router::new().route("/", get("fast")).route("/slow", get(slow));
        let ((stop, stopped), (drained, drain)) = (oneshot::channel::<()>(), oneshot::channel::<()>());
        let minute = Duration::from_secs(60);
        let served = tokio::spawn(listener.serve_routes(
            routes,
            (minute, minute),
            async { stopped.await.unwrap() },
            async { drain.await.unwrap() },
        ));
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        response(&mut idle, "fast").await;
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        begun.recv().await.unwrap();
        stop.send(()).unwrap();
        let closed = timeout(minute / 2, idle.read(&mut [0])).await;
        assert_eq!(closed.expect("an idle connection is closed before the requests have ended").unwrap(), 0);
        release.send(()).unwrap();
        let answer =
            timeout(minute / 2, rest(&mut busy)).await.expect("a busy connection closes behind its response");
        assert!(answer.ends_with("slow"), "{answer}");
        drained.send(()).unwrap();
        served.await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn probes_are_answered_where_connections_are_many() {
        let mut listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        listener.max_connections = 2;
        let refused = Counter::default();
        let listener = listener.counting(refused.clone());
        let address = listener.address().unwrap();
        let routes = Router::new().route("/", get("fine")).route("/health", get("fine"));
        let minute = Duration::from_secs(60);
        let _served =
            tokio::spawn(listener.serve_routes(routes, (minute, minute), std::future::pending(), async {}));
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let answer = response(&mut first, "fine").await;
        assert!(!answer.contains("connection: close"), "{answer}");
        let _second = TcpStream::connect(address).await.unwrap();
        for (path, status) in [("/", "503"), ("/health", "200")] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
            let answer =
                timeout(minute / 2, rest(&mut client)).await.expect("a further connection is closed");
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
            assert_eq!(answer.contains("x-request-id: req-"), status == "503", "{path}: {answer}");
        }
        assert_eq!(refused.get(), 1);
    }

    /// All addresses of 127.0.0.0/8 are this machine's own.
    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread")]
    async fn connections_of_one_address_leave_some_to_the_probes_of_others() {
        let mut listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None).await.unwrap();
        listener.max_connections = 2;
        let address = listener.address().unwrap();
        let routes = Router::new().route("/health", get("fine"));
        let minute = Duration::from_secs(60);
        let _served =
            tokio::spawn(listener.serve_routes(routes, (minute, minute), std::future::pending(), async {}));
        let mut silent = Vec::new();
        for _ in 0..2 + PROBE_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let other = TcpSocket::new_v4().unwrap();
        other.bind(SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        let mut other = other.connect(address).await.unwrap();
        other.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let answer = timeout(minute / 4, rest(&mut other)).await.expect("it is not accepted");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let closed = timeout(minute / 4, rest(silent.last_mut().unwrap())).await;
        assert_eq!(closed.expect("it stays open"), "");
    }

    /// Time is simulated, so that what passes is what the connection was kept for.
    #[tokio::test(start_paused = true)]
    async fn a_connection_outlives_the_idle_ones_of_balancers() {
        let limit = Duration::from_secs(30);
        for (asks, (least, most)) in [(false, (30, 31)), (true, (601, 700))] {
            let (mut client, server) = tokio::io::duplex(1 << 16);
            let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
            let (routes, graceful) = (Router::new().route("/", get("fine")), GracefulShutdown::new());
            tokio::spawn(serve_connection(server, routes, limit, graceful.watcher(), permit));
            if asks {
                client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
                response(&mut client, "fine").await;
            }
            let begin = Instant::now();
            rest(&mut client).await;
            let kept = begin.elapsed().as_secs();
            assert!((least..=most).contains(&kept), "{asks}: {kept} s");
        }
    }

    /// A client that reads once it has sent all of its body would lose the response in a connection that breaks before. Time is simulated.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_refused_is_taken_to_its_end() {
        let minute = Duration::from_secs(60);
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let refuse = || async { (StatusCode::PAYLOAD_TOO_LARGE, "large") };
        let (routes, graceful) = (Router::new().route("/", post(refuse)), GracefulShutdown::new());
        let served = tokio::spawn(serve_connection(server, routes, minute, graceful.watcher(), ()));
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 1 << 20);
        client.write_all(head.as_bytes()).await.unwrap();
        let answer = rest(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 413") && answer.ends_with("large"), "{answer}");
        // A shutdown waits for no rest.
        timeout(Duration::from_secs(1), graceful.shutdown()).await.unwrap();
        client.write_all("x".repeat(1 << 20).as_bytes()).await.unwrap();
        let begin = Instant::now();
        served.await.unwrap();
        assert!(begin.elapsed() < minute / 2, "it waits for a client that sends nothing");
    }
}
