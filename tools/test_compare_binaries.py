"""Tests of compare_binaries with programs that only print: options found by each one's help, rows and ratios."""

import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

SCRIPT = Path(__file__).with_name("compare_binaries.py")


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def program(self, name, rounds_option, factor):
        """A program that knows one name of the option for rounds and takes `factor` seconds to the first token."""
        path = self.folder / name
        path.write_text(
            f"#!{sys.executable}\n"
            + textwrap.dedent(
                f"""
                import json, sys
                words = sys.argv[1:]
                if "--help" in words:
                    print("  --methods <METHODS>\\n  -l, --lengths <TOKENS>\\n      {rounds_option} <N>")
                elif "{rounds_option}" not in words:
                    sys.exit("error: no {rounds_option}")
                else:
                    methods = [word for option, word in zip(words, words[1:]) if option == "--methods"]
                    results = [{{"method": method, "ttft": {{"median": {factor} * (i + 1)}}}} for i, method in enumerate(methods)]
                    print(json.dumps({{"about": {{"threads": 2}}, "results": results}}))
                """
            )
        )
        path.chmod(0o755)
        return path

    def server(self, name, rates):
        """A program whose `bench serve` prints a row for each of `rates`: (method, clients, tokens a second)."""
        rows = [
            {"method": method, "clients": clients, "tokens_per_second": rate, "ttft": [0.1, 0.2, 0.3], "between_tokens": [0.01, 0.02, 0.03]}
            for method, clients, rate in rates
        ]
        path = self.folder / name
        path.write_text(
            f"#!{sys.executable}\n"
            + textwrap.dedent(
                f"""
                import json, sys
                if "--help" in sys.argv:
                    print("  --methods <METHODS>\\n  --clients <N>\\n  --seconds <TIME>")
                else:
                    print(json.dumps({{"about": {{}}, "results": {rows!r}}}))
                """
            )
        )
        path.chmod(0o755)
        return path

    def compare(self, before, after, *words):
        command = [sys.executable, SCRIPT, before, after, "--bench", "ttft", "--methods", "vanilla,a3", "--lengths", "64", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_options_are_named_by_each_program(self):
        found = self.compare(self.program("a", "--runs", 0.1), self.program("b", "--rounds", 0.2), "--rounds", "2")
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertIn("| ttft vanilla 64 | 100.00 ms | 200.00 ms | 2.000 | 2.000–2.000 |", found.stdout)
        self.assertIn("| ttft a3 64 | 200.00 ms | 400.00 ms | 2.000 | 2.000–2.000 |", found.stdout)
        turns = [line.rpartition(" ")[2] for line in found.stderr.splitlines()]
        self.assertEqual(turns, ["before", "after", "after", "before"])

    def test_worse_rows_fail_where_a_bound_is_given(self):
        slow, quick = self.program("slow", "--runs", 0.11), self.program("quick", "--runs", 0.1)
        self.assertEqual(self.compare(quick, slow, "--rounds", "1", "--within", "20").returncode, 0)
        self.assertEqual(self.compare(slow, quick, "--rounds", "1", "--within", "3").returncode, 0)
        found = self.compare(quick, slow, "--rounds", "1", "--within", "3")
        self.assertEqual(found.returncode, 1)
        self.assertIn("more than 3 % worse: ttft vanilla 64; ttft a3 64", found.stderr)

    def test_a_row_of_a_server_has_the_method_and_the_clients_that_were_measured(self):
        rates = [("vanilla", 1, 10.0), ("a3:ratio=0.3", 1, 20.0), ("vanilla", 8, 30.0), ("a3:ratio=0.3", 8, 40.0)]
        before, after = self.server("before", rates), self.server("after", rates[::2] + rates[1::2])
        words = ["--bench", "serve", "--serve-methods", "vanilla,a3", "--clients", "1,8", "--rounds", "1"]
        found = self.compare(before, after, *words)
        self.assertEqual(found.returncode, 0, found.stderr)
        for method, clients, rate in rates:
            row = f"| serve {method.partition(':')[0]} {clients} clients output | {rate} tokens/s | {rate} tokens/s | 1.000 |"
            self.assertIn(row, found.stdout)
        found = self.compare(before, self.server("short", rates[:3]), *words)
        self.assertEqual(found.returncode, 1)
        self.assertIn("3 results where 4 were expected", found.stderr)

    def test_an_unknown_option_or_a_failing_program_is_told(self):
        found = self.compare(self.program("a", "--runs", 0.1), self.program("b", "--turns", 0.1), "--rounds", "1")
        self.assertEqual(found.returncode, 1)
        self.assertIn("after: `bench ttft` has none of --runs, --rounds, --num-iters", found.stderr)
        found = self.compare(self.program("a", "--runs", 0.1), self.folder / "missing", "--rounds", "1")
        self.assertEqual(found.returncode, 1)
        self.assertIn("missing", found.stderr)


if __name__ == "__main__":
    unittest.main()
