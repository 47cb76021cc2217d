"""The engines of tools/bench_peers.py: how each is named and started, and how to talk with it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
WARM_UP = 64  # tokens of an engine's first prefill
# Environments that keep engines to AVX2; llama.cpp has to be built so.
AVX2 = {
    "refrain": {"REFRAIN_CPU": "avx2"},
    "transformers": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cpu_info(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_flags() -> list[str]:
    flags = set(cpu_info("flags").split())
    return [flag for flag in TELLING_FLAGS if flag in flags]


# ---- workers ---------------------------------------------------------------------------------------


class WorkerDied(Exception):
    def __init__(self, name: str, code: int, said: str) -> None:
        self.code = code
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{name} {how}" + (f":\n{said}" if said else ""))


class Worker:
    """A process that answers JSON commands, one a line."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name, self.command = name, command
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=os.environ | environment,
                text=True,
            )
        except OSError as error:
            raise SystemExit(f"{name}: cannot run {command[0]}: {error.strerror}") from error

    def ask(self, **command: Any) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerDied(self.name, self.process.wait(), self.last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise SystemExit(f"{self.name} cannot {command['op']}: {reply['error']}")
        return reply

    def last_words(self) -> str:
        self.errors.seek(0)
        return "\n".join(self.errors.read().splitlines()[-8:])

    def peak_memory(self) -> int | None:
        """Most bytes that the process has had, where the system tells."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        return next((int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM:")), None)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.errors.close()


@dataclass
class Engine:
    """An engine that was asked for, and its process once it runs."""

    spec: str
    command: list[str]
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    worker: Worker | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        name, _, _ = self.spec.partition(":")
        return f"{'Refrain' if name == 'refrain' else name} {self.info['compute']}"

    def start(self, scratch: Path) -> None:
        """Starts the worker and lets it compute something. Where AMX is half there, tries what helps against it."""
        for environment, note in self.ways(scratch):
            self.worker = Worker(self.spec, self.command, self.environment | environment)
            try:
                self.info = self.worker.ask(op="info")
                for variant in self.variants:
                    self.worker.ask(op="decode", context=list(range(1, WARM_UP + 1)), tokens=2, **variant)
            except WorkerDied as died:
                self.worker.close()
                if died.code != -signal.SIGILL or "amx_tile" not in cpu_flags():
                    raise SystemExit(str(died)) from died
                continue
            if note:
                self.environment |= environment
                self.notes.append(note)
            return
        raise SystemExit(f"{self.spec} dies of an illegal instruction on this processor; {self.advice()}")

    def ways(self, scratch: Path) -> Iterator[tuple[dict[str, str], str]]:
        yield {}, ""
        if self.spec.startswith("transformers"):
            told = "AMX tiles told by tools/amx_cpuid.c: CPUID of this machine omits them"
            without = "oneDNN without AMX: its use of AMX crashes on this machine"
            library = scratch / "amx_cpuid.so"
            build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(TOOLS / "amx_cpuid.c")]
            if shutil.which("cc") and subprocess.run(build, check=False).returncode == 0:
                yield {"LD_PRELOAD": str(library)}, told
            yield {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, without

    def advice(self) -> str:
        if self.spec.startswith("llama.cpp"):
            flags = 'CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse"'
            how = f"{flags} pip install --force-reinstall --no-cache-dir llama-cpp-python"
            return f"GCC before 13 breaks its AMX kernels unless it is built so: {how}"
        return "leave it out with --engines"


def parse_engines(args: argparse.Namespace, model: Path, room: int) -> list[Engine]:
    engines = [parse_engine(args, spec, model, room) for spec in args.engines.split(",")]
    for engine in engines if args.avx2 else []:
        engine.environment |= AVX2.get(engine.spec.partition(":")[0], {})
    return engines


def check_avx2(engine: Engine) -> None:
    """Ends the program where an engine that was to be kept to AVX2 says that it uses more."""
    isa = engine.info["isa"]
    if not re.search(r"avx512|amx", isa, re.IGNORECASE):
        return
    how = ""
    if engine.spec.startswith("llama.cpp"):
        flags = 'CMAKE_ARGS="-DGGML_NATIVE=OFF"'
        how = f"; {flags} pip install --force-reinstall --no-cache-dir llama-cpp-python builds it without"
    raise SystemExit(f"--avx2: {engine.spec} uses more than AVX2 ({isa}){how}")


def parse_engine(args: argparse.Namespace, spec: str, model: Path, room: int) -> Engine:
    name, *parts = spec.split(":")
    threads = str(args.threads)
    peer = {"OMP_NUM_THREADS": threads}
    if name == "refrain" and len(parts) <= 2:
        command = [str(args.worker), "worker", str(model), "--threads", threads]
        for option, value in zip(["--compute", "--kv"], parts, strict=False):
            command += [option, value]
        return Engine(spec, command)
    worker = str(TOOLS / "peers_worker.py")
    if name == "llama.cpp" and len(parts) <= 1:
        if not model.is_file():
            raise SystemExit(f"llama.cpp needs a GGUF file, and {model} is none; leave it out with --engines")
        file = requantized(args.llama_python, model, parts[0]) if parts else model
        command = [args.llama_python, worker, name, str(file), "--threads", threads, "--context", str(room)]
        return Engine(spec, command, [{"flash": True}, {"flash": False}], environment=peer)
    if name == "transformers" and len(parts) <= 1:
        dtype = parts[0] if parts else "bf16"
        command = [args.transformers_python, worker, name, str(model), "--threads", threads, "--dtype", dtype]
        return Engine(spec, command, environment=peer)
    known = "refrain[:COMPUTE[:KV]], llama.cpp[:bf16|q8_0], transformers[:bf16|f32|f16]"
    raise SystemExit(f"engine '{spec}' is not known; known are {known}")


def requantized(python: str, model: Path, kind: str) -> Path:
    """The model in another type, written beside it once, or in the user's cache where that is not allowed."""
    target = model.with_name(f"{model.stem}.requantized-{kind}.gguf")
    if not os.access(model.parent, os.W_OK):
        # Models of several folders may have one name.
        place = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:16]
        target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refrain/bench" / place / target.name
        target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or target.stat().st_mtime < model.stat().st_mtime:
        say(f"writing {target}")
        command = [python, str(TOOLS / "peers_worker.py"), "quantize", str(model), str(target), "--type", kind]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"llama.cpp:{kind}: cannot write {target}")
    return target
