//! A worker's side of the cluster: its router behind an endpoint of Dynamo's, and its reports.

use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request, header};
use bytes::Bytes;
use dynamo_runtime::DistributedRuntime;
use dynamo_runtime::component::{Endpoint, StartedEndpoint};
use dynamo_runtime::discovery::{DiscoveryInstance, DiscoveryQuery, DiscoverySpec};
use dynamo_runtime::engine::{AsyncEngine, AsyncEngineContext, AsyncEngineContextProvider as _};
use dynamo_runtime::pipeline::network::Ingress;
use dynamo_runtime::pipeline::{ManyOut, ResponseStream, SingleIn};
use dynamo_runtime::protocols::annotated::Annotated;
use dynamo_runtime::protocols::maybe_error::MaybeError as _;
use dynamo_runtime::slug::Slug;
use dynamo_runtime::traits::DistributedRuntimeProvider as _;
use dynamo_runtime::transports::event_plane::EventPublisher;
use futures_util::stream::{BoxStream, Stream, StreamExt as _, once, unfold};
use http_body_util::BodyExt as _;
use refrain_server::{Report, TENANT_HEADER, sign_tenant};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;

use super::{Call, ENDPOINT, Head, Piece, Published, REPORTS, component, runtime};
use crate::args::{Common, Discovery};
use crate::cluster::Lost;

/// Time between two published reports.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);

/// Publications between two looks for this worker in the discovery.
const LOOK_EVERY: u32 = 4;
/// Most time that a publication, or a look, may take.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Endpoint of workers for Dynamo's stock front end.
const STOCK_ENDPOINT: &str = "generate";

/// A worker that gateways find.
pub(crate) struct Registered {
    runtime: DistributedRuntime,
    endpoint: StartedEndpoint,
    /// The endpoint for the stock front end, and the model that the discovery tells it of.
    stock: StartedEndpoint,
    model: DiscoveryInstance,
    publisher: JoinHandle<()>,
}

/// Registers a worker that answers with `router`, and its model of this name.
///
/// # Errors
/// If the discovery cannot be reached, or a setting of Dynamo's is wrong.
pub(crate) async fn register(
    common: &Common,
    discovery: Discovery,
    router: Router,
    model: &str,
) -> Result<Registered> {
    let runtime = runtime(common, discovery).await?;
    let endpoint = component(&runtime, &common.discovery_namespace)?.endpoint(ENDPOINT);
    let signature = HeaderValue::from_str(&sign_tenant(&common.key()?, "", ""))?;
    let publisher = EventPublisher::for_endpoint(&endpoint, REPORTS).await?;
    let adapter = Ingress::for_engine(Arc::new(Adapter { router: router.clone() }))?;
    let started = endpoint.clone().endpoint_builder().handler(adapter).graceful_shutdown(true);
    let started = started.start_with_registration().await?;
    let instance = started.instance().instance_id;
    let stock = component(&runtime, &common.discovery_namespace)?.endpoint(STOCK_ENDPOINT);
    let adapter = Ingress::for_engine(Arc::new(StockAdapter { router: router.clone() }))?;
    let started_stock = stock.clone().endpoint_builder().handler(adapter).graceful_shutdown(true);
    let started_stock = started_stock.start_with_registration().await?;
    let published = publish_model(&stock, model).await?;
    let model = model.to_owned();
    let publisher = Publisher { endpoint, stock, model, publisher, instance, router, signature, since: None };
    let publisher = tokio::spawn(publisher.run());
    Ok(Registered { runtime, endpoint: started, stock: started_stock, model: published, publisher })
}

