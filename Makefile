# Every target installs what it needs into $(VENV) first (gpu-check with NO_INSTALL=1 does not). See README.md.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

run: $(INSTALLED)  ## start both services, stream a few completions, show the block table, end
	$(BIN)/quire demo

serve: $(INSTALLED)  ## serve the embedded model (ARGS='--model …' for another) until interrupted
	$(BIN)/quire serve $(ARGS)

# The suite starts hundreds of processes. If Python is told to write no bytecode, each of them compiles our modules.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# The tests of a file share the services that they start.
BY_FILE := --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)  ## the test suite, without what is exhaustive: 8 to 25 minutes on two cores
	$(BIN)/pytest -n 5 $(BY_FILE) -m 'not exhaustive' $(ARGS)

test-all: $(INSTALLED)  ## every test: also long searches, GPU kernels in an interpreter, benchmarks (ARGS='-m exhaustive': only those)
	$(BIN)/pytest -n 2 $(BY_FILE) $(ARGS)

soak: $(INSTALLED)  ## load of all kinds and faults at random, every token compared (DURATION=2h ARGS='--seed 7 --output …')
	$(BIN)/python -m tests.soak --duration $(or $(DURATION),60) $(ARGS)

bench: $(INSTALLED)  ## closed-loop load at 1, 4, 16 and 64 clients, beside transformers on the same trace
	$(BIN)/quire bench serve --spawn --concurrency 1,4,16,64 --baseline transformers $(ARGS)

claims: $(INSTALLED)  ## measure what is claimed of paging and continuous batching; report in bench/results/claims
	$(BIN)/quire bench claims $(ARGS)

gpu-check: $(if $(NO_INSTALL),,$(INSTALLED))  ## tests, kernels and serving on the GPU of this machine, in one report (NO_INSTALL=1: with PYTHON as it is)
	$(if $(NO_INSTALL),$(PYTHON),$(BIN)/python) -m bench $(if $(BUNDLE),gpu-bundle --use $(BUNDLE),gpu-check) $(ARGS)

gpu-bundle: $(INSTALLED)  ## wheels and stubs for a GPU machine without an index (there: make gpu-check NO_INSTALL=1 BUNDLE=gpu-bundle)
	$(BIN)/python -m bench gpu-bundle --output gpu-bundle $(ARGS)

wheel-check: $(INSTALLED)  ## build the wheel, install it into a fresh environment, run the demo and one request
	$(BIN)/python -m checks.wheel

gpu-rehearsal: $(INSTALLED)  ## run gpu-check as on a GPU machine without a package index, its tests and its smallest phases
	$(BIN)/python -m checks.gpu_rehearsal --quick

upgrade-check: $(INSTALLED)  ## scheduler and executor of two commits under load (ARGS=COMMIT; default: the last one with another protocol)
	$(BIN)/python -m checks.upgrade $(ARGS)

verify: lint test-all wheel-check supply-check gpu-rehearsal  ## what CI checks

lint: $(INSTALLED)  ## ruff, mypy, import contracts, the shape of the tree, the English of its comments, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m checks.house
	$(BIN)/python -m checks.words
	@if command -v npx >/dev/null; then npx --yes @bufbuild/buf@1.75.0 lint protos; else echo 'buf lint: skipped, no npx'; fi

fmt: $(INSTALLED)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(INSTALLED)  ## generate the gRPC stubs again
	$(BIN)/python protos/build.py

dashboards: $(INSTALLED)  ## write Grafana's dashboards, Kubernetes' rules and the tables of docs/operations.md again
	$(BIN)/python -m deploy.grafana.build
	$(BIN)/python -m deploy.operator_rules
	$(BIN)/python -m deploy.reference

compose-check: $(INSTALLED)  ## bring compose.yaml up for real, break it, take it down (BASE_IMAGE=… to build on another)
	$(BIN)/python -m deploy.compose_check

lock: $(INSTALLED)  ## write the hashes of what the images install again (ARGS='--cpu-builds URL' for another version of torch)
	$(BIN)/python -m deploy.lock $(ARGS)

supply-check: $(INSTALLED)  ## write the bills of materials of the images, and look for known vulnerabilities
	$(BIN)/python -m checks.supply_chain

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build quire/v1 quire/executor

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py protos/build.py $(shell find protos -name '*.proto')
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[executor,dev,bench,dashboards,otel,jwt]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip compiles on one core; a few templates are no Python
	touch $@

.PHONY: help run serve test test-all soak wheel-check gpu-rehearsal upgrade-check bench claims gpu-check gpu-bundle verify lint fmt protos dashboards compose-check lock supply-check clean
