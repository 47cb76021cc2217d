//! `refrain-scale probe`: whether a worker or a gateway takes requests, for images that have no other client of HTTP.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::{args, say};

/// How long the program may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks whether a worker or a gateway takes requests.
pub(crate) async fn run(args: &args::Probe) -> Result<()> {
    let local = || format!("http://127.0.0.1:{}", args.port);
    let url = args.url.as_ref().map_or_else(local, |url| url.trim_end_matches('/').to_owned());
    // A certificate seldom names the address that a program is reached at from within, and no secret is sent.
    let client = reqwest::Client::builder()
        .timeout(PROBE_TIMEOUT)
        .no_proxy()
        .tls_danger_accept_invalid_certs(true)
        .build()?;
    let answered = client.get(format!("{url}/ready")).send().await;
    let status = answered.with_context(|| format!("no answer from {url}"))?.status();
    if !status.is_success() {
        bail!("{url} takes no requests: status {}", status.as_u16());
    }
    say(&format!("{url} takes requests"))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use axum::Router;
    use axum::routing::get;
    use refrain_server::Listener;

    use super::*;

    #[tokio::test]
    async fn a_program_with_tls_is_probed() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let mut openssl = Command::new("openssl");
        openssl.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            "/CN=elsewhere",
        ]);
        openssl.arg("-out").arg(&certificate).arg("-keyout").arg(&key).stderr(Stdio::null());
        if !openssl.status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: openssl, which makes the certificate, is not installed");
            return;
        }
        let tls = refrain_server::tls(&certificate, &key).unwrap();
        let listener = Listener::bind(([127, 0, 0, 1], 0).into(), Some(tls)).await.unwrap();
        let port = listener.address().unwrap().port();
        let minute = Duration::from_secs(60);
        let routes = Router::new().route("/ready", get("ready"));
        let _served =
            tokio::spawn(listener.serve_routes(routes, (minute, minute), std::future::pending(), async {}));
        let url = Some(format!("https://127.0.0.1:{port}/"));
        run(&args::Probe { url, port: 0 }).await.unwrap();
        let wrong = run(&args::Probe { url: None, port }).await;
        assert!(wrong.is_err(), "no program without TLS listens on the port");
    }
}
