"""Tests of check-cuda and cuda-kernels."""

import importlib.machinery
import importlib.util
import tempfile
import unittest
from pathlib import Path

import cuda_lock

PROGRAM = Path(__file__).resolve().parent / "cuda-kernels"
LOADER = importlib.machinery.SourceFileLoader("cuda_kernels", str(PROGRAM))
cuda_kernels = importlib.util.module_from_spec(importlib.util.spec_from_loader("cuda_kernels", LOADER))
LOADER.exec_module(cuda_kernels)

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'copy' for 'sm_80'
ptxas info    : Function properties for copy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers, 396 bytes cmem[0]
ptxas info    : Compiling entry function 'product' for 'sm_90a'
ptxas info    : Function properties for product
    24 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem, 396 bytes cmem[0]
"""


class CheckCuda(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        for file in [cuda_lock.FATBIN, cuda_lock.PINS, *self.sources("kernels.cu", "rows.cu", "device.h")]:
            self.write(file, file)
        cuda_lock.write(self.root, ["kernels.cu", "rows.cu", "device.h"])

    def sources(self, *names):
        return [f"{cuda_lock.FOLDER}/{name}" for name in names]

    def write(self, file, text):
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def breaches(self):
        return list(cuda_lock.breaches(self.root))

    def test_what_was_compiled_is_what_lies_there(self):
        self.assertEqual(self.breaches(), [])

    def test_a_changed_byte_is_found(self):
        for file in [cuda_lock.FATBIN, cuda_lock.PINS, *self.sources("rows.cu", "device.h")]:
            self.write(file, f"{file} ")
            self.assertEqual(self.breaches(), [f"{file} is another than in {cuda_lock.LOCK}"])
            self.write(file, file)

    def test_a_new_source_a_missing_one_and_other_options_are_found(self):
        new, old = self.sources("new.cu", "rows.cu")
        self.write(new, "")
        (self.root / old).unlink()
        lock = self.root / cuda_lock.LOCK
        lock.write_text(lock.read_text(encoding="utf-8").replace("c++17", "c++20"), encoding="utf-8")
        self.assertEqual(
            self.breaches(),
            [
                f"the compiler's options are others than in {cuda_lock.LOCK}",
                f"{new} is not in {cuda_lock.LOCK}",
                f"{old} is missing",
            ],
        )
        lock.unlink()
        self.assertEqual(self.breaches(), [f"{cuda_lock.LOCK} is missing"])

    def test_the_repository_holds(self):
        self.assertEqual(list(cuda_lock.breaches(PROGRAM.parent.parent)), [])


class CudaKernels(unittest.TestCase):
    def test_properties_are_read_from_what_the_compiler_prints(self):
        found = {("copy", "sm_80"): (26, 0, 0), ("product", "sm_90a"): (255, 4096, 20)}
        self.assertEqual(cuda_kernels.properties(LOG), found)

    def test_occupancy_is_bounded_by_the_scarcest(self):
        for expected, case in [
            (8, ("sm_80", 256, 32, 0)),  # warps
            (32, ("sm_80", 32, 16, 0)),  # blocks
            (2, ("sm_90a", 256, 128, 0)),  # registers
            (3, ("sm_80", 128, 32, 48 << 10)),  # shared memory
        ]:
            self.assertEqual(cuda_kernels.blocks(*case), expected, case)

    def test_sources_are_those_under_the_folder(self):
        folder = cuda_kernels.ROOT / cuda_lock.FOLDER
        rule = f"kernels.o : kernels.cu \\\n  device.h {folder}/rows.cu \\\n    /usr/include/stdc-predef.h\n"
        self.assertEqual(cuda_kernels.sources_of(rule), ["device.h", "kernels.cu", "rows.cu"])


if __name__ == "__main__":
    unittest.main()
