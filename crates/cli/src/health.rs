//! `refrain health`: whether a server takes requests, for images that have no other client of HTTP.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use ureq::http::Uri;
use ureq::tls::TlsConfig;

use crate::args;
use crate::output::{Fail, print, print_json};
use crate::settings::Context;

/// How long the server may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// `refrain health`
pub(crate) fn run(context: &Context, args: &args::Health) -> Result<()> {
    let url = match &args.url {
        Some(url) if url.contains("://") => url.trim_end_matches('/').to_owned(),
        Some(address) => format!("http://{}", address.trim_end_matches('/')),
        None => format!("http://127.0.0.1:{}", args.port),
    };
    let is_good = |uri: Uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty())
    };
    if !url.parse().is_ok_and(is_good) {
        let fail = Fail::usage(format!("{url} is no URL of a server"));
        return Err(fail.hint("for example http://127.0.0.1:8080").into());
    }
    let agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        // What lies between this process and the server is not asked about.
        .proxy(None)
        // A certificate seldom names the address that the server is reached at from within, and no secret is sent.
        .tls_config(TlsConfig::builder().disable_verification(true).build())
        .build()
        .new_agent();
    let answer = agent.get(format!("{url}/ready")).call();
    let no_answer = |error| {
        Fail::new(format!("no answer from {url}: {error}"))
            .hint("is `refrain serve` running there? --port names another port of this machine, a URL another server")
    };
    let status = answer.map_err(no_answer)?.status();
    if !status.is_success() {
        let what = format!("the server at {url} takes no requests: status {}", status.as_u16());
        return Err(Fail::new(what).into());
    }
    if context.json {
        return print_json(&json!({ "url": url, "status": "ready" }));
    }
    print(&format!("{url} takes requests\n"))
}
