//! Connections: accepted, encrypted where TLS is configured, bounded in number and time, and closed gracefully.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;

use crate::api::router;
use crate::app::App;
use crate::client_stream::{ClientStream, ReadAhead};
use crate::error::Error;

/// Most open connections; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 1024;

/// The least time for the last events of streams, once nothing is computed any more.
const LAST_EVENTS: Duration = Duration::from_secs(5);

/// A bound address.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
}

/// The TLS configuration of a certificate chain and its private key, from PEM files.
///
/// # Errors
/// If a file cannot be read, or key and certificate do not belong together.
pub fn tls(certificates: &Path, key: &Path) -> Result<Arc<ServerConfig>, Error> {
    let wrong = |path: &Path, reason: &dyn std::fmt::Display| Error::Tls {
        path: path.display().to_string(),
        reason: reason.to_string(),
    };
    let chain = CertificateDer::pem_file_iter(certificates).map_err(|error| wrong(certificates, &error))?;
    let chain = chain.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(certificates, &error))?;
    let own = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(certificates, &error))?;
    let config = config.with_no_client_auth().with_single_cert(chain, own);
    Ok(Arc::new(config.map_err(|error| wrong(certificates, &error))?))
}

impl Listener {
    /// Listens on an address, with TLS where a configuration is given.
    ///
    /// # Errors
    /// If the address is in use or is not one of this machine's.
    pub async fn bind(address: SocketAddr, tls: Option<Arc<ServerConfig>>) -> Result<Listener, Error> {
        let listener = TcpListener::bind(address).await.map_err(|source| Error::Bind { address, source })?;
        Ok(Listener { listener, tls })
    }

    /// The bound address; its port is the one that the system chose for port 0.
    ///
    /// # Errors
    /// If the system cannot tell it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` completes, then accepts no more connections and waits for running requests, for at most
    /// [`Options::shutdown_timeout`].
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
        self.serve_routes(router, times, stop, drain).await;
        // An ingest that was not in the scheduler any more may have stored its documents since.
        let _ = tokio::task::spawn_blocking(move || app.state.engine.store().flush()).await;
    }

    /// Serves routes until `stop` completes, then accepts no more connections, and waits for `drain`, and for the ends of responses until
    /// `shutdown` is over, but for some seconds in any case. A client has `limit` for the head of a request, and for taking what it is sent.
    pub async fn serve_routes(
        self,
        router: Router,
        (limit, shutdown): (Duration, Duration),
        stop: impl Future<Output = ()>,
        drain: impl Future<Output = ()>,
    ) {
        let (graceful, permits) = (GracefulShutdown::new(), Arc::new(Semaphore::new(MAX_CONNECTIONS)));
        let mut stop = pin!(stop);
        loop {
            let accept = async {
                let permit = permits.clone().acquire_owned().await;
                (self.listener.accept().await, permit)
            };
            tokio::select! {
                () = &mut stop => break,
                (accepted, permit) = accept => match (accepted, permit) {
                    (Ok((stream, _)), Ok(permit)) => self.spawn(stream, permit, &router, limit, &graceful),
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
        let until = Instant::now() + shutdown;
        drain.await;
        // Files may still be read and documents stored, and the last events of streams may not have been sent yet.
        let until = until.max(Instant::now() + LAST_EVENTS);
        let _ = timeout_at(until, graceful.shutdown()).await;
    }

    /// Serves a connection in a task of its own, which holds `permit` until the connection ends.
    fn spawn(
        &self,
        stream: TcpStream,
        permit: OwnedSemaphorePermit,
        router: &Router,
        limit: Duration,
        graceful: &GracefulShutdown,
    ) {
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let watcher = graceful.watcher();
        match self.tls.clone() {
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

/// Serves one connection until it ends.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limit: Duration,
    watcher: hyper_util::server::graceful::Watcher,
    permit: OwnedSemaphorePermit,
) {
    let stream = ClientStream::new(stream, limit);
    let client = stream.clone();
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limit)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(watcher.watch(connection));
    poll_fn(|context| {
        loop {
            // A client may close its connection at any time, which is no error of the server.
            if connection.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            match client.poll_read_ahead(context) {
                Poll::Ready(ReadAhead::Bytes) => {}
                Poll::Ready(ReadAhead::End) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
    drop(permit);
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
    use tokio::sync::oneshot;

    use super::*;

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
}
