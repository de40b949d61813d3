# Two commands matter: `make demo` and `make test`. Both make .venv first where it is not there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One worker a core; tests/ is split evenly as workers become free.
JOBS ?= 2
# A test that hangs ends its worker, all stacks are printed, and the run goes on and fails: CI is to say which it was.
HANGS = -o faulthandler_exit_on_timeout=true -o faulthandler_timeout

.PHONY: help .venv demo allocator test test-all test-share torch accelerator test-torch lint docs matrix matrix-share matrix-ready wheel gpu gpu-tests gpu-all gpu-wheels gpu-step gpu-rok gpu-peers gpu-hooks clean

help:
	@echo "make demo   train a small GPT plain and with its activations on NVMe, and compare"
	@echo "make test   run the tests: every promise, in five minutes; make test-all runs every sample too,"
	@echo "            make test-share a twelfth of those, by the commit"
	@echo "make test-torch TORCH=$(TORCH)   run the core of the tests on another torch, in an environment of its own;"
	@echo "            PYTHON=python3.12 takes another Python; make torch makes the environment alone"
	@echo "make lint   ruff, format check, mypy strict, for each Python from 3.11 to 3.14"
	@echo "make docs   build the site into out/site; every warning and every broken link is an error"
	@echo "make wheel  build sdist and wheel into dist, and try the wheel in an empty environment"
	@echo "make accelerator   run the GPU tests on an accelerator made of a CPU"
	@echo "make matrix train with every framework, with tba and without, and compare with docs/matrix.md;"
	@echo "            make matrix-share does a third of that, by the commit"
	@echo "make gpu    on a machine with a CUDA device, under its own python3: the GPU tests and the step benchmark;"
	@echo "            make gpu-step, gpu-rok, gpu-peers and gpu-hooks measure there, ten minutes each"
	@echo "make gpu-all MACHINE=h100   the first hour on a card: all of that and more, in four calls of under ten minutes;"
	@echo "            with DEVICE=simulated QUICK=1 a rehearsal without a card; make gpu-wheels gets what it may lack"
	@echo "make .venv  make the environment alone"
	@echo "make clean  remove the environment and all that was generated"

.venv: $(VENV)/.installed

# torch first and by its pin: asked for as a dependency, the newest build comes, with gigabytes of CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "making $(VENV): some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt kvikio-cu13 \
	|| echo "kvikio cannot be installed here: its tests will be skipped"
	touch $@

demo: $(VENV)/.installed allocator
	$(BIN)/tba run -- $(BIN)/python -m benchmarks demo

# An allocator that keeps and reuses pages: jemalloc from the system's packages where this user may install it, else
# mimalloc from PyPI. `tba run` succeeds only where the allocator asked for can be used.
allocator: $(VENV)/.installed
	@$(BIN)/tba run --allocator jemalloc -- true 2>/dev/null \
	|| { echo "fetching jemalloc with apt-get"; \
	     if [ "$$(id -u)" = 0 ]; then as_root=; else as_root="sudo -n"; fi; \
	     $$as_root apt-get update -qq >/dev/null 2>&1; \
	     $$as_root apt-get install -y -qq libjemalloc2 >/dev/null 2>&1; } \
	|| $(BIN)/tba run --allocator mimalloc -- true 2>/dev/null \
	|| { echo "apt-get cannot; fetching mimalloc from PyPI"; \
	     $(BIN)/python -m pip install --quiet --constraint constraints.txt cmeel-mimalloc; } \
	|| echo "neither jemalloc (apt-get) nor mimalloc (PyPI) can be had here: expect more memory or slower steps"

# Five minutes at most on 2 cores: every promise is tested, by the samples that differ most. `make test-all` runs all of
# them. Tests that want a device to themselves are left to `make gpu`, which runs one at a time.
test: $(VENV)/.installed
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not serial and not exhaustive"

test-all: $(VENV)/.installed
	SAMPLES=all $(PYTEST) -n $(JOBS) --dist worksteal -m "not serial"

