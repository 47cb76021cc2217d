"""Tests of gpu-check with programs that only print: what it runs, what it says, and when it fails."""

import gzip
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).parent

# Each program notes its words; REFRAIN_FAILS names words that make one fail.
PROGRAM = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
case " $* " in *" ${REFRAIN_FAILS:-none} "*) echo broken >&2; exit 1 ;; esac
case "${0##*/} $1" in
"refrain ask") echo "an answer" ;;
"refrain bench") echo '{"results": []}' ;;
"refrain-bench kernels") while [ "$1" != --json ]; do shift; done; echo '{}' >"$2" ;;
"refrain-bench device") echo "near the CPU" ;;
"refrain-bench targets") while [ "$1" != --json ]; do shift; done; echo '{"targets": []}' >"$2"; echo "the summary" ;;
esac
"""


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name in ("conformance", "refrain", "refrain-bench"):
            (self.folder / f"{name}.gz").write_bytes(gzip.compress(PROGRAM.encode()))
        for name in ("gpu-check", "gpu_torch.py"):
            shutil.copy(TOOLS / name, self.folder)

    def run_it(self, **variables):
        """Runs it where no torch is."""
        calls = self.folder / "calls"
        calls.write_text("")
        (self.folder / "torch.py").write_text("raise ImportError\n")
        report = self.folder / "report.json"
        environment = {**os.environ, "CALLS": str(calls), "PYTHONPATH": str(self.folder), "GPU_CHECK_TINY": "", **variables}
        command = [self.folder / "gpu-check", report]
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return found, calls.read_text().splitlines(), report

    def test_all_is_checked_and_measured(self):
        found, calls, report = self.run_it()
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
        self.assertEqual(json.loads(report.read_text()), {"targets": []})
        for said in ("near the CPU", "the summary", "0 failed", "skipped: torch beside it: gpu_torch: torch is not installed"):
            self.assertIn(said, found.stdout)
        self.assertEqual(found.stdout.count("passed: "), 8)
        self.assertEqual([call for call in calls if call.startswith("conformance")], ["conformance every_call", "conformance --skip every_call"])
        ttft = next(call for call in calls if call.startswith("refrain bench ttft"))
        for words in ("--device cuda", "--lengths 6144,32768", "vanilla;full_reuse;pie;a3:ratio=0.15"):
            self.assertIn(words, ttft)
        self.assertIn("refrain-bench random-model llama-3-8b", "\n".join(calls))
        targets = calls[-1].split()
        self.assertEqual([word for word in targets if word.startswith("--")], ["--kernels", "--ttft", "--decode", "--decode", "--checks", "--json"])

    def test_small_shapes_are_of_emulated_threads(self):
        found, calls, _ = self.run_it(GPU_CHECK_TINY="1")
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
        self.assertIn("--tiny", next(call for call in calls if call.startswith("refrain-bench kernels")))
        self.assertNotIn("llama-3-8b", "\n".join(calls))
        self.assertEqual([call for call in calls if call.startswith("conformance")], ["conformance every_call"])

    def test_what_fails_is_told_and_the_rest_goes_on(self):
        found, calls, _ = self.run_it(REFRAIN_FAILS="decode")
        self.assertEqual(found.returncode, 1)
        self.assertIn("FAILED: the measurement of decode\n    broken\n", found.stdout)
        self.assertIn("the summary", found.stdout)
        self.assertNotIn("--decode", calls[-1])
        found, _, _ = self.run_it(REFRAIN_FAILS="device")
        self.assertIn("FAILED: a model of the shape of smollm2-135m has the logits of the CPU\n    broken\n", found.stdout)
        self.assertEqual(found.stdout.count("broken"), 1)
        self.assertIn("1 failed", found.stdout)
        found, _, _ = self.run_it(REFRAIN_FAILS="kernels")
        self.assertIn("no summary: the peaks of the GPU were not measured", found.stdout)


if __name__ == "__main__":
    unittest.main()
