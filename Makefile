# Everything runs in .venv/, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# Tests start many processes. Where Python cannot write bytecode, each process would compile the modules that it imports.
# Errors are ignored, because a few templates of packages are not valid Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
COMPILE_OWN := $(BIN)/python -m compileall -qq onnx_ops

# Processes that run tests side by side.
WORKERS ?= 3

.PHONY: check demo demo-stop wheel sbom test test-all test-processor lint truth truth-all docs clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

demo-stop: $(VENV)/.demo
	$(BIN)/python examples/demo.py --stop

# A source distribution in dist/, and the wheel that is built from it. Times of files are that of the commit, so the same
# commit gives the same bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

wheel: $(VENV)/.build
	rm -f dist/onnx_ops-*
	SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(BIN)/python -m build --outdir dist .

# Beside the wheel, its base installation with the tested versions as a CycloneDX document.
sbom: wheel
	rm -rf build/base
	$(BIN)/python -m venv --without-pip build/base
	$(BIN)/python -m pip --python build/base/bin/python --disable-pip-version-check install --quiet --constraint constraints.txt dist/onnx_ops-*.whl
	SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --output-file "$$(ls dist/onnx_ops-*.whl | sed s/-py3-none-any.whl/.cdx.json/)" build/base

# What has changed since the last commit, or since BASE: lint, types and the nearest tests, in at most 20 s of CPU.
BASE ?= HEAD
check: $(VENV)/.dev
	@$(BIN)/python -m tests.support.check --base $(BASE)

# What a change is likely to break: minutes. A fifth of each sweep over kill points and faults, by the commit's digest.
test: $(VENV)/.dev
	@$(COMPILE_OWN)
	$(BIN)/python -m pytest --numprocesses $(WORKERS)

# Everything, nightly tier and whole sweeps included: hours.
test-all: $(VENV)/.all
	@$(COMPILE_OWN)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) -m "" --sweep all

# The tests of int8 arithmetic on an emulated processor without VNNI, by qemu-user: a minute or two.
test-processor: $(VENV)/.dev
	$(BIN)/python -m tests.support.processor

# A few trials with fixed seeds, so that each run simulates the same data.
truth: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gate_truth --quick --seed 3377847176
	$(BIN)/python -m benchmarks.rollout_truth --quick --seed 3190387882
	$(BIN)/python -m benchmarks.rollback_debt --quick

# All trials of these benchmarks, and further benchmarks that take long: hours.
truth-all: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gate_truth
	$(BIN)/python -m benchmarks.rollout_truth
	$(BIN)/python -m benchmarks.analysis_truth
	$(BIN)/python -m benchmarks.replica_canaries
	$(BIN)/python -m benchmarks.rollback_debt
	$(BIN)/python -m benchmarks.two_machines
	$(BIN)/python -m benchmarks.effects
	$(BIN)/python -m benchmarks.cloud_faults --cloud sagemaker --traffic native
	$(BIN)/python -m benchmarks.cloud_faults --cloud sagemaker --traffic table
	$(BIN)/python -m benchmarks.cloud_faults --cloud azureml --traffic native
	$(BIN)/python -m benchmarks.cloud_faults --cloud azureml --traffic table

lint: $(VENV)/.dev docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.complexity

# Without --quiet, which hides warnings from --strict.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in .site/: open .site/index.html; for its search: python3 -m http.server --directory .site"

$(VENV)/.build: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) build cyclonedx-bom
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing onnx-ops and what the demo needs into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing onnx-ops with everything its tests need into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.demo $(VENV)/.build

$(VENV)/.all: $(VENV)/.dev
	@echo "Installing the frameworks that only the nightly tests need into $(VENV) ..."
	@$(PIP) --editable '.[dev,keras,huggingface]'
	@$(COMPILE)
	@touch $@

clean:
	rm -rf $(VENV) .onnx-ops .site build dist
