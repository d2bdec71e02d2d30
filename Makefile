# Every target makes .venv first and keeps it up to date; a second call finds it made and starts at once.
#   make PYTHON=python3.12 ...   another interpreter          make test ARGS="-k views"   arguments for the tool
#   make TORCH=torch==2.13.0     another build of torch; on Linux the default build brings the CUDA packages

PYTHON ?= python3
BIN := .venv/bin
PIN := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PIN)$(if $(filter Linux,$(shell uname -s)),+cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
# Bytecode, ours too: pip takes a minute for it on one core, and for much that is never imported. (Some files are for
# other versions of Python.)
UNUSED := /tests?/|/transformers/models/
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' .venv/lib fused_eager fusion_rules cache >/dev/null || true
ARGS ?=
# Each test process computes with one thread, so as many of them as there are cores.
WORKERS ?= --numprocesses auto --dist worksteal

# Torch's OpenMP threads otherwise spin at their barriers while XLA computes on the same cores.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

.PHONY: demo test test-fast coverage test-device test-dist test-targets test-tpu test-clients test-full test-services test-wheel test-upstream
.PHONY: bench bench-compare bench-peers bench-programs check-speed lint format docs clean

demo: .venv/.made
	$(BIN)/python examples/demo.py $(ARGS)

test: .venv/.made
	$(BIN)/python -m pytest -m "not slow and not services" $(WORKERS) $(ARGS)

# What needs a real server (Redis, nginx, S3) or a browser: the cache, the report's page, the documentation's site.
# Programs that are not there are unpacked under build/, and a test that is skipped has failed. Half of it waits for
# processes that wait for one another.
test-services: .venv/.made-full
	$(BIN)/python -m tests.services.programs
	$(BIN)/python -m pytest -p tests.services.skips -m "services and not slow" $(WORKERS) $(ARGS)

# Tensors on the device, in every mode: all ops of the op corpus, and what is slow.
test-device: .venv/.made
	$(BIN)/python -m pytest tests/test_device.py -m "slow or not slow" $(WORKERS) $(ARGS)

# Programs of several processes: each way to train on 2 and 4 ranks, at each door, in each mode, cold and warm; checkpoints,
# and ranks that are lost. One after the other: each has as many processes as ranks.
test-dist: .venv/.made
	$(BIN)/python -m pytest -o faulthandler_timeout=3600 tests/distributed tests/frontends/collectives \
		-m "slow or not slow" $(ARGS)

# Programs as people write them, at both doors, compared with plain PyTorch: writes the table in docs/clients.md, and runs
# some of them in every mode. On two cores the table takes an hour: `SHARD=1/3` runs every third program alone, within 20
# minutes. (Their models under torch.compile, in each of its ways, take hours and belong to `test-full`.)
test-clients: .venv/.made-clients
	$(BIN)/python -m tests.clients --write docs/clients.md $(if $(SHARD),--shard $(SHARD))
	$(if $(SHARD),,$(BIN)/python -m pytest tests/clients -m "slow or not slow" -k "not in_plain_pytorch" $(ARGS))

# What a change must not break for TPUs: the tests that need XLA's compiler for them, `libtpu`, and each row of the fusion
# rules in float32. Needs no TPU.
test-targets: .venv/.made-tpu
	$(BIN)/python -m pytest tests/targets -m "not slow and not services" $(WORKERS) $(ARGS)
	$(BIN)/python -m tests.targets.rows --against docs/tpu_ops.md

# The same in all dtypes, and the rest of those tests. Writes the page.
test-tpu: .venv/.made-tpu
	$(BIN)/python -m pytest tests/targets -m "slow or not slow" $(ARGS)
	$(BIN)/python -m tests.targets.rows --dtypes all \
		--others v4:2x2x1,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1 --write docs/tpu_ops.md

# One in 12 of them, spread over all folders: for a first look, in two minutes on two cores.
test-fast: .venv/.made
	$(BIN)/python -m pytest -m "not slow and not services" --one-in 12 $(WORKERS) $(ARGS)

# The same tests, and what they run of each folder. What runs in processes of its own (the compiler's, most of the
# device's tests, examples) is not seen.
coverage: .venv/.made-coverage
	$(BIN)/python -m pytest -m "not slow and not services" --one-in 12 $(WORKERS) \
		--cov --cov-report=json:build/coverage.json $(ARGS)
	$(BIN)/python -m tests.covered build/coverage.json

# The sdist, the wheel that is built from it, and every entry point of that wheel in an environment without the sources.
test-wheel: .venv/.made
	$(BIN)/python -m pytest tests/test_wheel.py $(ARGS)

# Some of the slow tests take many minutes. The second time as where there is no compiler.
test-full: .venv/.made-full
	$(BIN)/python -m pytest -o faulthandler_timeout=3600 $(WORKERS) $(ARGS)
	FUSED_EAGER_FOLLOWER=python $(BIN)/python -m pytest -m "not slow and not services" $(WORKERS) $(ARGS)

# PyTorch's own tests in contexts of each mode: TESTS=folder of its test files, ARGS="--modes wait --files test_ops.py".
test-upstream: .venv/.made
	@test -n "$(TESTS)" || { echo 'Name a folder of PyTorch test files: make test-upstream TESTS=pytorch/test' >&2; exit 2; }
	$(BIN)/python -m tests.upstream "$(TESTS)" $(ARGS)

bench: .venv/.made
	$(BIN)/python -m benchmarks $(ARGS)

# What moved between two runs: make bench-compare OLD=benchmarks/results/0.1.0-b.json NEW=build/bench.json
bench-compare: .venv/.made
	@test -n "$(OLD)" -a -n "$(NEW)" || { echo 'Name two files of make bench ARGS="--json FILE": OLD=... NEW=...' >&2; exit 2; }
	$(BIN)/python -m benchmarks.compare "$(OLD)" "$(NEW)"

# The same table with a column for each system of others that can be installed beside this torch.
bench-peers: .venv/.made-peers
	$(BIN)/python -m benchmarks --modes fused,compile,torchax,torchax_jit $(ARGS)

# Many small programs of every kind, plain and fused, instead of the few workloads.
bench-programs: .venv/.made
	$(BIN)/python -m benchmarks --programs $(ARGS)

# Ratios against plain eager, held to generous bounds: a minute, and no time in it.
check-speed: .venv/.made
	$(BIN)/python -m benchmarks --check $(ARGS)

lint: .venv/.made build/types
	$(BIN)/ruff check .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

format: .venv/.made
	$(BIN)/ruff check --fix .

# The documentation as a site, in build/site: no network is needed, and a link that leads nowhere is an error.
docs: .venv/.made-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet $(ARGS)
	@echo 'Look at build/site/index.html'

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .mypy_cache

# mypy cannot follow setuptools' package-dir, so it gets the packages as they will be installed, by links.
.PHONY: build/types
build/types:
	rm -rf build/types && mkdir -p build/types/fused_eager
	cd build/types/fused_eager && ln -s ../../../fused_eager/* ../../../cache ../../../fusion_rules .

# Torch comes first and pinned to the build without CUDA; what follows is content with the one that is there. Meanwhile
# the compiled follower is built, for half a minute: tests would wait for it, and it needs no more than torch's headers.
.venv/.made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@$(PIP) "$(TORCH)" || { echo 'No build of torch without CUDA was found for this Python. Name an index that has one in' \
		'PIP_EXTRA_INDEX_URL, or take the default build: make TORCH=$(PIN)' >&2; exit 1; }
	@$(PIP) --quiet --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c 'from fused_eager.follower.build import build; build()' >/dev/null 2>&1 & \
		$(PIP) --no-build-isolation --editable '.[test,lint]' && wait
	@$(COMPILE)
	@touch $@

.venv/.made-full: .venv/.made
	$(PIP) --no-build-isolation --editable '.[test-full]'
	@$(COMPILE)
	@touch $@

.venv/.made-coverage: .venv/.made
	$(PIP) --no-build-isolation --editable '.[coverage]'
	@touch $@

.venv/.made-tpu: .venv/.made
	$(PIP) --no-build-isolation --editable '.[tpu]'
	@touch $@

# Without what they depend on: torch is the one under test, and the rest is there. torchvision is in a folder of its own:
# PyPI's needs CUDA's torch, and what imports it where it happens to be there, as torchmetrics does, then fails. So does
# torchaudio's, but it looks whether its kernels are there, and does without. With Triton there, torch compiles otherwise.
.venv/.made-clients: .venv/.made tests/clients/constraints.txt tests/clients/torchtitan.txt
	$(PIP) --no-deps --requirement tests/clients/constraints.txt
	$(PIP) --no-deps --target .venv/beside/torchvision torchvision==0.28.0
	$(PIP) --no-deps --target .venv/beside/torchaudio torchaudio==2.11.1
	rm -rf .venv/beside/torchaudio/torchaudio/lib
	$(PIP) --no-deps --target .venv/beside/torchtitan --requirement tests/clients/torchtitan.txt
	$(PIP) --no-deps --target .venv/beside/triton triton==3.9.0
	@touch $@

.venv/.made-peers: .venv/.made
	$(PIP) --no-build-isolation --editable '.[peers]'
	@$(COMPILE)
	@touch $@

.venv/.made-docs: .venv/.made
	$(PIP) --no-build-isolation --editable '.[docs]'
	@$(COMPILE)
	@touch $@
