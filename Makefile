SHELL := /bin/bash
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

REFRAIN := $(or $(CARGO_TARGET_DIR),target)/release/refrain
MODEL := smollm2-135m
# The smallest known model that answers the questions of examples/demo.json rightly; the demo asserts it.
DEMO_MODEL := qwen2.5-coder-0.5b

BENCH_MODELS ?= smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b
BENCH_ROUNDS ?= 5
BENCH_THREADS ?= 2
BENCH_ARGS ?=
BENCH_TTFT_ARGS ?=
BENCH_RESULTS ?= docs/results
# Folder of the benchmarks' data.
EVAL_DATA ?= $(REFRAIN_DATA)
EVAL_TIME_BUDGET ?= 45m
EVAL_MODELS ?= smollm2-135m qwen2.5-coder-$(if $(LARGE),1.5b,0.5b)
EVAL_OUT ?= eval-small$(if $(LARGE),-large)
EVAL_ARGS ?=
# Features that are checked and tested: all of the program, and the emulated GPU, which needs Linux on x86-64.
EMULATED := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
FEATURES := --features refrain-cli/otlp $(if $(EMULATED),--features refrain-engine/emulate --features refrain-bench/emulate --features refrain-server/emulate --features refrain-eval/emulate)
# The engine's tests where nextest is not there to pick them of all that was built; the other packages are there for their features.
ENGINE_TESTS := --package refrain-engine --package refrain-cli --package refrain-bench --package refrain-server --package refrain-eval $(FEATURES) --lib
# What tests were skipped for want of, a line each.
SKIPPED := $(or $(CARGO_TARGET_DIR),target)/skipped.txt
# The program that tests were built with.
TEST_REFRAIN := $(or $(CARGO_TARGET_DIR),target)/debug/refrain
COMMA := ,
SPACE := $(subst ,, )
CRASHES ?= 1000
PACKAGE_ARGS ?=
CUDA_ARGS ?=
LOAD_ARGS ?=
FUZZ_TARGET ?= gguf
FUZZ_SECONDS ?= 60
# Seconds an input may take and MiB it may need: what strangers send while others wait.
FUZZ_LIMITS_request = -timeout=10 -rss_limit_mb=1024
FUZZ_LIMITS_schema = -timeout=5 -rss_limit_mb=1024
MODELS ?= $(or $(REFRAIN_MODELS),$(HOME)/.cache/refrain/models)
GOLDEN_MODELS ?= smollm2-135m qwen2.5-coder-0.5b
GOLDEN_FILES ?= $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf $(MODELS)/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

.PHONY: help setup build demo test test-aarch64 test-python wheel book scale scale-test scale-figures scale-check check check-deploy bench bench-ttft eval-small load fuzz golden job-test crash cuda package clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what this machine lacks (compiler, Python, Rust); says what and why
	@tools/setup

build: setup ## Build target/release/refrain
	cargo build --release --locked -p refrain-cli

demo: build ## Fetch a model, ingest examples/docs, ask three questions with vanilla and with reuse, and assert that all answers are right
	$(REFRAIN) pull $(DEMO_MODEL)
	$(REFRAIN) ingest --model $(DEMO_MODEL) examples/docs
	tools/demo --refrain $(REFRAIN) --model $(DEMO_MODEL)
	@printf '\n%s\n' 'Where things are:'
	@printf '  %-26s %s\n' '$(REFRAIN)' 'the program; try it with --help' \
	    'examples/docs/' 'the documents' 'examples/demo.json' 'the questions and their answers' \
	    '$(MODELS)/' 'the model' 'refrain store ls' 'lists the stored chunks'

# Instruction sets beside the best one under which the engine's tests run again.
TEST_ISAS := $(shell grep -qsw -e avx512f -e avx_vnni /proc/cpuinfo && echo avx2) portable

