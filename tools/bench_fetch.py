#!/usr/bin/env python3
"""Measures first tokens where all chunks are in an object store: fetched, computed, or as `--remote-policy auto` decides.

    cargo build -p refrain-cli
    PYTHONPATH=.python-tests python3 tools/bench_fetch.py target/debug/refrain

A first server computes the chunks of all questions and brings them to an S3 server (moto) on this machine. For each policy and each behaviour of the
network before the S3 server, a new server with an empty folder answers the questions, one after the other. Before that it answers questions of which
half the chunks are in the object store, so that it has measured both. Prints a table.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

BUCKET = "chunks"
# Seconds before a GET is passed on, and whether nothing is answered.
NETWORKS = {"fast": (0.0, False), "0.2 s delay": (0.2, False), "2 s delay": (2.0, False), "hangs": (0.0, True)}
WORDS = "lamp brass wheel spoke valve lever chain tyre hub rim brake cable saddle frame fork pedal crank bell mud guard".split()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(what, done, seconds=120):
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            sys.exit(f"{what}: not within {seconds} s")
        time.sleep(0.1)


class Network:
    """A proxy before the S3 server: `delay` seconds pass before a GET is passed on; with `hangs` no request is answered."""

    def __init__(self, server):
        self.server, self.delay, self.hangs = server, 0.0, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.server))
            threading.Thread(target=self.copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self.copy, args=(server, client, False), daemon=True).start()

    def copy(self, source, target, asks):
        try:
            while data := source.recv(1 << 16):
                while asks and self.hangs:
                    time.sleep(0.05)
                if asks and data.startswith(b"GET "):
                    time.sleep(self.delay)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Server:
    """`refrain serve` with an empty folder."""

    def __init__(self, program, model, network, policy):
        self.folder, self.port = tempfile.TemporaryDirectory(), free_port()
        remote = ["--remote", f"s3://{BUCKET}/bench", "--remote-policy", policy, "--remote-timeout", "10s", "--sync-interval", "off"]
        environment = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{network.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "HOME": str(Path.home()),
            "PATH": "/usr/bin:/bin",
        }
        command = [program, "serve", "--model", model, "--port", str(self.port), "--store", self.folder.name, *remote]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until("the server starts", self.is_up)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def is_up(self):
        try:
            return bool(self.get("/health"))
        except OSError:
            return False

    def metric(self, name):
        lines = self.get("/metrics").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"refrain_{name} "))

    def ask(self, documents):
        """Seconds until the first token."""
        body = {
            "messages": [{"role": "user", "content": "Which part is made of brass?"}],
            "documents": [{"text": text} for text in documents],
            "max_tokens": 1,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=300) as response:
            response.read()
        return time.monotonic() - began

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def documents(question, count, words):
    def text(number):
        seed = question * 1000 + number
        return f"Report {seed}. " + " ".join(WORDS[(seed * 7 + i * i + i // 3) % len(WORDS)] for i in range(words))

    return [text(number) for number in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("program", help="the program `refrain`")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="behaviours of the network (default all)")
    parser.add_argument("--questions", type=int, default=12, help="questions a server (default 12)")
    parser.add_argument("--documents", type=int, default=3, help="documents a question (default 3)")
    parser.add_argument("--words", type=int, default=300, help="words a document (default 300)")
    given = parser.parse_args()
    port = free_port()
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        measure(given, port)
    finally:
        moto.kill()
        moto.wait()


def measure(given, port):
    def has_started():
        try:
            make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            return urllib.request.urlopen(make, timeout=5).status == 200
        except OSError:
            return False

    wait_until("moto starts", has_started)
    network = Network(port)
    questions = [documents(number, given.documents, given.words) for number in range(given.questions)]
    warm = [documents(1000 + number, given.documents, given.words) for number in range(4)]
    first = Server(given.program, given.model, network, "compute")
    for asked in questions + warm[::2]:
        first.ask(asked)
    wait_until("chunks are sent", lambda: first.metric("store_remote_pending") == 0)
    print(f"{first.metric('store_remote_sent_bytes_total') / first.metric('store_remote_sent_total') / 1e6:.1f} MB a chunk\n")
    first.stop()
    print("| object store | policy | TTFT p50 (s) | mean (s) | longest (s) | fetched | passed over | races won | lost |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.networks.split(","):
        delay, hangs = NETWORKS[name]
        for policy in ["fetch", "compute", "auto"]:
            network.delay, network.hangs = 0.0, False
            server = Server(given.program, given.model, network, policy)
            for asked in warm:
                server.ask(asked)
            names = ["fetched", "passed_over", "races_won", "races_lost"]
            before = [server.metric(f"store_remote_{name}_total") for name in names]
            network.delay, network.hangs = delay, hangs
            took = [server.ask(asked) for asked in questions]
            after = [server.metric(f"store_remote_{name}_total") for name in names]
            counts = " | ".join(str(now - then) for now, then in zip(after, before))
            times = " | ".join(f"{value:.2f}" for value in (statistics.median(took), statistics.mean(took), max(took)))
            print(f"| {name} | {policy} | {times} | {counts} |", flush=True)
            network.hangs = False
            server.stop()


if __name__ == "__main__":
    main()
