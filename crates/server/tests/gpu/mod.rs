//! A server on a device with memory of its own, an emulated GPU.

use std::sync::Arc;

use refrain::kernels::Device;
use refrain_cuda::{CudaDevice, Driver as _, Emulated};

use super::*;

const MEMORY: u64 = 24 << 20;

fn engine_on(gpu: &Emulated) -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let device: Arc<dyn Device> = Arc::new(CudaDevice::new(gpu.clone(), 1).unwrap());
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    Engine::open_on(&device, &path, Store::in_memory(1 << 28), settings, |_, _| ()).unwrap()
}

fn options() -> Options {
    let mut options = Options::new(MODEL);
    options.limits.max_num_seqs = 4;
    options
}

fn server_on(gpu: &Emulated) -> Router {
    router(App::new(engine_on(gpu), options()).unwrap())
}

async fn metric(router: &Router, name: &str) -> f64 {
    let text = text(ask(router, "GET", "/metrics", None, Value::Null).await).await;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
    line.parse().unwrap()
}

fn long(tokens: usize) -> Value {
    chat(json!({ "documents": [], "max_tokens": tokens, "min_tokens": tokens }))
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_admitted_within_the_memory_of_the_device() {
    let gpu = Emulated::with_memory(1, MEMORY);
    let engine = engine_on(&gpu);
    let memory = engine.request_memory(4 * 11, 4).unwrap().unwrap();
    // Others have taken so much that the default of 4 GiB is bounded to some hundred tokens.
    let _others = gpu.alloc((memory.requests - 200_000) as usize).unwrap();
    let router = router(App::new(engine, options()).unwrap());
    let path = "/v1/chat/completions";
    let answer = post(&router, path, long(8)).await;
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let (status, error) = refused(ask(&router, "POST", path, None, long(450)).await).await;
    assert_eq!((status, &error["code"]), (413, &json!("too_large")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("for its prompt, and all requests together have 200000"), "{message}");
    assert_eq!(metric(&router, "refrain_device_memory_bytes").await, MEMORY as f64);
    assert!(metric(&router, "refrain_device_memory_free_bytes").await <= (MEMORY - 1) as f64);
}

#[test]
fn a_server_without_memory_for_a_small_prompt_does_not_start() {
    let gpu = Emulated::with_memory(1, MEMORY);
    let engine = engine_on(&gpu);
    let _others = gpu.alloc((gpu.memory().1 - 100_000) as usize).unwrap();
    let error = App::new(engine, options()).err().unwrap().to_string();
    assert!(error.starts_with("cannot compute on emulated CUDA: of 0.1 MiB that are free"), "{error}");
}

/// Pieces of memory that are too small for a long prompt, and not for a short one, stand for memory that runs out.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_runs_out_of_memory_ends_alone() {
    let gpu = Emulated::with_memory(1, MEMORY);
    let router = server_on(&gpu);
    let path = "/v1/chat/completions";
    let expected = post(&router, path, long(60)).await["choices"].clone();
    gpu.fragment(24_000);
    let too_long = chat(json!({
        "documents": [], "max_tokens": 2,
        "messages": [{ "role": "user", "content": "How tight is a stem bolt? ".repeat(9) }],
    }));
    let (one, two) = tokio::join!(
        ask(&router, "POST", path, None, long(60)),
        ask(&router, "POST", path, None, too_long.clone())
    );
    assert_eq!(value(one).await["choices"], expected);
    let retry = two.headers()[header::RETRY_AFTER].clone();
    let (status, error) = refused(two).await;
    assert_eq!((status, retry.to_str().unwrap()), (503, "5"));
    assert_eq!(error["code"], "device_out_of_memory");
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("emulated CUDA is out of memory: "), "{message}");
    assert_eq!(ask(&router, "GET", "/health", None, Value::Null).await.status(), 200);
    gpu.fragment(MEMORY);
    assert_eq!(post(&router, path, long(60)).await["choices"], expected);
    post(&router, path, too_long).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_has_failed_makes_the_server_unhealthy() {
    let gpu = Emulated::with_memory(1, MEMORY);
    let router = server_on(&gpu);
    assert_eq!(metric(&router, "refrain_device_failed").await, 0.0);
    post(&router, "/v1/chat/completions", chat(json!({}))).await;
    gpu.fail("an illegal address");
    let (status, error) =
        refused(ask(&router, "POST", "/v1/chat/completions", None, chat(json!({}))).await).await;
    assert_eq!((status, &error["code"]), (503, &json!("device_failed")));
    for path in ["/health", "/ready"] {
        let response = ask(&router, "GET", path, None, Value::Null).await;
        assert_eq!(response.status(), 503, "{path}");
        let said: Value = serde_json::from_str(&text(response).await).unwrap();
        assert_eq!(said["status"], "failed");
        let reason = said["reason"].as_str().unwrap();
        assert!(
            reason.contains("emulated CUDA has failed") && reason.contains("an illegal address"),
            "{said}"
        );
    }
    assert_eq!(metric(&router, "refrain_device_failed").await, 1.0);
}