impl Registered {
    /// Completes when the runtime ends by itself, as it does where the discovery is gone for longer than its lease.
    pub(crate) fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let token = self.runtime.primary_token();
        async move { token.cancelled().await }
    }

    /// Has gateways send nothing more, or gives that up after [`MAX_WAIT`]: a discovery that does not answer may not keep the worker from its end.
    /// Running requests go on.
    pub(crate) async fn leave(self) {
        self.publisher.abort();
        let left = async {
            self.runtime.discovery().unregister(self.model).await?;
            self.stock.shutdown().await?;
            self.endpoint.shutdown().await
        };
        match timeout(MAX_WAIT, left).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the worker could not be taken out of the discovery"),
            Err(_) => tracing::warn!("the worker was not taken out of the discovery within {MAX_WAIT:?}"),
        }
    }
}

/// Publishes reports, and stays in the discovery.
struct Publisher {
    endpoint: Endpoint,
    /// The endpoint for the stock front end, and the name of the model that the discovery tells it of.
    stock: Endpoint,
    model: String,
    publisher: EventPublisher,
    instance: u64,
    router: Router,
    signature: HeaderValue,
    /// Epoch and sequence number of the last published report.
    since: Option<(u64, u64)>,
}

impl Publisher {
    /// Publishes reports for ever, each as the difference to the one before.
    async fn run(mut self) {
        let late = |_| Err(anyhow::anyhow!("it took longer than {MAX_WAIT:?}"));
        for publication in 1_u32.. {
            if let Err(error) = timeout(MAX_WAIT, self.publish()).await.unwrap_or_else(late) {
                tracing::warn!(%error, "a report could not be published");
            }
            if publication.is_multiple_of(LOOK_EVERY)
                && let Err(error) = timeout(MAX_WAIT, self.stay()).await.unwrap_or_else(late)
            {
                tracing::warn!(%error, "whether the discovery has this worker is not known");
            }
            sleep(PUBLISH_EVERY).await;
        }
    }

    async fn publish(&mut self) -> Result<()> {
        let report = report(&self.router, &self.signature, self.since).await?;
        let seen = (report.epoch, report.sequence);
        self.publisher.publish(&Published { instance: self.instance, since: self.since, report }).await?;
        self.since = Some(seen);
        Ok(())
    }

    /// Puts the worker's entries into the discovery again that were dropped there: those of a process that hung for longer than they live are.
    async fn stay(&mut self) -> Result<()> {
        if !self.is_there(endpoint_query(&self.endpoint)).await? {
            tracing::warn!("the discovery has dropped this worker, which is put there again");
            self.endpoint.register_endpoint_instance().await?;
            self.publisher = EventPublisher::for_endpoint(&self.endpoint, REPORTS).await?;
        }
        if !self.is_there(endpoint_query(&self.stock)).await? {
            self.stock.register_endpoint_instance().await?;
        }
        let id = self.stock.id();
        let (namespace, component, endpoint) = (id.namespace, id.component, id.name);
        if !self.is_there(DiscoveryQuery::EndpointModels { namespace, component, endpoint }).await? {
            publish_model(&self.stock, &self.model).await?;
        }
        Ok(())
    }

    /// Whether the discovery has an entry of this worker's. It is asked itself: what follows it here may have missed a removal while the process
    /// hung.
    async fn is_there(&mut self, query: DiscoveryQuery) -> Result<bool> {
        let there = self.endpoint.drt().discovery().list(query).await?;
        Ok(there.iter().any(|instance| instance.instance_id() == self.instance))
    }
}

/// The query for an endpoint's entries in the discovery.
fn endpoint_query(endpoint: &Endpoint) -> DiscoveryQuery {
    let id = endpoint.id();
    DiscoveryQuery::Endpoint { namespace: id.namespace, component: id.component, endpoint: id.name }
}

async fn report(router: &Router, signature: &HeaderValue, since: Option<(u64, u64)>) -> Result<Report> {
    let query = since.map(|(epoch, sequence)| format!("?epoch={epoch}&sequence={sequence}"));
    let request = Request::get(format!("/internal/report{}", query.unwrap_or_default()))
        .header(TENANT_HEADER, signature.clone())
        .body(Body::empty())?;
    let response = router.clone().oneshot(request).await?;
    Ok(serde_json::from_slice(&response.into_body().collect().await?.to_bytes())?)
}

