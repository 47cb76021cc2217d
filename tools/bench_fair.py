#!/usr/bin/env python3
"""Measures how long one key's first token waits beside another key's heavy work.

    tools/bench_fair.py target/release/refrain [--model MODEL] [--rounds N]

Starts a server with two keys. The light key asks a short question, alone and beside what the heavy key does: prompts that are
computed in full, an ingest, and many questions at once. Prints a Markdown table of medians; needs Python's own library alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

TEXT = "The rear wheel has 28 spokes, and each is tightened to the same tension before the rim is trued by hand. "


def request(url, key, path, body, stream=False):
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    response = urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=600)
    return response if stream else json.load(response)


def first_token(url, key, number):
    """Seconds to the first token of a question that no request before it has asked."""
    body = {
        "messages": [{"role": "user", "content": f"{number}: how many spokes has a rear wheel? " + TEXT * 8}],
        "max_tokens": 4, "stream": True, "refrain": {"method": "vanilla"},
    }
    started = time.perf_counter()
    with request(url, key, "/v1/chat/completions", body, stream=True) as response:
        for line in response:
            if line.startswith(b"data: ") and b'"retained"' in line:
                return time.perf_counter() - started
    raise RuntimeError("the stream ended without a token")


def long_prompts(url, key, stop, number):
    while not stop.is_set():
        number += 1
        content = f"{number} " + TEXT * 230
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "refrain": {"method": "vanilla"}}
        request(url, key, "/v1/chat/completions", body)


def ingests(url, key, stop, number):
    while not stop.is_set():
        number += 1
        request(url, key, "/v1/documents", {"title": f"Wheels {number}", "text": f"{number} " + TEXT * 1000})


def crowd(url, key, stop, number):
    def one(index):
        count = 0
        while not stop.is_set():
            count += 1
            content = f"{number} {index} {count} " + TEXT * 12
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 32, "refrain": {"method": "vanilla"}}
            request(url, key, "/v1/chat/completions", body)

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("refrain")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys_file = os.path.join(folder, "keys")
        program = os.path.abspath(args.refrain)
        key = lambda name: subprocess.check_output(
            [program, "key", "new", name, "--file", keys_file], text=True, stderr=subprocess.DEVNULL).strip()
        light, heavy = key("light"), key("heavy")
        server = subprocess.Popen(
            [program, "serve", "--model", args.model, "--port", "0", "--json", "--store", os.path.join(folder, "store"),
             "--api-key-file", keys_file, "--log", "error"], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(server.stdout.readline())["url"]
            print("| beside | median, s | longest, s | of alone |\n| --- | ---: | ---: | ---: |")
            alone, number = None, 0
            for name, work in [("alone", None), ("prompts of 6,000 tokens", long_prompts),
                               ("ingests of 26,000 tokens", ingests), ("16 questions at a time", crowd)]:
                stop = threading.Event()
                thread = threading.Thread(target=work, args=(url, heavy, stop, number), daemon=True) if work else None
                if thread:
                    thread.start()
                    time.sleep(3)
                times = []
                for _ in range(args.rounds):
                    number += 1
                    times.append(first_token(url, light, number))
                    time.sleep(0.3)
                stop.set()
                median = statistics.median(times)
                alone = alone or median
                print(f"| {name} | {median:.2f} | {max(times):.2f} | {median / alone:.2f}x |", flush=True)
                if thread:
                    thread.join()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
