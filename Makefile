# Every target sets up what it needs: a virtual environment in .venv, from requirements/.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: setup build build-aarch64 torch-aarch64 aarch64 processors test test-slow test-stacks test-integrations test-builder attacks lint lint-kernels demo bench feigned-gpu gpu-lab report numerics clean

setup: .venv/ready

.venv/ready: requirements/run.txt requirements/gpu.txt requirements/develop.txt requirements/cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "need Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --requirement requirements/develop.txt
	$(PY) -m pip install --quiet --no-deps --requirement requirements/cuda.txt
	touch $@

build: setup
	$(PY) -m tools.build.variants

# The variants for aarch64, by Debian's cross compiler: apt-get install g++-aarch64-linux-gnu
build-aarch64: setup torch-aarch64
	$(PY) -m tools.build.variants --machine aarch64

# PyPI's torch and libcudart of the other machine, with whose headers and libraries its variants are built.
torch-aarch64: out/torch/aarch64/ready

out/torch/aarch64/ready: requirements/run.txt requirements/cudart.txt
	rm -rf out/torch/aarch64
	$(PY) -m pip install --quiet --no-deps --only-binary :all: --target out/torch/aarch64 \
		--platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
		$$(grep ^torch= $<) --requirement requirements/cudart.txt
	touch $@

# A Python with torch of that machine, which QEMU runs here: apt-get install qemu-user mmdebstrap
aarch64: setup
	$(PY) -m tools.emulation.debian

# docs/processors.md: what the variants compute on emulated processors.
processors: build build-aarch64
	$(PY) -m tools.emulation.compare build

# LOCAL_KERNELS names the build to test where the Hub's builder has made one; here the tests make it. A file's tests run in
# one process, because its fixtures and the pools of ranks are made once in each. If one dies the run ends: with another in
# its place pytest-xdist would wait for ever. Idle threads of OpenMP sleep, because the others need their cores. Hundreds
# of processes import the package and the tests: the first ones keep the bytecode for the others.
test: BESIDE := --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0
test: setup lint
	env -u LOCAL_KERNELS -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=PASSIVE \
		$(PY) -m pytest -m "not slow and not integrations" $(BESIDE)

# What takes more than ten seconds: killed ranks, long runs, other variants and processors, the model of CUDA.
test-slow: setup
	env -u LOCAL_KERNELS $(PY) -m pytest -m "slow and not stacks and not integrations and not builder"

# The suite with the oldest and the newest torch, what README promises to older ones, and the Triton kernels in the
# interpreter of every Triton.
test-stacks: setup
	env -u LOCAL_KERNELS $(PY) -m pytest -m stacks

# Muon in the real libraries that others train with, which are in a folder of their own; then docs/libraries.md, which says
# what failed, too.
test-integrations: LIBRARIES := PYTHONPATH=$(CURDIR)/out/integrations
test-integrations: setup out/integrations/ready
	rm -f out/integrations.log
	status=0; \
	env -u LOCAL_KERNELS HF_HUB_OFFLINE=1 $(LIBRARIES) $(PY) -m pytest -m integrations --report-log out/integrations.log || status=$$?; \
	$(LIBRARIES) $(PY) -m tools.pages.library_results out/integrations.log && $(PY) -m tools.pages.libraries && exit $$status

# The hooks and templates of the Hub's builder, from a checkout: `make test-builder CHECKOUT=../kernels`. Without the sign =
# pytest would take the checkout's folder for the one with the tests.
test-builder: TOOLS := PYTHONPATH=$(CURDIR)/out/builder PATH=$(CURDIR)/out/builder/bin:$(PATH)
test-builder: setup out/builder/ready
	env -u LOCAL_KERNELS $(TOOLS) $(PY) -m pytest -m builder --checkout=$(CHECKOUT)

out/builder/ready: requirements/builder.txt
	rm -rf out/builder
	$(PY) -m pip install --quiet --no-deps --target out/builder --requirement $<
	touch $@

# pip replaces no folders there: what an older list has put there goes.
out/integrations/ready: requirements/integrations.txt
	rm -rf out/integrations
	$(PY) -m pip install --quiet --no-deps --target out/integrations --requirement $<
	touch $@

# Every case of the tables of attacks on the delivery, with a pin and without, by the real clients; then docs/attacks.md.
attacks: setup
	env -u LOCAL_KERNELS $(PY) -m tools.attacks

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lint-kernels: setup
	$(PY) -m tools.lint.kernels

demo: setup
	$(PY) -m examples.character_model

bench: setup build
	$(PY) -m benchmarks.sweep_bookkeeping
	$(PY) -m benchmarks.sweep_symmetric_gemm
	$(PY) -m benchmarks.sweep_orthogonalize
	$(PY) -m benchmarks.sweep_step
	$(PY) -m benchmarks.sweep_training_step
	$(PY) -m benchmarks.sweep_plan
	$(PY) -m benchmarks.sweep_host_time
	$(PY) -m benchmarks.sweep_launch
	$(PY) -m benchmarks.sweep_load
	$(PY) -m benchmarks.sweep_build
	$(PY) -m benchmarks.sweep_portable
	$(PY) -m benchmarks.sweep_model_host
	$(PY) -m benchmarks.sweep_fake_step
	$(PY) -m benchmarks.sweep_scale

# The tests for GPUs, or TESTS="arguments of pytest", where no GPU is: docs/contributing.md says what that shows.
feigned-gpu: setup
	$(PY) -m tools.feigned_gpu $(TESTS)

# Proves, tunes and measures on the GPU that is here: `make gpu-lab LAB="--only tune --minutes 5"`. A machine with a GPU
# may have no network: then a python with torch will do that has what requirements/gpu.txt names, carried there as wheels.
gpu-lab:
	@test -x $(PY) || $(PYTHON) -c 'import torch' 2>/dev/null || $(MAKE) setup
	@$$(test -x $(PY) && echo $(PY) || echo $(PYTHON)) -m tools.lab $(LAB)

# docs/performance.md, from benchmarks/results.
report: setup
	$(PY) -m tools.pages.performance

# docs/numerics.md, its figures and its results, measured here.
numerics: setup build
	$(PY) -m tools.numerics.report

clean:
	rm -rf build out