# Grammars and sampling take logits as they come: no device computes them, so that their tests, the slowest, run once.
test: setup ## Run all tests, the engine's on the reference device, on emulated GPU threads and under each instruction set too (real-model tests fetch SmolLM2-135M unless REFRAIN_OFFLINE is set)
	cargo test --workspace $(FEATURES) --no-run
	@rm -f $(SKIPPED); \
	if [ -n "$$REFRAIN_OFFLINE" ]; then \
	    echo 'REFRAIN_OFFLINE is set: tests on a real model skip where it is not there yet'; \
	elif $(TEST_REFRAIN) pull smollm2-135m </dev/null; then \
	    export REFRAIN_TEST_ALL="smollm2$${REFRAIN_TEST_ALL:+,$$REFRAIN_TEST_ALL}"; \
	else \
	    echo 'smollm2-135m cannot be fetched: tests on a real model are skipped'; \
	fi; \
	skipped() { { set +x; } 2>/dev/null; [ ! -s $(SKIPPED) ] || { echo 'Skipped:'; sort -u $(SKIPPED); }; }; \
	trap skipped EXIT; \
	run=test; \
	engine() { cargo test $(ENGINE_TESTS) -- --skip tests::grammar:: --skip sampling::; }; \
	if cargo nextest --version >/dev/null 2>&1; then \
	    run='nextest run'; \
	    engine() { cargo nextest run --workspace $(FEATURES) -E 'package(refrain-engine) & kind(lib) & !test(/^(tests::grammar|sampling)::/)'; }; \
	fi; \
	set -ex; \
	cargo $$run --workspace $(FEATURES); \
	cargo test --workspace $(FEATURES) --doc; \
	$(MAKE) test-python; \
	REFRAIN_TEST_DEVICE=reference engine; \
	$(if $(EMULATED),REFRAIN_TEST_DEVICE=cuda engine;) \
	for isa in $(TEST_ISAS); do REFRAIN_CPU=$$isa engine; done

test-aarch64: ## Test the kernels for 64-bit Arm, under QEMU on other machines (Debian: qemu-user, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)
	@tools/test-aarch64

# The Python module as its wheel lays it out, built with what tests were built with.
PYTHON_MODULE := $(or $(CARGO_TARGET_DIR),target)/python
test-python: setup ## Test the Python module (needs pytest and mypy: tools/requirements-tests.txt)
	cargo build --workspace $(FEATURES)
	@rm -rf $(PYTHON_MODULE) && mkdir -p $(PYTHON_MODULE)/refrain
	@cp "$$(ls -t $(or $(CARGO_TARGET_DIR),target)/debug/librefrain_python.{so,dylib} 2>/dev/null | head -n 1)" \
	    $(PYTHON_MODULE)/refrain/refrain.abi3.so
	@cp crates/python/refrain.pyi $(PYTHON_MODULE)/refrain/__init__.pyi
	@touch $(PYTHON_MODULE)/refrain/py.typed
	@printf '%s\n' 'from .refrain import *' 'from .refrain import __all__, __doc__' > $(PYTHON_MODULE)/refrain/__init__.py
	@if python3 -c 'import mypy, pytest' 2>/dev/null; then \
	    PYTHONPATH="$(abspath $(PYTHON_MODULE)):$(abspath .python-recipes):$$PYTHONPATH" python3 -m pytest -q -rs -p no:cacheprovider crates/python/tests; \
	else \
	    echo 'skipped: the tests of the Python module need pytest and mypy: make .python-tests/installed, then PYTHONPATH=$(abspath .python-tests) make test-python'; \
	    [[ ",$$REFRAIN_TEST_ALL," != *,python,* ]]; \
	fi

