//! Clients of HTTP: the authorities that they trust, and the proxy that they ask through.

use std::net::IpAddr;
use std::sync::LazyLock;

use ureq::Agent;
use ureq::config::ConfigBuilder;
use ureq::http::Uri;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;

/// The authorities of the system, or of the file that SSL_CERT_FILE names: a proxy that reads what it passes on has one of its own there. Where
/// the system has none, Mozilla's.
static AUTHORITIES: LazyLock<RootCerts> = LazyLock::new(|| {
    let found = rustls_native_certs::load_native_certs().certs;
    if found.is_empty() {
        return RootCerts::WebPki;
    }
    found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).into()
});

/// The settings of a client.
pub(crate) fn config() -> ConfigBuilder<AgentScope> {
    Agent::config_builder().tls_config(TlsConfig::builder().root_certs(AUTHORITIES.clone()).build())
}

/// The settings of a client of the server at `url`. The proxy of the environment cannot reach a server of this machine, and is not asked for it.
pub(crate) fn config_for(url: &str) -> ConfigBuilder<AgentScope> {
    if is_here(url) { config().proxy(None) } else { config() }
}

/// Whether a URL names the loopback address.
fn is_here(url: &str) -> bool {
    let uri = url.parse::<Uri>().unwrap_or_default();
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_this_machine_are_known_by_their_host() {
        for here in ["http://127.0.0.1:8080", "https://[::1]/v1", "http://LocalHost:4318/v1/traces"] {
            assert!(is_here(here), "{here}");
        }
        for elsewhere in ["http://10.0.0.1", "https://localhost.example.com", "http://[::2]:80", "127.0.0.1 "]
        {
            assert!(!is_here(elsewhere), "{elsewhere}");
        }
    }
}