# `make test` and a twelfth of what it leaves out: which twelfth follows from the commit, so each is as good as any.
SHARE ?= $(shell printf %d 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))
test-share: $(VENV)/.installed
	SHARE=$(SHARE) $(PYTEST) $(HANGS)=900 -n $(JOBS) --dist worksteal --durations=25 -m "not serial"

# The tests for a GPU, on an accelerator that is made of a CPU, and that one's own. It is built first, in a minute: its
# compiler is the one that is here. A process that has loaded it is no more one of a machine without an accelerator.
# Tests that take the fixture `device` run on the CPU in `make test`, and on the device here and in `make gpu`.
BY_DEVICE := $(addprefix tests/,exact/test_checkpoint.py exact/test_identity.py exact/test_inplace.py exact/test_models.py \
	tba_compress/test_presets.py)

accelerator: $(VENV)/.installed
	DEVICE=simulated $(PYTEST) $(HANGS)=900 -n $(JOBS) --dist worksteal tests/accelerator tests/gpu
	DEVICE=simulated $(PYTEST) $(HANGS)=900 -n $(JOBS) --dist worksteal -m gpu $(BY_DEVICE) tests/exact/test_programs.py

# The newest torch that docs/versions.md has; another by `make test-torch TORCH=2.12.0`, on another Python by
# `make test-torch TORCH=2.11.0 PYTHON=python3.12`.
TORCH ?= 2.15.0
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TORCH_VENV := .venv-torch-$(TORCH)-python-$(PYTHON_VERSION)
CORE := exact $(addprefix tba_,engine record plan torch blocks state derive compress memory transfer forecast integrations)

# The constraints without those of torch and of what it pins itself. As a variable they also take the place of any that
# pip's own configuration names, which may hold torch back.
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	@echo "making $(TORCH_VENV): some minutes and, where only builds for CUDA are to be had, 6 GB"
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep --invert-match --extended-regexp '^(torch|triton|setuptools|cuda-|nvidia-)' constraints.txt \
		> $(TORCH_VENV)/constraints.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt $(TORCH_VENV)/bin/python -m pip install --quiet \
		torch==$(TORCH) --editable '.[test]'
	touch $@

torch: $(TORCH_VENV)/.installed

test-torch: torch
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest $(HANGS)=900 -n $(JOBS) --dist worksteal \
		-m "not serial and not exhaustive" $(addprefix tests/,$(CORE))
	@echo "these were the core tests on torch $(TORCH) and Python $(PYTHON_VERSION)"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for version in 3.12 3.13 3.14; do $(BIN)/mypy --python-version $$version || exit; done

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python docs/site/assemble.py out/site-source
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs/site out/site-source out/site
	cp out/site-source/llms.txt out/site
	@echo "the site: out/site/index.html"

$(VENV)/.release: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	touch $@

# From a copy, as setuptools leaves folders in its source; the environment that the wheel is tried in has nothing else.
wheel: $(VENV)/.release
	rm -rf dist out/wheel && mkdir -p out/wheel/source
	git ls-files -z | xargs -0 cp --parents --target-directory=out/wheel/source
	$(BIN)/python -m build --outdir dist out/wheel/source
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv out/wheel/venv
	out/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	out/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd out/wheel && venv/bin/python -I $(CURDIR)/tests/support/smoke.py && venv/bin/tba --version

# The frameworks have an environment of their own: some ask for versions that others do not. Torchtitan imports Triton,
# which comes with torch for CUDA alone, on a CPU too.
.venv-matrix/.installed: pyproject.toml constraints-matrix.txt
	@echo "making .venv-matrix: some minutes"
	test -x .venv-matrix/bin/python || $(PYTHON) -m venv .venv-matrix
	.venv-matrix/bin/python -m pip install --quiet --constraint constraints-matrix.txt torch==2.13.0
	.venv-matrix/bin/python -m pip install --quiet --constraint constraints-matrix.txt \
		--editable '.[hf,lightning,deepspeed,megatron,torchtitan]' \
		triton trl peft datasets torchao 'ray[train]' pytest pytest-xdist hypothesis
	touch $@