wheel: setup ## Build the Python wheel, in target/wheels, and test it in an environment of its own (fetches maturin, pytest, mypy)
	@mkdir -p target && { [ -x target/maturin/bin/maturin ] || python3 -m venv target/maturin; } || { echo 'wheel: python3-venv is needed (Debian: apt-get install python3-venv)' >&2; exit 1; }
	@target/maturin/bin/pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
	@rm -rf target/wheels target/wheel-test
	packaging/notices --package refrain-python --features refrain-python/remote > crates/python/NOTICE-THIRD-PARTY.txt
	target/maturin/bin/maturin build --release --locked --manifest-path crates/python/Cargo.toml --out target/wheels
	@python3 -m venv target/wheel-test
	@target/wheel-test/bin/pip install --quiet --disable-pip-version-check $$(grep -E '^(mypy|pytest)==' tools/requirements-tests.txt) target/wheels/*.whl
	env -u PYTHONPATH target/wheel-test/bin/python -m pytest -q -p no:cacheprovider crates/python/tests

book: setup ## Build the book (docs/book) as a site in target/book, and assert that its links lead somewhere (fetches mdBook)
	@mdbook --version >/dev/null 2>&1 || cargo install --locked --version 0.5.4 mdbook
	mdbook build docs/book
	tools/check-links target/book

# scale/ is a workspace of its own, which nothing else builds: Dynamo's runtime alone is some 480 crates.
SCALE := cd scale && cargo
# With the S3 server of .python-tests, where that is there.
SCALE_TEST := cd scale && PYTHONPATH="$(abspath .python-tests):$$PYTHONPATH" cargo test --locked
# The program that scale/ builds, and the model of its demo.
SCALE_REFRAIN := $(or $(CARGO_TARGET_DIR),scale/target)/debug/refrain-scale
SCALE_DISCOVERY ?= file
# How the programs of scale-figures are built.
SCALE_PROFILE ?= release
SCALE_SIM := $(abspath $(or $(CARGO_TARGET_DIR),target))/$(if $(filter dev,$(SCALE_PROFILE)),debug,$(SCALE_PROFILE))/refrain-sim
SIM_ARGS ?=

scale: build ## Build scale/ and run two workers and a gateway on loopback: ingest examples/docs/drive, answer a question, stop all (says what it installs)
	@scale/setup
	$(REFRAIN) pull $(DEMO_MODEL)
	$(SCALE) build --locked
	scale/demo --program $(SCALE_REFRAIN) --model $(DEMO_MODEL) --discovery $(SCALE_DISCOVERY)

scale-test: setup ## Test workers and gateways as processes on loopback: failures, sharing, upgrades, an S3 server, tenancy, throughput (some minutes; etcd, NATS and moto where they are installed)
	@scale/setup
	$(SCALE_TEST) -- --test-threads 2
	$(SCALE_TEST) --test scale -- --ignored --skip figures --test-threads 1 --nocapture

scale-figures: setup ## Times, shares and costs of 1 to 8 simulated workers beside those of refrain-sim for the same requests (twelve minutes once built; SIM_ARGS changes scale/figures.toml)
	@scale/setup
	cargo build --locked --profile $(SCALE_PROFILE) -p refrain-sim
	REFRAIN_SIM=$(SCALE_SIM) REFRAIN_SIM_ARGS="$(SIM_ARGS)" && export REFRAIN_SIM REFRAIN_SIM_ARGS && \
	    $(SCALE_TEST) --profile $(SCALE_PROFILE) --test scale figures -- --ignored --nocapture

scale-check: setup ## Format, lints and dependencies of scale/
	@scale/setup
	$(SCALE) fmt --check
	$(SCALE) clippy --locked --all-targets -- -D warnings
	$(SCALE) clippy --locked --all-targets --no-default-features -- -D warnings
	tools/deny scale

load: build ## 64 clients at once for a minute, with chats, ingests and tools; some of them leave (LOAD_ARGS adds options)
	$(REFRAIN) pull $(MODEL)
	$(REFRAIN) bench serve --model $(MODEL) --methods drift --clients 64 --seconds 60s --per-request 0-3 \
	    --leave 0.2 --ingest 0.1 --tools 0.1 $(LOAD_ARGS)

job-test: setup .python-tests/installed ## Ingest 2,000 documents by four runners, each killed every 3 seconds, with a real S3 server on loopback (minutes)
	PYTHONPATH="$(abspath .python-tests):$$PYTHONPATH" cargo test -p refrain-cli --test cli -- --ignored --nocapture two_thousand_documents

cuda: ## Compile the GPU kernels that the program carries (fetches NVIDIA's compiler, 101 MB; needs no GPU)
	tools/cuda-kernels $(CUDA_ARGS)

crash: setup ## Kill processes at a thousand moments while they store, evict and tidy up (CRASHES), and look for what is lost
	REFRAIN_CRASHES=$(CRASHES) cargo test --release -p refrain-store --lib tests::crash -- --nocapture

check: setup ## Format, lints, docs, links, dependencies, import rule and style; all of them as errors
	cargo fmt --all --check
	python3 -m unittest discover --quiet --start-directory tools
	tools/check-imports
	tools/check-style
	tools/check-cuda
	tools/check-links
	tools/check-deploy
	cargo clippy --workspace --all-targets $(FEATURES) -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps $(FEATURES)
	tools/deny

check-deploy: .deploy-checks/installed ## Lint and render the Helm chart, and validate it, the compose files and the Dockerfiles (fetches Helm as a library)
	tools/check-deploy
	python3 -m unittest discover --quiet --start-directory tools --pattern test_check_deploy.py

bench: build .venv-bench/installed ## Compare with llama.cpp and transformers, and the methods with one another (some 3 GB, hours)
	cargo build --release --locked -p refrain-bench
	@mkdir -p $(BENCH_RESULTS)
	@for model in $(BENCH_MODELS); do $(REFRAIN) pull "$$model" || exit 1; done
	@for model in $(BENCH_MODELS); do \
	    .venv-bench/bin/python tools/bench_peers.py --model "$$model" --refrain $(REFRAIN) --rounds $(BENCH_ROUNDS) \
	        --threads $(BENCH_THREADS) --out $(BENCH_RESULTS) $(BENCH_ARGS) || exit 1; \
	    $(REFRAIN) bench ttft --model "$$model" --runs $(BENCH_ROUNDS) --threads $(BENCH_THREADS) --markdown \
	        $(BENCH_TTFT_ARGS) > "$(BENCH_RESULTS)/ttft-$$model.md" || exit 1; \
	    cat "$(BENCH_RESULTS)/ttft-$$model.md"; \
	done

bench-ttft: build ## Time to first token of every method on the smallest model (BENCH_TTFT_ARGS adds options)
	$(REFRAIN) pull $(MODEL)
	$(REFRAIN) bench ttft --model $(MODEL) $(BENCH_TTFT_ARGS)

eval-small: build ## Quality of nine fusion methods on small models (EVAL_DATA=folder, EVAL_TIME_BUDGET=45m, LARGE=1 for 1.5B); run again to go on
	@[ -d '$(EVAL_DATA)' ] || { echo 'eval-small: give the data, EVAL_DATA=FOLDER (refrain eval fetch says where it comes from)' >&2; exit 1; }
	@for model in $(EVAL_MODELS); do $(REFRAIN) pull "$$model" || exit 1; done
	$(REFRAIN) eval run examples/eval/small.toml --on $(subst $(SPACE),$(COMMA),$(EVAL_MODELS)) --data '$(EVAL_DATA)' \
	    --time-budget $(EVAL_TIME_BUDGET) --out '$(EVAL_OUT)' $(EVAL_ARGS) || [ $$? -eq 3 ] # 3: the report lists what failed
	$(REFRAIN) eval report '$(EVAL_OUT)'

# The packages that the recipes of examples/python are for, apart from the others, whose dependencies differ.
.python-recipes/installed: examples/python/requirements.txt
	python3 -m pip install --quiet --disable-pip-version-check --target .python-recipes -r $<
	@touch $@

# A real S3 server and real clients for tests, which use them where PYTHONPATH names their folder.
.python-tests/installed: tools/requirements-tests.txt
	python3 -m pip install --quiet --disable-pip-version-check --target .python-tests -r $<
	@touch $@

# Helm and schemas for tools/check-deploy, which is skipped where they are not there.
.deploy-checks/installed: tools/requirements-deploy.txt
	python3 -m pip install --quiet --disable-pip-version-check --target .deploy-checks -r $<
	@touch $@

# -fno-dse: see the requirements. No cache: it may hold a llama.cpp that was built otherwise.
.venv-bench/installed: tools/requirements-bench.txt
	@[ -x .venv-bench/bin/python ] || python3 -m venv .venv-bench || { echo 'bench: python3-venv is needed (Debian: apt-get install python3-venv)' >&2; exit 1; }
	CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse $$CMAKE_ARGS" .venv-bench/bin/pip install --quiet --no-cache-dir -r $<
	@touch $@

fuzz: setup ## Fuzz a reader of untrusted bytes (FUZZ_TARGET, FUZZ_SECONDS); needs nightly Rust
	@rustup toolchain list | grep -q '^nightly' || rustup toolchain install nightly --profile minimal
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
	@mkdir -p fuzz/corpus/$(FUZZ_TARGET)
	cargo +nightly fuzz run $(FUZZ_TARGET) fuzz/corpus/$(FUZZ_TARGET) $(wildcard fuzz/seeds/$(FUZZ_TARGET)) -- -max_total_time=$(FUZZ_SECONDS) $(FUZZ_LIMITS_$(FUZZ_TARGET))

golden: build ## Make the golden files again with Hugging Face transformers (some 3 GB of Python packages)
	@for model in $(GOLDEN_MODELS); do $(REFRAIN) pull "$$model" || exit 1; done
	@[ -x .venv/bin/python ] || python3 -m venv .venv || { echo 'golden: python3-venv is needed (Debian: apt-get install python3-venv)' >&2; exit 1; }
	.venv/bin/pip install --quiet -r tools/requirements.txt
	.venv/bin/python tools/golden.py tiny
	.venv/bin/python tools/golden.py real $(GOLDEN_FILES)
	.venv/bin/python tools/golden_tools.py
	.venv/bin/python tools/golden_tools.py $(GOLDEN_FILES)
	.venv/bin/python tools/golden_quants.py
	.venv/bin/python tools/golden_quants.py $(GOLDEN_FILES)
	.venv/bin/python tools/golden_drift.py
	.venv/bin/python tools/golden_choices.py

package: setup ## Make a Debian package and an archive in dist/ (PACKAGE_ARGS='--binary PATH' packs a program that is built)
	packaging/package $(PACKAGE_ARGS)

clean: ## Remove build outputs and the Python environments; models and stored chunks stay
	cargo clean
	rm -rf .python-tests .python-recipes .deploy-checks .venv .venv-bench dist fuzz/target scale/target
