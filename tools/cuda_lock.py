"""What the compiled kernels of crates/cuda are made from, and the file that says so: crates/cuda/kernels.lock.

The lock has the compiler's options and the SHA-256 of the compiled kernels, of each source that the compiler read, and of the compiler's pins.
Paths in it are relative to the repository.
"""

import hashlib

FOLDER = "crates/cuda/kernels"
FATBIN = "crates/cuda/kernels.fatbin"
LOCK = "crates/cuda/kernels.lock"
PINS = "tools/requirements-cuda.txt"

# Machine code for Ampere and Ada (sm_80) and for Hopper with what it alone has (sm_90a), and PTX, which drivers compile for later GPUs.
OPTIONS = [
    "--fatbin",
    "--std=c++17",
    "--generate-code=arch=compute_80,code=[sm_80,compute_80]",
    "--generate-code=arch=compute_90a,code=sm_90a",
    "--compress-mode=size",
    "--Werror=all-warnings",
]

HEADER = "# Written by `make cuda`, from which files and how kernels.fatbin was made; tools/check-cuda holds them against it."


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(root, sources):
    """Writes the lock of the compiled kernels, which were made from these paths under the folder of kernels."""
    files = [FATBIN, PINS, *sorted(f"{FOLDER}/{source}" for source in sources)]
    lines = [HEADER, f"options  {' '.join(OPTIONS)}", *(f"{digest(root / file)}  {file}" for file in files)]
    (root / LOCK).write_text("\n".join(lines) + "\n", encoding="utf-8")


def breaches(root):
    """One line for each way in which the compiled kernels are not those of the sources."""
    lock = root / LOCK
    if not lock.is_file():
        yield f"{LOCK} is missing"
        return
    locked = {}
    options = None
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        first, _, rest = line.partition("  ")
        if first == "options":
            options = rest
        else:
            locked[rest] = first
    if options != " ".join(OPTIONS):
        yield f"the compiler's options are others than in {LOCK}"
    found = sorted(f"{FOLDER}/{path.relative_to(root / FOLDER)}" for path in (root / FOLDER).rglob("*.cu"))
    for file in [FATBIN, PINS, *found]:
        if file not in locked:
            yield f"{file} is not in {LOCK}"
    for file, wanted in locked.items():
        if not (root / file).is_file():
            yield f"{file} is missing"
        elif digest(root / file) != wanted:
            yield f"{file} is another than in {LOCK}"