/// Answers calls with the worker's router, in process.
struct Adapter {
    router: Router,
}

#[async_trait]
impl AsyncEngine<SingleIn<Call>, ManyOut<Piece>, anyhow::Error> for Adapter {
    async fn generate(&self, call: SingleIn<Call>) -> Result<ManyOut<Piece>, anyhow::Error> {
        let (call, context) = call.into_parts();
        let context = context.context();
        let request = request(call)?;
        // The stream begins at once, so that a gateway that leaves is heard of before the response's head is there.
        let router = self.router.clone();
        let pieces = once(async move {
            let (head, body) = match router.oneshot(request).await {
                Ok(response) => response.into_parts(),
                Err(never) => match never {},
            };
            let headers = head.headers.iter();
            let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec().into()));
            let head = Head { status: head.status.as_u16(), headers: headers.collect() };
            let data = body.into_data_stream().map(|piece| match piece {
                Ok(data) => Piece { head: None, data: Some(data), error: None },
                Err(error) => Piece::from_err(Lost(error.to_string())),
            });
            once(async { Piece { head: Some(head), data: None, error: None } }).chain(data)
        })
        .flatten()
        .boxed();
        Ok(ResponseStream::new(until_stopped(pieces, context.clone()), context))
    }
}

fn request(call: Call) -> Result<Request<Body>> {
    let mut request = Request::builder().method(call.method.as_str()).uri(call.target);
    for (name, value) in call.headers {
        request = request.header(name.parse::<HeaderName>()?, HeaderValue::from_maybe_shared(value)?);
    }
    Ok(request.body(Body::from(call.body))?)
}

/// Answers chats of Dynamo's stock front end, which sends the JSON of a request and takes the chunks of its stream. Nothing there proves whose a
/// request is: it is of the namespace without a name.
struct StockAdapter {
    router: Router,
}

#[async_trait]
impl AsyncEngine<SingleIn<Value>, ManyOut<Annotated<Value>>, anyhow::Error> for StockAdapter {
    async fn generate(&self, chat: SingleIn<Value>) -> Result<ManyOut<Annotated<Value>>, anyhow::Error> {
        let (chat, context) = chat.into_parts();
        let context = context.context();
        let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(stock_request(chat).to_string()))?;
        let router = self.router.clone();
        let chunks = once(async move {
            let (head, body) = match router.oneshot(request).await {
                Ok(response) => response.into_parts(),
                Err(never) => match never {},
            };
            match head.status.is_success() {
                true => server_sent(Box::pin(body.into_data_stream())).boxed(),
                false => {
                    let text = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                    let error: Value = serde_json::from_slice(&text).unwrap_or_default();
                    let message =
                        error["error"]["message"].as_str().unwrap_or("the worker refused the request");
                    once(std::future::ready(Annotated::from_error(message))).boxed()
                }
            }
        });
        Ok(ResponseStream::new(until_stopped(chunks.flatten().boxed(), context.clone()), context))
    }
}

/// A chat of the stock front end as Refrain takes it: a stream is asked for, whatever the client asked the front end for, and Refrain's own
/// fields, which the front end lets pass among the variables of the chat template alone, stand at the top.
fn stock_request(mut chat: Value) -> Value {
    chat["stream"] = Value::Bool(true);
    chat["stream_options"] = json!({ "include_usage": true });
    for variables in ["chat_template_args", "chat_template_kwargs"] {
        let Some(Value::Object(variables)) = chat.as_object_mut().and_then(|chat| chat.remove(variables))
        else {
            continue;
        };
        for (name, value) in variables {
            match name.as_str() {
                "documents" | "refrain" => chat[name] = value,
                _ => chat["chat_template_kwargs"][name] = value,
            }
        }
    }
    chat
}

