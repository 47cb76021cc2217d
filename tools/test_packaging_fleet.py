"""Tests of what packaging/ has for many machines: options, ports, variables and metrics are those of the programs."""

import json
import os
import re
import sys
import textwrap
import unittest
import unittest.mock

sys.dont_write_bytecode = True

import program_options
from test_packaging import PACKAGING, ROOT, block, registered, text

CHART = PACKAGING / "helm/refrain"
TEMPLATES = "\n".join(file.read_text(encoding="utf-8") for file in sorted(CHART.glob("templates/*")))
VERSION = re.search(r'^version = "(.*)"$', text("Cargo.toml"), re.MULTILINE)[1]


def series():
    """The series that servers, workers and gateways export, by the names that Prometheus gives them."""
    source = text("scale/src/gateway/metrics.rs")
    found = re.findall(r'metric!\(\s*"(\w+)",\s*"[^"]*",\s*(Gauge|Counter|Histogram|ByStatus|ByOutcome)::', source)
    # A metric that this expression missed would be one that no test asks about.
    assert len(found) == len(re.findall(r'metric!\(\s*"', source)) > 5, found
    assert 'Registry::with_prefix("refrain_gateway")' in source and source.count("; 1], Counter>") == 2
    endings = {"Gauge": [""], "Counter": ["_total"], "ByStatus": ["_total"], "ByOutcome": ["_total"], "Histogram": ["_bucket", "_sum", "_count"]}
    return registered() | {f"refrain_gateway_{name}{ending}" for name, kind in found for ending in endings[kind]}


class Options(unittest.TestCase):
    def test_options_are_read_from_the_source(self):
        worker, gateway = program_options.scale("worker"), program_options.scale("gateway")
        self.assertEqual(worker["namespace-key"], "REFRAIN_NAMESPACE_KEY")
        self.assertEqual(gateway["shutdown-timeout"], "REFRAIN_SHUTDOWN_TIMEOUT")
        self.assertIn("workers", gateway)
        self.assertNotIn("workers", worker)
        self.assertNotIn("common", worker)
        serve = program_options.refrain("serve")
        self.assertEqual((serve["api-key-file"], serve["threads"]), ("REFRAIN_API_KEY_FILE", "REFRAIN_THREADS"))

    def test_the_chart_gives_options_that_there_are(self):
        worker, gateway, serve = program_options.scale("worker"), program_options.scale("gateway"), program_options.refrain("serve")
        given = set(re.findall(r"--([a-z][a-z-]+)=", TEMPLATES)) | set(re.findall(r'set \$\w+ "([a-z-]+)"', TEMPLATES))
        self.assertTrue({"discovery", "workers", "remote", "api-key-file", "shutdown-timeout", "job"} <= given, given)
        # `refrain job` has the option of its own.
        for name in given - {"job"}:
            self.assertTrue(name in worker or name in gateway, name)
        for name in ["model", "disk", "remote", "shutdown-timeout", "api-key-file"]:
            self.assertIn(name, serve)
        for name in ["model", "disk", "remote", "shutdown-timeout", "discovery", "discovery-namespace"]:
            self.assertIn(name, worker)
        for name in ["workers", "api-key-file", "shutdown-timeout", "discovery", "discovery-namespace"]:
            self.assertIn(name, gateway)

    def test_variables_are_read_by_the_programs(self):
        read = set(program_options.scale("worker").values()) | set(program_options.scale("gateway").values())
        for name in ["packaging/scale.Dockerfile", "packaging/compose-fleet.yaml", "packaging/compose-fleet-keys.yaml"]:
            lines = [line for line in text(name).splitlines() if not line.strip().startswith("#")]
            variables = re.findall(r"\b(REFRAIN_\w+)[=:] ?", re.sub(r"\$\{.*?\}", "", "\n".join(lines)))
            self.assertTrue(variables, name)
            for variable in variables:
                self.assertIn(variable, read, name)
        named = set(re.findall(r"name: (REFRAIN_\w+)", TEMPLATES))
        self.assertTrue(named)
        self.assertTrue(named <= set(program_options.refrain("serve").values()), named)
        # Runners of a job alone are programs of one user.
        self.assertTrue(named - {"REFRAIN_CREDENTIAL"} <= read, named)


