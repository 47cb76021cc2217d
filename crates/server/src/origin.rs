//! Where a browser's request comes from: checks against pages that use a server behind their reader's back.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::REQUEST_ID;
use crate::api_error::{ApiError, SHOULD_RETRY};
use crate::options::Options;

/// Names by which containers of Docker and Podman reach the machine that they run on. No page has one of its own, since `internal` is reserved.
const OF_HOST: [&str; 2] = ["host.docker.internal", "host.containers.internal"];

impl Options {
    /// Refuses a request that a browser sends for a page of another origin which is not allowed: browsers send forms without
    /// asking the server first. Programs send neither of the headers that tell it.
    ///
    /// # Errors
    /// If the page's origin is neither the server's own nor allowed.
    pub fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("null"));
        let (site, origin, host) = (text("sec-fetch-site"), text("origin"), text("host"));
        let allowed = &self.allowed_origins;
        let is_allowed = |origin: &str| allowed.iter().any(|known| known == "*" || known == origin);
        let is_own = |origin: &str| {
            let address = origin.split_once("://").map(|(_, address)| address);
            address.zip(host).is_some_and(|(address, host)| address.eq_ignore_ascii_case(host))
        };
        let is_taken = match (site, origin) {
            (_, Some(origin)) if is_allowed(origin) => true,
            (Some(site), _) => ["same-origin", "none"].contains(&site),
            (None, Some(origin)) => is_own(origin),
            (None, None) => true,
        };
        if is_taken {
            return Ok(());
        }
        let message = "a page of another origin cannot send a form; --allowed-origins names those that can";
        Err(ApiError { code: Some("unknown_origin"), ..ApiError::new(StatusCode::FORBIDDEN, message) })
    }

    /// Refuses a request whose `Host` is not one of the server's names, where no API key protects it: a web page could have
    /// its own name resolve to this machine, and read what the server answers.
    ///
    /// # Errors
    /// If the name is not one of the server's.
    pub fn check_host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Options { is_local, api_keys, allowed_hosts, .. } = self;
        let Some(host) = headers.get(header::HOST).filter(|_| *is_local && api_keys.is_empty()) else {
            return Ok(());
        };
        let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let name = authority.as_ref().map_or("", |authority| authority.host()).to_ascii_lowercase();
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let is_own = name == "localhost" || name.ends_with(".localhost") || OF_HOST.contains(&name.as_str());
        if is_address || is_own || allowed_hosts.contains(&name) {
            return Ok(());
        }
        let message =
            format!("{name:?} is not a name of this server; --allowed-hosts gives it further names");
        Err(ApiError { code: Some("unknown_host"), ..ApiError::new(StatusCode::FORBIDDEN, message) })
    }

    /// Answers browsers that ask whether a page of another origin may send requests; none where no origin is allowed.
    pub fn cors(&self) -> Option<CorsLayer> {
        let allowed = match self.allowed_origins.as_slice() {
            [] => return None,
            origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
            origins => {
                AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
            }
        };
        let methods = [Method::GET, Method::POST, Method::DELETE];
        let layer = CorsLayer::new().allow_origin(allowed).allow_methods(methods);
        // OpenAI's clients send headers of their own.
        let layer = layer.allow_headers(AllowHeaders::mirror_request());
        Some(layer.expose_headers([REQUEST_ID, SHOULD_RETRY, header::RETRY_AFTER]))
    }
}