/// The chunks of a stream of server-sent events as the stock front end takes them: what is Refrain's own stands under `nvext`.
fn server_sent(
    pieces: BoxStream<'static, Result<Bytes, axum::Error>>,
) -> impl Stream<Item = Annotated<Value>> + Send {
    unfold((pieces, Vec::new()), |(mut pieces, mut bytes)| async move {
        loop {
            while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = bytes.drain(..=end).collect();
                let Some(data) = line.trim_ascii().strip_prefix(b"data:").map(<[u8]>::trim_ascii) else {
                    continue;
                };
                let Ok(mut chunk) = serde_json::from_slice::<Value>(data) else { continue };
                let next = match chunk["error"]["message"].as_str() {
                    Some(message) => Annotated::from_error(message),
                    None => {
                        if let Some(own) = chunk.as_object_mut().and_then(|chunk| chunk.remove("refrain")) {
                            chunk["nvext"]["refrain"] = own;
                        }
                        Annotated::from_data(chunk)
                    }
                };
                return Some((next, (pieces, bytes)));
            }
            match pieces.next().await? {
                Ok(piece) => bytes.extend_from_slice(&piece),
                Err(error) => {
                    return Some((
                        Annotated::from_error(error.to_string()),
                        (futures_util::stream::empty().boxed(), Vec::new()),
                    ));
                }
            }
        }
    })
}

/// A stream that ends when its gateway is gone, so that the work for it ends, too.
fn until_stopped<T: Send + 'static>(
    items: BoxStream<'static, T>,
    context: Arc<dyn AsyncEngineContext>,
) -> BoxStream<'static, T> {
    unfold((items, context), |(mut items, context)| async move {
        let item = tokio::select! {
            item = items.next() => item?,
            () = context.stopped() => return None,
            () = context.killed() => return None,
        };
        Some((item, (items, context)))
    })
    .boxed()
}

/// Tells the discovery of a model that takes chats as text, with the card that the stock front end of Dynamo 1.6.1 reads.
async fn publish_model(endpoint: &Endpoint, name: &str) -> Result<DiscoveryInstance> {
    let card = json!({
        "display_name": name, "slug": Slug::slugify(name), "model_info": null, "tokenizer": null, "kv_cache_block_size": 512,
        "migration_limit": 0, "model_type": "Chat", "model_input": "Text", "worker_type": "aggregated",
    });
    let id = endpoint.id();
    let spec = DiscoverySpec::from_model(id.namespace, id.component, id.name, &card)?;
    endpoint.drt().discovery().register(spec).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_of_the_stock_front_end_has_its_documents_at_the_top() {
        let chat = json!({
            "model": "m", "stream": false,
            "chat_template_args": { "documents": [{ "text": "t" }], "refrain": { "method": "pie" }, "enable_thinking": true },
        });
        let wanted = json!({
            "model": "m", "stream": true, "stream_options": { "include_usage": true }, "documents": [{ "text": "t" }],
            "refrain": { "method": "pie" }, "chat_template_kwargs": { "enable_thinking": true },
        });
        assert_eq!(stock_request(chat), wanted);
    }

    #[tokio::test]
    async fn events_that_come_in_pieces_are_whole_chunks() {
        let text = ": comment\n\ndata: {\"id\": 1, \"refrain\": {\"x\": 2}}\n\ndata: {\"error\": {\"message\": \"broken\"}}\n\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let pieces: Vec<_> =
                text.as_bytes().chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let chunks: Vec<_> = server_sent(futures_util::stream::iter(pieces).boxed()).collect().await;
            let [first, second] = &chunks[..] else { panic!("{chunks:?}") };
            assert_eq!(first.data, Some(json!({ "id": 1, "nvext": { "refrain": { "x": 2 } } })));
            assert!(second.is_err(), "{second:?}");
        }
    }
}
