"""Tests of packaging/ and docs/grafana.json: what names the same thing in several files names it alike, and metrics that are there."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def script(name):
    """A script of packaging/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(PACKAGING / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


# Values that go up and down. Everything else is counted, and has to be a counter: `increase` and `rate` know a restart by the type.
GAUGES = {
    "device_chunk_cache_bytes", "device_failed", "device_memory_bytes", "device_memory_free_bytes", "documents", "documents_last_sync_timestamp_seconds",
    "documents_sync_interval_seconds", "documents_unsent", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "prefix_cache_bytes",
    "store_disk_bytes", "store_memory_bytes", "store_remote_pending",
}


def declared_metrics():
    """Type and name of each metric that the server's source declares."""
    source = text("crates/server/src/metrics.rs") + text("crates/server/src/device_metrics.rs")
    found = re.findall(r'\w+: (Gauge|Counter|Histogram|Seconds|ByStatus|ByCode)[^"\n]*, "(\w+)", "[^"]*";', source)
    # A metric that this expression missed would be one that no test asks about.
    declared = re.findall(r"metrics! \{.*?\n\}\n", source, re.DOTALL)
    assert len(found) == sum(block.count(";\n") for block in declared) > 50, found
    return found


def registered():
    """The series that the server's source registers, by the names that Prometheus gives them."""
    endings = {"Gauge": [""], "Histogram": ["_bucket", "_sum", "_count"]}
    return {f"refrain_{name}{ending}" for kind, name in declared_metrics() for ending in endings.get(kind, ["_total"])}


def expressions():
    panels = json.loads(text("docs/grafana.json"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def block(yaml, name):
    """The lines of a service of the compose file, comments aside."""
    lines = [line for line in yaml.splitlines() if not line.strip().startswith("#")]
    start = lines.index(f"  {name}:")
    length = next((n for n, line in enumerate(lines[start + 1 :]) if re.match(r" {0,2}\S", line)), len(lines))
    return "\n".join(lines[start : start + 1 + length])


class Dashboard(unittest.TestCase):
    def test_every_series_is_one_that_the_server_exports(self):
        known = registered()
        for expression in expressions():
            named = re.findall(r"\brefrain_\w+", expression)
            self.assertTrue(named, expression)
            for series in named:
                self.assertIn(series, known, expression)

    def test_counters_and_histograms_are_asked_for_their_rates(self):
        for expression in expressions():
            unlabelled = re.sub(r"\{.*?\}", "", expression)
            for series in re.findall(r"\brefrain_\w+_(?:total|bucket)\b", unlabelled):
                self.assertIn(f"rate({series}[$__rate_interval])", unlabelled)

    def test_what_is_counted_is_a_counter(self):
        self.assertEqual({name for kind, name in declared_metrics() if kind == "Gauge"}, GAUGES)

    def test_the_cached_share_counts_chunks_and_prefixes(self):
        panels = json.loads(text("docs/grafana.json"))["panels"]
        targets = next(panel["targets"] for panel in panels if panel["title"] == "Share of prompt tokens from the cache")
        cached = next(target["expr"] for target in targets if target["legendFormat"] == "cached")
        self.assertEqual(re.findall(r"\brefrain_\w+", cached), ["refrain_cached_tokens_total", "refrain_prompt_tokens_total"])

    def test_its_data_source_can_be_any_of_prometheus(self):
        dashboard = json.loads(text("docs/grafana.json"))
        self.assertEqual({panel["datasource"]["uid"] for panel in dashboard["panels"]}, {"${datasource}"})
        self.assertEqual([variable["query"] for variable in dashboard["templating"]["list"]], ["prometheus"])


class Image(unittest.TestCase):
    dockerfile = text("packaging/Dockerfile")

    def test_the_port_is_that_of_the_server(self):
        port = re.search(r'value_name = "PORT", default_value_t = (\d+)\)', text("crates/cli/src/args/serve.rs"))[1]
        check = re.search(r'value_name = "PORT", default_value_t = (\d+)\)', text("crates/cli/src/args/install.rs"))[1]
        self.assertEqual(check, port)
        self.assertIn(f"EXPOSE {port}\n", self.dockerfile)
        self.assertIn(f"REFRAIN_PORT={port}\n", self.dockerfile)
        self.assertIn(f'"127.0.0.1:{port}:{port}"', block(text("packaging/compose.yaml"), "refrain"))
        self.assertIn(f'targets: ["refrain:{port}"]', text("packaging/prometheus.yml"))

    def test_one_user_without_rights_owns_the_volumes(self):
        users = re.findall(r"^USER (\d+):(\d+)$", self.dockerfile, re.MULTILINE)
        self.assertEqual(len(users), 1)
        self.assertNotEqual(users[0][0], "0")
        self.assertIn(f"--chown={users[0][0]}:{users[0][1]} /owned/ /\n", self.dockerfile)
        volumes = json.loads(re.search(r"^VOLUME (.*)$", self.dockerfile, re.MULTILINE)[1])
        for volume in volumes:
            self.assertIn(f"/owned{volume}", self.dockerfile)
            self.assertRegex(text("packaging/compose.yaml"), rf"(?m)^    - \w+:{volume}$")
        # Everything that the program writes lies in a volume: the rest of the file system is read-only in compose.yaml.
        for variable in ["HOME", "XDG_DATA_HOME", "HF_HOME", "REFRAIN_MODELS"]:
            value = re.search(rf"\b{variable}=(\S+)", self.dockerfile)[1]
            self.assertTrue(any(value == volume or value.startswith(f"{volume}/") for volume in volumes), variable)

    def test_health_is_asked_of_the_program_itself(self):
        program = re.search(r'^ENTRYPOINT \["(.*)"\]$', self.dockerfile, re.MULTILINE)[1]
        self.assertRegex(self.dockerfile, rf'HEALTHCHECK .* CMD \["{program}", "health"\]')
        self.assertIn(f"/out{program}", self.dockerfile)
        self.assertIn("    Health(Health),", text("crates/cli/src/args.rs"))

    def test_the_builder_gets_all_that_it_copies(self):
        ignored = text(".dockerignore").splitlines()
        self.assertIn("*", ignored)
        for name in ["Cargo.toml", "Cargo.lock", "crates", "packaging/notices", "LICENSE-MIT", "LICENSE-APACHE"]:
            self.assertIn(f"!{name}", ignored)
        # Texts outside of crates that sources include; those that tests of docs alone read are not built.
        for source in (ROOT / "crates").glob("*/src/**/*.rs"):
            built = re.sub(r"#\[cfg\(doctest\)\]\n#\[doc = .*\]\n", "", source.read_text(encoding="utf-8"))
            for path in re.findall(r'include_(?:str|bytes)!\("((?:\.\./)+[^"]+)"', built):
                top = (source.parent / path).resolve().relative_to(ROOT).parts[0]
                self.assertIn(f"!{top}", ignored, source)

    def test_the_compiler_is_that_of_the_project(self):
        channel = re.search(r'channel = "(\d+\.\d+)', text("rust-toolchain.toml"))[1]
        self.assertIn(f"/rust:{channel}-bookworm\n", self.dockerfile)


class Compose(unittest.TestCase):
    yaml = text("packaging/compose.yaml")

    def test_ports_are_published_on_the_loopback_address_alone(self):
        published = re.findall(r"^ +ports: (.*)$", self.yaml, re.MULTILINE)
        self.assertEqual(len(published), 4)
        for ports in published:
            for port in json.loads(ports):
                self.assertRegex(port, r"^127\.0\.0\.1:\d+:\d+$")

    def test_images_have_versions(self):
        images = re.findall(r"^ +image: (.*)$", self.yaml, re.MULTILINE)
        self.assertEqual(len(images), 4)
        for image in images:
            self.assertRegex(image, r":v?\d+\.\d+\.\d+$")
        version = re.search(r'^version = "(.*)"$', text("Cargo.toml"), re.MULTILINE)[1]
        self.assertIn(f"refrain:{version}", images)
        for name in ["packaging/Dockerfile", "docs/install.md"]:
            self.assertIn(f"-t refrain:{version}", text(name))

    def test_files_that_are_mounted_are_there(self):
        mounted = re.findall(r"^ +- (\.{1,2}/[^:]+):", self.yaml, re.MULTILINE)
        self.assertEqual(len(mounted), 6)
        for name in mounted:
            self.assertTrue((PACKAGING / name).is_file(), name)

    def test_services_find_one_another(self):
        self.assertIn("REFRAIN_OTLP_TRACES_ENDPOINT: http://otel-collector:4318", block(self.yaml, "refrain"))
        self.assertIn("endpoint: 0.0.0.0:4318", text("packaging/otel-collector.yaml"))
        self.assertIn("url: http://prometheus:9090", text("packaging/grafana/datasource.yaml"))
        for rules in re.findall(r"rule_files: \[(\S+)\]", text("packaging/prometheus.yml")):
            self.assertIn(f"/{rules}:/etc/prometheus/{rules}:ro", block(self.yaml, "prometheus"))
        interval = re.search(r"scrape_interval: (\S+)", text("packaging/prometheus.yml"))[1]
        self.assertIn(f"timeInterval: {interval}", text("packaging/grafana/datasource.yaml"))
        folder = re.search(r"path: (\S+)", text("packaging/grafana/dashboards.yaml"))[1]
        self.assertIn(f"../docs/grafana.json:{folder}/", block(self.yaml, "grafana"))


class Packages(unittest.TestCase):
    def test_the_unit_names_the_folders_of_the_package(self):
        unit = text("packaging/refrain.service")
        self.assertIn("ExecStart=/usr/bin/refrain serve\n", unit)
        user = re.search(r"^User=(\w+)$", unit, re.MULTILINE)[1]
        self.assertRegex(text("packaging/refrain.sysusers"), rf"(?m)^u {user} ")
        models = re.search(r"REFRAIN_MODELS=(\S+)", unit)[1]
        self.assertIn(f"-o {user} -g {user} ", text("packaging/debian/postinst"))
        self.assertIn(f" {models}\n", text("packaging/debian/postinst"))
        cache = re.search(r"HF_HOME=(\S+)", unit)[1]
        commands = re.findall(r"^sudo -u refrain (?:.*\\\n)*.*", text("docs/install.md"), re.MULTILINE)
        self.assertEqual(len(commands), 2)
        for command in commands:
            for variable in [f"REFRAIN_MODELS={models}", f"HF_HOME={cache}"]:
                self.assertIn(variable, command.split())

    def test_what_the_program_needs_of_its_machine_is_read_off(self):
        package = script("package")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program"
            head = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00"
            file.write_bytes(head + b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.9\0")
            self.assertEqual((package.architecture(file), package.oldest_libc(file)), ("x86_64", "2.34"))
            file.write_bytes(b"#!/bin/sh\n")
            with self.assertRaises(SystemExit):
                package.architecture(file)

    def test_an_archive_is_the_same_at_any_time_and_by_anyone(self):
        package = script("package")
        with tempfile.TemporaryDirectory() as folder:
            made = []
            for name, files in [("a", ["x", "y"]), ("b", ["y", "x"])]:
                top = Path(folder) / name / "refrain-1"
                for file in files:
                    package.write(top / file, file)
                package.archive(top, Path(folder) / f"{name}.tar.gz", 1_700_000_000)
                made.append((Path(folder) / f"{name}.tar.gz").read_bytes())
            self.assertEqual(made[0], made[1])

    def test_another_version_is_not_packaged(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "refrain"
            program.write_text("#!/bin/sh\necho refrain 0.0.0\n")
            program.chmod(0o755)
            command = [PACKAGING / "package", "--binary", program, "--out", Path(folder) / "dist"]
            ran = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 1)
            self.assertIn("refrain 0.0.0", ran.stderr)
            self.assertFalse((Path(folder) / "dist").exists())

    def test_scripts_of_the_package_are_sound_shell(self):
        for name in ["postinst", "prerm", "postrm"]:
            ran = subprocess.run(["sh", "-n", PACKAGING / "debian" / name], capture_output=True, text=True)
            self.assertEqual((ran.returncode, ran.stderr), (0, ""), name)


if __name__ == "__main__":
    unittest.main()
