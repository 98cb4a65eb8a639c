# Two commands do everything: `make demo` shows the main job, `make test` passes the tests. Both set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile, pip spends most of a minute compiling the thousands of modules of pulumi-aws nobody imports.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Images of Python set it. Then no process keeps what it compiled, and each of the tests' hundreds compiles torch and
# pulumi-aws anew: three times the processor time of an import.
unexport PYTHONDONTWRITEBYTECODE
# Workers of the test run. Three keep two cores busy: the longest tests, of the engine and of gangs, mostly wait.
WORKERS ?= 3

.PHONY: help demo demo-training demo-spot test engine-tools checkov browser docker lint types style docs site wheel benchmark clean

help: ## Show the targets
	@grep -E '^[a-z%-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 18

# A stamp for each set of packages: `make demo` never downloads torch, `make test` adds it to the same environment.
$(VENV)/.core: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gpufleet needs Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[calibrate,deploy,report]'
	@touch $@

$(VENV)/.torch: $(VENV)/.core
	@echo "Installing torch (once; several GB) ..."
	@$(PIP_INSTALL) -e '.[torch]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@$(PIP_INSTALL) -e '.[torch,dev]'
	@touch $@

demo: $(VENV)/.core ## Recommend a fleet for the example request and preview its resources and cost (offline)
	@tools/demo.sh

demo-training: $(VENV)/.torch ## Train a sharded model on two CPU processes, interrupt three times, end with the same parameters
	@$(BIN)/python -m examples.interrupted_training

demo-spot: $(VENV)/.torch ## Train on spot capacity of three AWS zones, replayed from a trace, under the adaptive policy
	@$(BIN)/python -m examples.spot_training

worked-%: $(VENV)/.torch ## Carry out a worked example (lora, spot, resnet) of docs/quick-start.md at toy size on two CPU processes
	@$(BIN)/python -m examples.worked $*

engine-tools: ## Build the Pulumi CLI and Python language host the engine test uses, where none is on PATH
	@$(MAKE) --no-print-directory -f tools/engine.mk

# In an environment of its own, as it pins many packages that the project needs in other versions.
.tools/checkov/.done: tests/infra/checkov-constraints.txt
	@echo "Installing checkov into .tools/checkov (once) ..."
	@$(PYTHON) -m venv .tools/checkov
	@.tools/checkov/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $< checkov
	@touch $@

checkov: .tools/checkov/.done ## Install checkov, which the tests scan the declared resources with

browser: ## Install Chromium, which the tests open reports in
	@tools/browser.sh

# After the browser: apt's lists have one lock.
docker: browser ## Unpack docker, which the test of the training's container starts
	@tools/docker.sh

test: $(VENV)/.dev engine-tools checkov browser docker ## Run every test that needs no GPU and no AWS account
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=40

lint: types style site ## ruff, mypy, shellcheck, shfmt, import rules, documentation drift, links

# Types take as long as all the rest of lint; with -j they have a core of their own.
types: $(VENV)/.dev
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.class_names
	git ls-files '*.sh' .ci/run | xargs $(BIN)/shellcheck -x
	git ls-files '*.sh' .ci/run | xargs $(BIN)/shfmt -d -i 2 -ci
	$(BIN)/python -m tools.cli_reference --check
	$(BIN)/python -m tools.request_reference --check
	$(BIN)/python -m tools.pulumi_keys --check
	$(BIN)/python -m tools.figures --check

docs: $(VENV)/.core ## Write docs/cli.md from the commands' help, docs/request.md from its models, Pulumi.yaml's keys from infra/settings.py
	$(BIN)/python -m tools.cli_reference
	$(BIN)/python -m tools.request_reference
	$(BIN)/python -m tools.pulumi_keys
	$(BIN)/python -m tools.figures

# Strict: a link, an anchor or a page of the navigation that is not there fails the build.
site: $(VENV)/.dev ## Build the pages of docs/ as a site into out/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file tools/site/mkdocs.yml

wheel: $(VENV)/.core ## Build the wheel into dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

benchmark: $(VENV)/.dev ## Measure accuracy; results land in tests/benchmarks/results
	$(BIN)/python -m tests.benchmarks.accuracy

clean: ## Remove what make built
	rm -rf $(VENV) .tools
