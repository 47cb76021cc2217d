//! Connections: taken, encrypted if wanted, bounded in number and time, and ended in order.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::Error;
use crate::app::App;

/// Most connections at a time; further ones wait to be taken.
const CONNECTIONS: usize = 1024;

/// An address that is listened on.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
}

/// A certificate chain and its key, from PEM files.
///
/// # Errors
/// If a file cannot be read, or they do not fit.
pub fn tls(certificates: &Path, key: &Path) -> Result<Arc<ServerConfig>, Error> {
    let wrong = |path: &Path, why: &dyn std::fmt::Display| Error::Tls {
        path: path.display().to_string(),
        why: why.to_string(),
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
    /// Listens on an address, with TLS if it is configured.
    ///
    /// # Errors
    /// If the address is taken or is none of this machine's.
    pub async fn bind(address: SocketAddr, tls: Option<Arc<ServerConfig>>) -> Result<Listener, Error> {
        let listener = TcpListener::bind(address).await.map_err(|source| Error::Bind { address, source })?;
        Ok(Listener { listener, tls })
    }

    /// The address, with the port that was taken if none was given.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop`, then takes no more connections, and waits for answers under way, [`Options::drain`] at most.
    ///
    /// [`Options::drain`]: crate::Options::drain
    pub async fn serve(self, app: App, stop: impl Future<Output = ()>) {
        let router = crate::router(app.clone());
        let (graceful, places) = (GracefulShutdown::new(), Arc::new(Semaphore::new(CONNECTIONS)));
        let mut stop = std::pin::pin!(stop);
        loop {
            let taken = async {
                let place = places.clone().acquire_owned().await;
                (self.listener.accept().await, place)
            };
            tokio::select! {
                () = &mut stop => break,
                (accepted, place) = taken => match (accepted, place) {
                    (Ok((stream, _)), Ok(place)) => self.take(stream, place, &router, &app, &graceful),
                    // Too many open files, most likely: some will close.
                    (Err(error), _) => {
                        tracing::warn!(%error, "a connection could not be taken");
                        sleep(Duration::from_millis(100)).await;
                    }
                    (_, Err(_)) => break,
                },
            }
        }
        drop(self.listener);
        let drained = tokio::task::spawn_blocking(move || app.drain());
        let _ = drained.await;
        // The last words of streams are on their way.
        let _ = timeout(Duration::from_secs(5), graceful.shutdown()).await;
    }

    fn take(
        &self,
        stream: TcpStream,
        place: OwnedSemaphorePermit,
        router: &Router,
        app: &App,
        graceful: &GracefulShutdown,
    ) {
        let _ = stream.set_nodelay(true);
        let (router, arrival) = (router.clone(), app.0.options.arrival);
        let watcher = graceful.watcher();
        match self.tls.clone() {
            None => _ = tokio::spawn(talk(stream, router, arrival, watcher, place)),
            Some(tls) => {
                tokio::spawn(async move {
                    // Whoever does not finish the handshake is left.
                    if let Ok(Ok(stream)) = timeout(arrival, TlsAcceptor::from(tls).accept(stream)).await {
                        talk(stream, router, arrival, watcher, place).await;
                    }
                });
            }
        }
    }
}

/// A stream that ends when its other side takes nothing for a time: it would hold a place for ever.
struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Runs while something waits to be taken.
    since: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    /// What has become of something that the other side is to take.
    fn taken<T>(&mut self, context: &mut Context<'_>, taken: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if taken.is_ready() {
            self.since = None;
            return taken;
        }
        let patience = self.patience;
        let since = self.since.get_or_insert_with(|| Box::pin(sleep(patience)));
        since.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let taken = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.taken(context, taken)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.stream).poll_flush(context);
        self.taken(context, taken)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.stream).poll_shutdown(context);
        self.taken(context, taken)
    }
}

/// One connection to its end.
async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    arrival: Duration,
    watcher: hyper_util::server::graceful::Watcher,
    place: OwnedSemaphorePermit,
) {
    let stream = Patient { stream, patience: arrival, since: None };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(arrival)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // Clients go away as they like.
    let _ = watcher.watch(connection).await;
    drop(place);
}