# A build of DeepSpeed's that was ended leaves a lock that the next would wait for. What it builds takes minutes, more
# than a row may take, and for its files on NVMe it needs libaio: without that their row is skipped.
matrix-ready: .venv-matrix/.installed
	mkdir -p out
	rm -f out/matrix.md .venv-matrix/torch_extensions/*/lock
	@test -e /usr/include/libaio.h \
	|| { echo "fetching libaio with apt-get"; \
	     if [ "$$(id -u)" = 0 ]; then as_root=; else as_root="sudo -n"; fi; \
	     $$as_root apt-get update -qq >/dev/null 2>&1; \
	     $$as_root apt-get install -y -qq libaio-dev >/dev/null 2>&1; } \
	|| echo "apt-get cannot: the row with DeepSpeed's files will be skipped"
	PYTHONPATH=tests .venv-matrix/bin/python -m matrix.extensions

MATRIX := OMP_NUM_THREADS=1 .venv-matrix/bin/python -m pytest -W default $(HANGS)=1800 -n $(JOBS) \
	--durations=15 tests/matrix --page out/matrix.md --filed docs/matrix.md

matrix: matrix-ready
	$(MATRIX)

# A third of the rows and of the other tests, another with each commit. Rows that are left out stand as they are filed.
matrix-share: matrix-ready
	cp docs/matrix.md out
	SHARE=$(SHARE) $(MATRIX)

GPU_TESTS ?= tests/gpu $(BY_DEVICE) tests/compact_kernels/test_kernels.py tests/tba_cli/test_device_probe.py tests/tba_memory/test_free_memory.py

gpu: gpu-tests gpu-step

gpu-tests:
	$(PYTHON) -m pytest -m gpu $(GPU_TESTS)

# The first hour on a card: each call does the next parts of benchmarks/card.py, in under ten minutes. DEVICE=simulated
# and QUICK=1 rehearse it. COMMIT= names the commit in results, for a copy of the repository that does not know it.
export COMMIT
gpu-all:
	@test -n "$(MACHINE)" || { echo "name the machine, by a short neutral name: make gpu-all MACHINE=h100"; exit 2; }
	$(PYTHON) -m benchmarks card --machine $(MACHINE) --device $(or $(DEVICE),cuda) $(if $(QUICK),--quick)

# What a card's own Python may lack, for Python 3.12: downloaded here, to be carried there. The last line is what TRL's
# and torchtune's offloading is imported with, beside accelerate, transformers and pandas; newer torchao does not fit.
WHEELS := kvikio-cu13 libkvikio-cu13 rapids-logger pydantic pydantic-core python-dotenv typing-inspection \
	annotated-types expecttest \
	trl torchtune torchao==0.14.1 omegaconf datasets dill multiprocess

gpu-wheels:
	$(PYTHON) -m pip download --dest out/wheels --only-binary=:all: --python-version 3.12 --no-deps \
		--constraint constraints.txt $(WHEELS)
	@echo "on the machine with the card: python3 -m pip install --no-index --no-deps out/wheels/*.whl"

# One card of 80 GB, under ten minutes each. With MACHINE=h100 the result is filed under that name.
FILED = $(if $(MACHINE),--save --machine $(MACHINE))
gpu-step:
	$(PYTHON) -m benchmarks step --device cuda --rounds 12 $(FILED)
gpu-rok:
	$(PYTHON) -m benchmarks curve --arms card --device cuda $(FILED)
gpu-peers:
	$(PYTHON) -m benchmarks peers --device cuda $(FILED)
gpu-hooks:
	$(PYTHON) -m benchmarks hooks --device cuda $(FILED)

clean:
	rm -rf $(VENV) .venv-matrix .venv-torch-* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
