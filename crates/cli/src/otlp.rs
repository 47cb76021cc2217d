//! Spans of requests for a collector, by OTLP over HTTP.

use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context as _, Result};
use opentelemetry::Key;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;
use ureq::http::HeaderMap;

use crate::http::config_for;

/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a collector's answer.
const ANSWER: u64 = 1 << 20;

/// The collector that an option names, or else the variable that all programs with OpenTelemetry read. An option has one variable,
/// REFRAIN_OTLP_TRACES_ENDPOINT here as for all others, so this one is read by hand.
pub(crate) fn collector(given: Option<&str>) -> Option<String> {
    let variable = || std::env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok().filter(|url| !url.is_empty());
    given.map(str::to_owned).or_else(variable)
}

/// The program that spans are of: its name is `refrain` where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES gives one.
fn resource() -> Resource {
    let found = Resource::builder().build();
    let name = found.get(&Key::from_static_str("service.name"));
    match name.is_some_and(|name| !name.as_str().starts_with("unknown_service")) {
        true => found,
        false => Resource::builder().with_service_name("refrain").build(),
    }
}

/// Makes a request's span a part of the trace that its header `traceparent` names.
pub(crate) fn set_parent(span: &Span, headers: &HeaderMap) {
    let context = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
    if context.span().span_context().is_valid() {
        // A span that no layer takes has no parent.
        let _ = span.set_parent(context);
    }
}

/// An exporter of spans. [`Export::end`] sends those that are left.
#[derive(Debug)]
pub(crate) struct Export(SdkTracerProvider);

impl Export {
    /// An exporter to the collector at `url`, such as `http://localhost:4318`.
    pub(crate) fn new(url: &str) -> Result<Export> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_http_client(Client(
                config_for(url)
                    .timeout_global(Some(PATIENCE))
                    .http_status_as_error(false)
                    .build()
                    .new_agent(),
            ))
            .with_endpoint(format!("{}/v1/traces", url.trim_end_matches('/')))
            .build()
            .with_context(|| format!("cannot send spans to {url}"))?;
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build();
        Ok(Export(provider))
    }

    /// The layer that takes the server's spans of requests, and no others.
    pub(crate) fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let own = Targets::new().with_target("refrain_server", tracing::Level::INFO);
        tracing_opentelemetry::layer().with_tracer(self.0.tracer("refrain")).with_filter(own)
    }

    /// Sends the spans that are left.
    pub(crate) fn end(self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "not all spans were sent");
        }
    }
}

/// The program's own client of HTTP. It is called on a thread of the exporter's, which may wait.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let mut response = self.0.run(request.map(|body| body.to_vec()))?;
        let body = response.body_mut().with_config().limit(ANSWER).read_to_vec()?;
        Ok(response.map(|_| body.into()))
    }
}

impl HttpClient for Client {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}