class Image(unittest.TestCase):
    dockerfile = text("packaging/scale.Dockerfile")

    def test_the_port_is_that_of_the_programs(self):
        port, probed = re.findall(r'value_name = "PORT", default_value_t = (\d+), env = "REFRAIN_PORT"', text("scale/src/args.rs"))
        self.assertEqual(probed, port)
        self.assertIn(f"EXPOSE {port}\n", self.dockerfile)
        self.assertIn(f"REFRAIN_PORT={port}\n", self.dockerfile)
        self.assertIn(f'"127.0.0.1:{port}:{port}"', block(text("packaging/compose-fleet.yaml"), "gateway"))
        self.assertIn(f'targets: ["gateway:{port}"]', text("packaging/prometheus-fleet.yml"))
        self.assertIn(f"port: {port}\n", text("packaging/prometheus-fleet.yml"))
        self.assertEqual(set(re.findall(r"name: http, containerPort: (\d+)", TEMPLATES)), {port})
        self.assertIn(f".svc:{port}", TEMPLATES)

    def test_it_is_made_as_the_image_of_the_server(self):
        server = text("packaging/Dockerfile")
        for expression in [r"^ARG \w+=.*$", r"^VOLUME .*$", r"^USER .*$", r"^EXPOSE .*$", r"^HEALTHCHECK .*CMD", r"^COPY --from=build .*$"]:
            own = re.findall(expression, self.dockerfile, re.MULTILINE)
            self.assertTrue(own, expression)
            self.assertEqual(own, re.findall(expression, server, re.MULTILINE))
        program = re.search(r'^ENTRYPOINT \["(.*)"\]$', self.dockerfile, re.MULTILINE)[1]
        self.assertIn(f'CMD ["{program}", "probe"]', self.dockerfile)
        self.assertIn(f"/out{program}", self.dockerfile)
        self.assertIn("    Probe(Probe),", text("scale/src/args.rs"))
        user = re.search(r"^USER (\d+):(\d+)$", self.dockerfile, re.MULTILINE)
        self.assertIn(f"runAsUser: {user[1]}\n", TEMPLATES)
        self.assertIn(f"fsGroup: {user[2]}\n", TEMPLATES)

    def test_the_builder_gets_what_it_needs(self):
        ignored = text("packaging/scale.Dockerfile.dockerignore").splitlines()
        for name in ["*", "!Cargo.toml", "!crates", "!scale", "scale/target", "!packaging/notices", "!LICENSE-MIT", "!LICENSE-APACHE"]:
            self.assertIn(name, ignored)
        self.assertGreater(ignored.index("scale/target"), ignored.index("!scale"))
        # What sources of the other crates include is what the server's image takes.
        for name in re.findall(r"^!(.*)$", text(".dockerignore"), re.MULTILINE):
            self.assertTrue(f"!{name}" in ignored or name == "Cargo.lock", name)
        # Programs that scale/setup asks for, but those that the image of Rust has.
        needed = set(re.findall(r"^need \S+ (\S+) ", text("scale/setup"), re.MULTILINE)) - {"g++", "pkg-config"}
        self.assertTrue(needed)
        self.assertEqual(needed, set(re.search(r"--no-install-recommends ([a-z -]+) &&", self.dockerfile)[1].split()))


