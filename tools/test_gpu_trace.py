"""Tests of gpu-trace."""

import importlib.machinery
import importlib.util
import unittest
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "gpu-trace"
LOADER = importlib.machinery.SourceFileLoader("gpu_trace", str(PROGRAM))
gpu_trace = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_trace", LOADER))
LOADER.exec_module(gpu_trace)

TRACE = """\
K 1000 2000 7 1 old
A 100 200 55 1 307
K 9000000 9002000 7 2 norm
C 9002500 9003000 7 3 1 4096
K 9002900 9006000 7 4 product
C 9000000 9900000 9 5 1 8388608
"""


class GpuTrace(unittest.TestCase):
    def test_the_last_piece_is_that_of_the_main_stream(self):
        works = gpu_trace.read(TRACE.splitlines())
        self.assertEqual(len(works), 5)
        piece = gpu_trace.last_piece(works, 3e6)
        self.assertEqual([work.name for work in piece], ["norm", "copy of 4096 bytes", "product"])
        self.assertEqual(gpu_trace.last_piece([], 3e6), [])

    def test_time_of_two_at_once_counts_once_and_pauses_are_told(self):
        lines = gpu_trace.report(gpu_trace.last_piece(gpu_trace.read(TRACE.splitlines()), 3e6), True)
        self.assertEqual([line.split()[-1] for line in lines[:3]], ["norm", "bytes", "product"])
        self.assertEqual(lines[2].split()[:3], ["2.9", "3.1", "-0.1"])
        self.assertEqual(lines[3], "6.0 us, of which the stream was idle 0.5")
        self.assertEqual([line.split()[0] for line in lines[4:]], ["3.0", "2.0", "0.5"])

    def test_a_line_that_is_no_record_is_told(self):
        with self.assertRaisesRegex(ValueError, "line 2 is no record: 'hello'"):
            gpu_trace.read(["K 1 2 7 1 norm\n", "hello\n"])


if __name__ == "__main__":
    unittest.main()
