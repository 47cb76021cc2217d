//! The certificate of a server, which is read again when its files change.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use blake3::Hash;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::sleep;

use crate::error::Error;

/// A certificate chain and its private key. A clone shares the configuration of new connections.
#[derive(Clone, Debug)]
pub struct Tls {
    files: Files,
    /// Hashes of what was read last; none where it could not be read.
    seen: Option<[Hash; 2]>,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

/// The certificate chain and its private key of these PEM files, which are read again when they change.
///
/// # Errors
/// If a file cannot be read, or key and certificate do not belong together.
pub fn tls(certificates: &Path, key: &Path) -> Result<Tls, Error> {
    let files = Files { certificates: certificates.to_owned(), key: key.to_owned() };
    let read = files.read()?;
    let config = Arc::new(RwLock::new(files.config(&read)?));
    Ok(Tls { files, seen: Some(hashes(&read)), config })
}

fn hashes(read: &[Vec<u8>; 2]) -> [Hash; 2] {
    read.each_ref().map(|bytes| blake3::hash(bytes))
}

/// The files of a certificate chain and of its key.
#[derive(Clone, Debug)]
struct Files {
    certificates: PathBuf,
    key: PathBuf,
}

impl Files {
    fn wrong(path: &Path, reason: impl Display) -> Error {
        Error::Tls { path: path.display().to_string(), reason: reason.to_string() }
    }

    /// The content of both files.
    fn read(&self) -> Result<[Vec<u8>; 2], Error> {
        let read = |path: &Path| fs::read(path).map_err(|error| Files::wrong(path, error));
        Ok([read(&self.certificates)?, read(&self.key)?])
    }

    /// The configuration that follows from the content of both files.
    fn config(&self, [certificates, key]: &[Vec<u8>; 2]) -> Result<Arc<ServerConfig>, Error> {
        let wrong = |error| Files::wrong(&self.certificates, error);
        let chain = CertificateDer::pem_slice_iter(certificates).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| Files::wrong(&self.certificates, error))?;
        let own = PrivateKeyDer::from_pem_slice(key).map_err(|error| Files::wrong(&self.key, error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(wrong)?;
        Ok(Arc::new(config.with_no_client_auth().with_single_cert(chain, own).map_err(wrong)?))
    }
}

impl Tls {
    /// The configuration of a new connection.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the files, and has new connections get the certificate that they hold where they have changed. A pair that cannot be used, such as one
    /// of which one file is still to be replaced, changes nothing.
    fn look(&mut self) {
        let read = self.files.read();
        let found = read.as_ref().ok().map(hashes);
        if found == self.seen {
            return;
        }
        self.seen = found;
        match read.and_then(|read| self.files.config(&read)) {
            Ok(config) => {
                *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
                tracing::info!(
                    "new connections get the new certificate of {}",
                    self.files.certificates.display()
                );
            }
            Err(error) => tracing::warn!(%error, "new connections get the certificate that was read before"),
        }
    }

    /// Looks at the files after each `interval`, for ever.
    pub(crate) async fn follow(mut self, interval: Duration) {
        loop {
            sleep(interval).await;
            let looked = tokio::task::spawn_blocking(move || {
                self.look();
                self
            });
            let Ok(tls) = looked.await else { return };
            self = tls;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use axum::Router;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, RootCertStore};
    use tempfile::TempDir;
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::listener::Listener;

    /// Two certificates of `localhost`, which are good until the year 2126, with their keys.
    const PAIRS: [[&str; 2]; 2] = [
        [include_str!("../tests/tls/first.pem"), include_str!("../tests/tls/first-key.pem")],
        [include_str!("../tests/tls/second.pem"), include_str!("../tests/tls/second-key.pem")],
    ];

    fn files(folder: &TempDir) -> [PathBuf; 2] {
        ["certificate.pem", "key.pem"].map(|name| folder.path().join(name))
    }

    fn served(folder: &TempDir) -> Tls {
        let [certificates, key] = files(folder);
        fs::write(&certificates, PAIRS[0][0]).unwrap();
        fs::write(&key, PAIRS[0][1]).unwrap();
        tls(&certificates, &key).unwrap()
    }

    #[test]
    fn a_half_replaced_pair_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut tls = served(&folder);
        let ([certificates, key], first) = (files(&folder), tls.config());
        let mut is_first = || {
            tls.look();
            Arc::ptr_eq(&tls.config(), &first)
        };
        assert!(is_first(), "nothing has changed");
        fs::write(&certificates, PAIRS[1][0]).unwrap();
        assert!(is_first(), "the key is of the other certificate");
        fs::remove_file(&key).unwrap();
        assert!(is_first());
        fs::write(&key, PAIRS[1][1]).unwrap();
        assert!(!is_first());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn new_connections_get_a_renewed_certificate_without_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut listener = Listener::bind(([127, 0, 0, 1], 0).into(), Some(served(&folder))).await.unwrap();
        listener.renewal = Duration::from_millis(10);
        let (address, minute) = (listener.address().unwrap(), Duration::from_secs(60));
        let stop = std::future::pending();
        let _served = tokio::spawn(listener.serve_routes(Router::new(), (minute, minute), stop, async {}));
        let shows = async |pair: usize| {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(PAIRS[pair][0].as_bytes()).unwrap()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let client = client.unwrap().with_root_certificates(roots).with_no_client_auth();
            let stream = TcpStream::connect(address).await.unwrap();
            let name = ServerName::try_from("localhost").unwrap();
            TlsConnector::from(Arc::new(client)).connect(name, stream).await.is_ok()
        };
        assert!(shows(0).await && !shows(1).await);
        for (path, content) in files(&folder).iter().zip(PAIRS[1]) {
            fs::write(path, content).unwrap();
        }
        let began = Instant::now();
        while !shows(1).await {
            assert!(began.elapsed() < minute, "the first certificate stays");
        }
    }
}