class Compose(unittest.TestCase):
    yaml = text("packaging/compose-fleet.yaml")

    def test_ports_are_published_on_the_loopback_address_alone(self):
        published = re.findall(r"^ +ports: (.*)$", self.yaml, re.MULTILINE)
        self.assertEqual(len(published), 3)
        for ports in published:
            for port in json.loads(ports):
                self.assertRegex(port, r"^127\.0\.0\.1:\d+:\d+$")

    def test_images_have_the_versions_of_the_other_files(self):
        images = set(re.findall(r"^ +image: (.*)$", self.yaml, re.MULTILINE))
        for image in images:
            self.assertRegex(image, r":v?\d+\.\d+\.\d+$")
        self.assertTrue({f"refrain:{VERSION}", f"refrain-scale:{VERSION}"} <= images)
        moto = re.search(r"^moto\[server\]==(.*)$", text("tools/requirements-tests.txt"), re.MULTILINE)[1]
        self.assertIn(f"docker.io/motoserver/moto:{moto}", images)
        for name in ["prometheus", "grafana"]:
            image = re.search(r"image: (.*)", block(text("packaging/compose.yaml"), name))[1]
            self.assertIn(image, images)
        self.assertIn(f"-t refrain-scale:{VERSION}", text("packaging/scale.Dockerfile"))
        self.assertIn(f"-t refrain-scale:{VERSION}", text("docs/install.md"))

    def test_files_that_are_mounted_are_there(self):
        mounted = re.findall(r"^ +- (\.{1,2}/[^:]+):", self.yaml, re.MULTILINE)
        self.assertEqual(len(mounted), 6)
        for name in mounted:
            self.assertTrue((PACKAGING / name).is_file(), name)

    def test_services_find_one_another(self):
        self.assertIn("ETCD_ENDPOINTS: http://etcd:2379\n", self.yaml)
        self.assertIn("--advertise-client-urls=http://etcd:2379\n", block(self.yaml, "etcd"))
        self.assertIn("http://s3:5000", self.yaml)
        self.assertIn('"--port", "5000"', block(self.yaml, "s3"))
        bucket = re.search(r"S3_BUCKET: (.*)", block(self.yaml, "bucket"))[1]
        self.assertIn(f"--remote=s3://{bucket}/", block(self.yaml, "worker"))
        self.assertIn(f"'http://127.0.0.1:5000/{bucket}', method='PUT'", block(self.yaml, "s3"))
        self.assertIn("names: [worker]", text("packaging/prometheus-fleet.yml"))
        interval = re.search(r"scrape_interval: (\S+)", text("packaging/prometheus-fleet.yml"))[1]
        self.assertIn(f"timeInterval: {interval}", text("packaging/grafana/datasource.yaml"))

    def test_a_bucket_is_made_once(self):
        script = textwrap.dedent(re.search(r"- \|\n(.*?)    environment:", block(self.yaml, "bucket"), re.DOTALL)[1])
        made, botocore = [], unittest.mock.MagicMock()
        botocore.exceptions.ClientError = KeyError
        s3 = unittest.mock.MagicMock()
        s3.head_bucket = lambda Bucket: {name: name for name, _ in made}[Bucket]
        s3.create_bucket = lambda Bucket, **place: made.append((Bucket, place))
        modules = {"boto3": unittest.mock.MagicMock(client=lambda *_, **__: s3), "botocore": botocore}
        for region, place in [("us-east-1", {}), ("eu-west-1", {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}})]:
            made.clear()
            environment = {"S3_BUCKET": "chunks", "AWS_REGION": region, "AWS_ENDPOINT": "http://s3:5000"}
            with unittest.mock.patch.dict(sys.modules, modules), unittest.mock.patch.dict(os.environ, environment):
                exec(script, {})  # noqa: S102
                exec(script, {})  # noqa: S102
            self.assertEqual(made, [("chunks", place)])

    def test_workers_share_no_folder(self):
        worker = block(self.yaml, "worker")
        self.assertIn("replicas: 2", worker)
        # A volume that is named here would be that of all replicas; one that the image asks for is made for each container.
        mounted = re.findall(r"^      - (\S+)$", worker.split("volumes:")[1], re.MULTILINE)
        self.assertEqual(mounted, ["models:/models:ro"])
        self.assertIn("/data", json.loads(re.search(r"^VOLUME (.*)$", text("packaging/scale.Dockerfile"), re.MULTILINE)[1]))


class Chart(unittest.TestCase):
    def test_it_has_the_version_of_the_program(self):
        for field in ["version", "appVersion"]:
            self.assertRegex(text("packaging/helm/refrain/Chart.yaml"), rf"(?m)^{field}: {re.escape(VERSION)}$")

    def test_variables_of_services_are_no_options(self):
        # A Service named refrain has Kubernetes set REFRAIN_PORT to an address, and the programs read it as an option.
        self.assertIn("enableServiceLinks: false", TEMPLATES)

    def test_health_is_asked_at_routes_that_there_are(self):
        asked = set(re.findall(r"httpGet: \{path: (\S+),", TEMPLATES)) | set(re.findall(r"path: (/metrics)", TEMPLATES))
        self.assertEqual(asked, {"/health", "/ready", "/metrics"})
        for path in asked:
            self.assertIn(f'.route("{path}", ', text("crates/server/src/api/mod.rs"))
            self.assertIn(f'.route("{path}", ', text("scale/src/gateway/routes.rs"))


class Metrics(unittest.TestCase):
    def test_dashboard_and_rules_ask_for_series_that_there_are(self):
        known = series()
        panels = json.loads(text("docs/grafana-gateway.json"))["panels"]
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
        expressions += re.findall(r"^        expr: (.*)$", (CHART / "files/alerts.yml").read_text(encoding="utf-8"), re.MULTILINE)
        expressions += re.findall(r'printf "(sum\(refrain_.*?\))" ', TEMPLATES)
        self.assertGreater(len(expressions), 15)
        for expression in expressions:
            named = re.findall(r"\brefrain_\w+", expression)
            self.assertTrue(named, expression)
            for name in named:
                self.assertIn(name, known, expression)
            unlabelled = re.sub(r"\{.*?\}", "", expression)
            for counter in re.findall(r"\brefrain_\w+_(?:total|bucket)\b", unlabelled):
                self.assertRegex(unlabelled, rf"\b(?:rate|increase)\({counter}\[")
            # The values of a counter that begins anew are no differences.
            self.assertNotRegex(expression, r"\bi?delta\(")

    def test_the_dashboards_share_a_data_source_and_differ_in_their_names(self):
        dashboards = [json.loads(text(f"docs/{name}.json")) for name in ["grafana", "grafana-gateway"]]
        self.assertEqual(len({dashboard["uid"] for dashboard in dashboards}), 2)
        for dashboard in dashboards:
            self.assertEqual({panel["datasource"]["uid"] for panel in dashboard["panels"]}, {"${datasource}"})


if __name__ == "__main__":
    unittest.main()
