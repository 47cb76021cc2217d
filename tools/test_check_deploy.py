"""Tests of tools/check-deploy: faults of the chart and of compose files are found. Skipped where its packages are not installed."""

import importlib.machinery
import importlib.util
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True

ROOT = Path(__file__).resolve().parent.parent
# A file of the chart, what stands there, what is put in its place, a part of what is said then, and the values if not those of fleet.
FAULTS = [
    ("templates/engine.yaml", "podManagementPolicy:", "podManagmentPolicy:", "podManagmentPolicy"),
    ("templates/engine.yaml", '"shutdown-timeout"', '"drain-timeout"', "no option --drain-timeout"),
    ("templates/_helpers.tpl", "enableServiceLinks: false", "enableServiceLinks: true", "variables of Services"),
    ("templates/_helpers.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "more than it needs"),
    ("templates/_helpers.tpl", "(int .) 15", "(int .) 0", "it drains for"),
    ("templates/_helpers.tpl", "REFRAIN_NAMESPACE_KEY", "REFRAIN_NAMESPACE_SECRET", "does not read REFRAIN_NAMESPACE_SECRET"),
    ("templates/_helpers.tpl", "trunc 48", "trunc 200", "too long"),
    ("templates/service.yaml", "targetPort: http", "targetPort: web", "ports {'web'}"),
    ("templates/networkpolicy.yaml", '(list $ "gateway")', '(list $ "gateways")', "lets in no pods"),
    ("templates/disruption.yaml", '(list "worker" "gateway")', '(list "worker" "gate")', "selects 0 kinds"),
    ("templates/gateway.yaml", "kind: Deployment, name", "kind: StatefulSet, name", "scales nothing"),
    ("templates/gateway.yaml", '"rule" "tessera"', '"rule" "cost"', "--rule=tessera is not given"),
    ("values.schema.json", '"mode": {"enum": ["plain", "fleet", "job"]}', '"mode": {"type": "string"}', "takes the values"),
    ("values.yaml", "startupSeconds: 600", "startupSeconds: 0", "startupSeconds"),
    ("README.md", "| `engine.drainSeconds` |", "| engine.drainSeconds |", "does not tell of engine.drainSeconds"),
    ("templates/engine.yaml", '"host" .Values.host', '"host" "0.0.0.0"', "refrain lacks --host=::", "fleet-all"),
    ("templates/gateway.yaml", '"host" .Values.host', '"host" "0.0.0.0"', "gateway lacks --host=::", "fleet-all"),
    ("templates/monitoring.yaml", "name: {{ .secret }}", "name: {{ .key }}", "not prometheus", "plain-all"),
    ("ci/fleet-values.yaml", "mode: fleet", "mode: fleet\nengine: {options: {ubatch-sizes: 3}}", "worker has no option --ubatch-sizes"),
]


@unittest.skipUnless((ROOT / ".deploy-checks/installed").exists(), "make check-deploy installs what this needs")
class CheckDeploy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        loader = importlib.machinery.SourceFileLoader("check_deploy", str(ROOT / "tools/check-deploy"))
        cls.tool = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_deploy", loader))
        loader.exec_module(cls.tool)

    def failures(self, file, old, new, mode="fleet"):
        """What is said of a mode with a fault in the chart."""
        with tempfile.TemporaryDirectory() as folder:
            self.tool.CHART = Path(folder) / "refrain"
            shutil.copytree(ROOT / "packaging/helm/refrain", self.tool.CHART)
            for values in self.tool.CHART.glob("ci/*"):
                if values.name != f"{mode}-values.yaml":
                    values.unlink()
            text = (self.tool.CHART / file).read_text(encoding="utf-8")
            self.assertIn(old, text)
            (self.tool.CHART / file).write_text(text.replace(old, new), encoding="utf-8")
            failures = self.tool.Failures()
            try:
                self.tool.check_chart(failures)
            except self.tool.helm_python.HelmError as error:
                failures.append(str(error))
            return failures

    def test_the_chart_as_it_is_has_no_fault(self):
        self.assertEqual(self.failures("values.yaml", "mode: plain", "mode: plain"), [])

    def test_each_fault_of_the_chart_is_told(self):
        for file, old, new, told, *mode in FAULTS:
            failures = self.failures(file, old, new, *mode)
            self.assertTrue(any(told in failure for failure in failures), f"{new}: {failures}")

    def test_each_fault_of_mode_job_is_told(self):
        for file, old, new, told in [
            ("templates/job.yaml", "- run", "- runs", "no command job runs"),
            ("templates/job.yaml", '"job" .Values.job.url', '"jobs" .Values.job.url', "no option --jobs"),
            ("templates/job.yaml", "backoffLimitPerIndex:", "backoffLimitsPerIndex:", "backoffLimitsPerIndex"),
            ("templates/networkpolicy.yaml", 'ternary "job"', 'ternary "runner"', "selects 0 kinds"),
            ("values.schema.json", '{"job": {"properties": {"url": {"minLength": 1}}}}', "{}", "takes the values"),
        ]:
            failures = self.failures(file, old, new, "job")
            self.assertTrue(any(told in failure for failure in failures), f"{new}: {failures}")

    def test_faults_of_examples_are_told(self):
        self.tool.CHART = ROOT / "packaging/helm/refrain"
        [example] = self.tool.EXAMPLES
        text = example.read_text(encoding="utf-8")
        for old, new, told in [
            ("completionMode:", "completionsMode:", "completionsMode"),
            ("--job=", "--jobs=", "no option --jobs"),
            ("{name: data, mountPath", "{name: date, mountPath", "are mounted and no volumes"),
        ]:
            self.assertIn(old, text)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "job.yaml"
                file.write_text(text.replace(old, new), encoding="utf-8")
                self.tool.EXAMPLES, failures = [file], self.tool.Failures()
                self.tool.check_examples(failures)
            self.assertTrue(any(told in failure for failure in failures), f"{new}: {failures}")
        self.tool.EXAMPLES = [example]

    def test_faults_of_compose_files_are_told(self):
        for old, new, told in [
            ("    read_only: true", "    readonly: true", "readonly"),
            ("serve", "serv", "no command serv"),
            ("REFRAIN_MODEL", "REFRAIN_MODLE", "does not read REFRAIN_MODLE"),
            ("  data:\n", "  date:\n", "data is no volume"),
            ("depends_on: [other]", "depends_on: [none]", "waits for no service"),
            ("{image: b}", "{image: b, restart: always}", "its log grows"),
        ]:
            compose = (
                "services:\n  a:\n    image: refrain:0\n    read_only: true\n    command: [serve, --threads=2]\n"
                "    environment: {REFRAIN_MODEL: a}\n    volumes: ['data:/data']\n    depends_on: [other]\n"
                "  other: {image: b}\nvolumes:\n  data:\n"
            )
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "compose.yaml"
                self.tool.COMPOSE = [file]
                file.write_text(compose)
                self.assertEqual(self.found(), [])
                file.write_text(compose.replace(old, new))
                self.assertTrue(any(told in failure for failure in self.found()), f"{new}: {self.found()}")

    def found(self):
        failures = self.tool.Failures()
        self.tool.check_compose(failures)
        return failures


if __name__ == "__main__":
    unittest.main()
