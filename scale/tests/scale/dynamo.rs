//! What is Dynamo's own: etcd and NATS where they are installed, and its stock front end.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::harness::{Client, PATIENCE, Plane, Workers, by_file, loopback, simulated_chat};

/// A server program of a test, ended when this is dropped.
struct Server(Child);

impl Server {
    /// Starts a program, or says that it is not installed.
    fn start(program: &str, arguments: &[&str]) -> Option<Server> {
        let child = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        match child {
            Ok(child) => Some(Server(child)),
            Err(error) => {
                eprintln!("skipped: {program} does not start ({error}); scale/setup installs it");
                None
            }
        }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.0.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free just now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// An etcd with its data in a folder, started again at the same address where ports are given.
fn etcd(folder: &TempDir, ports: (u16, u16)) -> Option<Server> {
    let (client, peer) = (format!("http://127.0.0.1:{}", ports.0), format!("http://127.0.0.1:{}", ports.1));
    let data = folder.path().join("etcd");
    let server = Server::start(
        "etcd",
        &[
            "--data-dir",
            data.to_str().unwrap(),
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
            "--initial-cluster",
            &format!("default={peer}"),
        ],
    )?;
    let deadline = Instant::now() + PATIENCE;
    while std::net::TcpStream::connect(("127.0.0.1", ports.0)).is_err() {
        assert!(Instant::now() < deadline, "etcd does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(server)
}

/// Discovery by etcd with a lease of so many seconds.
fn by_etcd(ports: (u16, u16), lease: u32) -> Plane {
    let mut variables = loopback();
    variables.push(("ETCD_ENDPOINTS", format!("http://127.0.0.1:{}", ports.0)));
    variables.push(("ETCD_LEASE_TTL", lease.to_string()));
    Plane::Dynamo("etcd", variables)
}

async fn ask(client: &Client, question: usize) {
    let (status, answer) = client.chat(&simulated_chat(question, question, 10)).await;
    assert_eq!(status, 200, "{answer}");
}

const FAST: [&str; 2] = ["--simulate", "prefill=10000,decode=10000,bytes=8"];

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_etcd_within_the_lease_is_not_noticed() {
    let (folder, ports) = (tempfile::tempdir().unwrap(), (free_port(), free_port()));
    let Some(server) = etcd(&folder, ports) else { return };
    let plane = by_etcd(ports, 30);
    let workers = Workers::start(&plane, 2, &FAST);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(2).await;
    server.signal("STOP");
    for question in 0..40 {
        ask(&client, question).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    server.signal("CONT");
    client.workers(2).await;
    ask(&client, 40).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_may_be_killed_and_started_again_within_the_lease() {
    let (folder, ports) = (tempfile::tempdir().unwrap(), (free_port(), free_port()));
    let Some(server) = etcd(&folder, ports) else { return };
    let plane = by_etcd(ports, 30);
    let workers = Workers::start(&plane, 2, &FAST);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(2).await;
    drop(server);
    for question in 0..15 {
        ask(&client, question).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let _server = etcd(&folder, ports).unwrap();
    for question in 15..45 {
        ask(&client, question).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    client.workers(2).await;
}

/// Where etcd is gone for longer than the lease, every process ends with an error, for its supervisor to start it anew.
#[tokio::test(flavor = "multi_thread")]
async fn without_etcd_processes_end_and_come_back() {
    let (folder, ports) = (tempfile::tempdir().unwrap(), (free_port(), free_port()));
    let Some(server) = etcd(&folder, ports) else { return };
    let plane = by_etcd(ports, 5);
    let mut workers = Workers::start(&plane, 1, &FAST);
    let mut gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    ask(&client, 0).await;
    drop(server);
    let (worker, gateway_status) = (workers.running[0].wait(), gateway.wait());
    assert!(!worker.success() && !gateway_status.success(), "{worker} {gateway_status}");
    let _server = etcd(&folder, ports).unwrap();
    workers.restart(0);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    ask(&client, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_come_by_nats_and_are_asked_for_while_it_is_gone() {
    let port = free_port();
    let start = || Server::start("nats-server", &["-a", "127.0.0.1", "-p", &port.to_string()]);
    let Some(server) = start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let plane = by_file(folder.path());
    let Plane::Dynamo(discovery, mut variables) = plane else { unreachable!() };
    variables.push(("DYN_EVENT_PLANE", "nats".to_owned()));
    variables.push(("NATS_SERVER", format!("nats://127.0.0.1:{port}")));
    let plane = Plane::Dynamo(discovery, variables);
    let workers = Workers::start(&plane, 2, &FAST);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(2).await;
    // Reports are lost for a while, in which chunks come.
    drop(server);
    for question in 0..20 {
        ask(&client, question).await;
    }
    let _server = start().unwrap();
    for question in 20..30 {
        ask(&client, question).await;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let known = client.workers(2).await;
        let chunks: u64 =
            known.as_object().unwrap().values().map(|worker| worker["chunks"].as_u64().unwrap()).sum();
        if chunks >= 30 {
            return;
        }
        assert!(Instant::now() < deadline, "{known}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Dynamo's stock front end, on the port of its first argument.
const FRONT_END: &str = "
import asyncio, sys
from dynamo._core import DistributedRuntime, EngineType, EntrypointArgs, RouterConfig, RouterMode, make_engine, run_input
async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), 'file', 'tcp', event_plane='zmq')
    router = RouterConfig(RouterMode.LeastLoaded)
    arguments = EntrypointArgs(EngineType.Dynamic, http_host='127.0.0.1', http_port=int(sys.argv[1]), router_config=router, migration_limit=0)
    await run_input(runtime, 'http', await make_engine(runtime, arguments))
asyncio.run(main())
";

#[tokio::test(flavor = "multi_thread")]
async fn the_stock_front_end_answers_chats() {
    let there = Command::new("python3").args(["-c", "import dynamo._core"]).stderr(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        eprintln!(
            "skipped: python3 has no ai-dynamo-runtime (pip install --no-deps ai-dynamo-runtime==1.6.1)"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plane = by_file(folder.path());
    let model = crate::harness::tiny_model();
    let options =
        ["--model", &model, "--chunk-tokens", "64", "--threads", "1", "--served-model-name", "tiny"];
    let workers = Workers::start(&plane, 2, &options);
    let port = free_port();
    let mut front = Command::new("python3");
    front.args(["-c", FRONT_END, &port.to_string()]).envs(plane.environment());
    let _front = Server(front.stdout(Stdio::null()).spawn().unwrap());
    let (client, deadline) = (Client::of(&format!("http://127.0.0.1:{port}")), Instant::now() + PATIENCE);
    loop {
        let is_up = std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        if is_up && client.text("GET", "/v1/models", &serde_json::Value::Null).await.1.contains("\"tiny\"") {
            break;
        }
        assert!(Instant::now() < deadline, "the front end does not list the model");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut chat = serde_json::json!({
        "model": "tiny", "messages": [{ "role": "user", "content": "How tight is it?" }], "max_tokens": 8, "temperature": 0,
    });
    let documents = serde_json::json!([{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." }]);
    let own = Client::of(&workers.running[0].url);
    let (_, wanted) = own.chat(&chat).await;
    let (status, answer) = client.chat(&chat).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(crate::harness::content(&answer), crate::harness::content(&wanted));
    // Documents pass among the variables of the chat template.
    chat["chat_template_kwargs"] = serde_json::json!({ "documents": documents });
    let (status, answer) = client.chat(&chat).await;
    assert_eq!(status, 200, "{answer}");
    chat.as_object_mut().unwrap().remove("chat_template_kwargs");
    chat["documents"] = documents;
    let (_, wanted) = own.chat(&chat).await;
    assert_eq!(crate::harness::content(&answer), crate::harness::content(&wanted));
    assert_eq!(answer["usage"]["prompt_tokens"], wanted["usage"]["prompt_tokens"], "{answer}");
}
