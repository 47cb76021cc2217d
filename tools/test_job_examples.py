"""Tests of examples/jobs: the runners that ssh.sh and array.sbatch start, with programs in place of ssh, srun and refrain."""

import os
import re
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import program_options

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/jobs/ssh.sh"
ARRAY = ROOT / "examples/jobs/array.sbatch"

# As ssh, it gives its input to a shell elsewhere, which sees that end when the connection does.
SSH = """#!/usr/bin/env python3
import os, signal, subprocess, sys
there = subprocess.Popen(["sh", "-c", sys.argv[2]], stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "HOST": sys.argv[1]})
def end(*_):
    os.close(there.stdin.fileno())
    os._exit(255)
signal.signal(signal.SIGTERM, end)
sys.exit(there.wait())
"""

# The statuses of its runs, one a line of a file a host; `wait` waits for a signal.
REFRAIN = """#!/usr/bin/env bash
trap 'echo "$HOST: stopped" >> "$LOG"; exit 130' TERM
echo "$HOST: $*" >> "$LOG"
status=$(head -n 1 "$STATUSES/$HOST")
sed -i 1d "$STATUSES/$HOST"
if [ "$status" = wait ]; then
    for _ in $(seq 600); do sleep 0.1; done
fi
exit "$status"
"""


class Ssh(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)
        for name, text in [("bin/ssh", SSH), ("bin/refrain", REFRAIN)]:
            path = self.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (self.root / "statuses").mkdir()
        self.log = self.root / "log"
        self.log.touch()

    def start(self, statuses, job="file:///shared/a job"):
        for host, each in statuses.items():
            (self.root / "statuses" / host).write_text("".join(f"{status}\n" for status in each))
        environment = {**os.environ, "PATH": f"{self.root}/bin:{os.environ['PATH']}", "PAUSE": "0"}
        environment |= {"LOG": str(self.log), "STATUSES": str(self.root / "statuses")}
        return subprocess.Popen([SCRIPT, job, *statuses], env=environment, stderr=subprocess.PIPE, text=True)

    def ended(self, script):
        _, said = script.communicate(timeout=60)
        return script.returncode, said, sorted(self.log.read_text().splitlines())

    def test_runners_have_an_index_each_and_those_that_die_are_started_again(self):
        status, said, log = self.ended(self.start({"a": [0], "b": [1, 137, 0]}))
        self.assertEqual((status, said.count("started again")), (0, 2))
        words = "job run --index {} --job file:///shared/a job"
        self.assertEqual(log, [f"a: {words.format(0)}"] + 3 * [f"b: {words.format(1)}"])

    def test_what_would_end_in_the_same_way_is_told_and_not_tried_again(self):
        for lasting in [3, 4]:
            self.log.write_text("")
            status, _, log = self.ended(self.start({"a": [lasting], "b": [0]}))
            self.assertEqual((status, len(log)), (lasting, 2))

    def test_a_signal_stops_all_runners(self):
        script = self.start({"a": ["wait"], "b": ["wait"]})
        deadline = time.monotonic() + 60
        while len(self.log.read_text().splitlines()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        status, *_ = self.ended(script)
        self.assertEqual(status, 130)
        stopped = ["a: stopped", "b: stopped"]
        while not set(stopped) <= set(self.log.read_text().splitlines()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(sorted(line for line in self.log.read_text().splitlines() if "stopped" in line), stopped)

    def test_it_says_how_it_is_called(self):
        ran = subprocess.run([SCRIPT, "file:///shared/job"], capture_output=True, text=True)
        self.assertEqual((ran.returncode, ran.stderr), (2, f"usage: {SCRIPT} JOB HOST...\n"))


# As srun, it starts the program with the CPUs that it is told; what is in the folder of chunks then is noted.
SRUN = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
touch "${@: -1}/chunk"
exit "$STATUS"
"""


class Slurm(unittest.TestCase):
    def run_task(self, status, **more):
        """The status of a task, what it was called with, and what it leaves in its temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            srun, log, temporary = root / "bin/srun", root / "log", root / "a folder"
            srun.parent.mkdir()
            temporary.mkdir()
            srun.write_text(SRUN)
            srun.chmod(0o755)
            environment = {**os.environ, "PATH": f"{srun.parent}:{os.environ['PATH']}", "LOG": str(log), "STATUS": str(status)}
            environment |= {"TMPDIR": str(temporary), "SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", **more}
            ran = subprocess.run(["bash", ARRAY, "file:///shared/a job"], env=environment, capture_output=True, text=True, timeout=60)
            called = log.read_text().strip().replace(str(temporary), "TMPDIR")
            return ran.returncode, called, list(temporary.iterdir())

    def test_a_task_runs_a_runner_with_its_cpus_and_a_folder_that_goes_with_it(self):
        job = "refrain job run --job file:///shared/a job"
        ended = self.run_task(0, SLURM_CPUS_PER_TASK="8")
        self.assertEqual(ended, (0, f"--cpus-per-task=8 {job} --threads 8 --store TMPDIR/refrain-17", []))
        ended = self.run_task(3)
        self.assertEqual(ended, (3, f"--cpus-per-task=1 {job} --threads 1 --store TMPDIR/refrain-17", []))

    def test_it_wants_a_job(self):
        ran = subprocess.run(["bash", ARRAY], capture_output=True, text=True)
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("give the URL of the job", ran.stderr)

    def test_options_are_those_of_the_program(self):
        options = program_options.refrain("job run")
        for script in [SCRIPT, ARRAY]:
            lines = [line for line in script.read_text().splitlines() if "refrain job run" in line and not line.startswith("#")]
            given = [word for line in lines for word in re.findall(r"--([a-z-]+)", line.split("refrain job run")[1])]
            self.assertIn("job", given)
            self.assertLessEqual(set(given), set(options))


if __name__ == "__main__":
    unittest.main()
