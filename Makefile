# `make quickstart` and `make test` need nothing but python3: they make .venv and install the pinned lock first.
# Another interpreter: make test PYTHON=python3.12   (it gets a .venv of its own)
PYTHON ?= python3
SHELL := /bin/bash
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv/$(TAG)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SEED ?= 1
TESTS ?= tests
WORKERS ?= 2
SECONDS ?= 600
RECIPES := $(patsubst examples/retool/%.sh,recipe-%,$(wildcard examples/retool/retool_*.sh))

# A dozen processes here share a few cores: with more than one thread each, they spin while they wait for each other.
export OMP_NUM_THREADS ?= 1
# Ray starts its workers with less priority; beside other tests or runs they would hardly get a turn.
export RAY_worker_niceness ?= 0

.PHONY: help install test fuzz-sandbox sandbox-chaos test-browser screenshots docs lint quickstart quickstart-short minimal recipes-tiny $(RECIPES) tiny-inputs compare-short chaos-soak lock clean

help:
	@echo "make quickstart        convert, SFT, RL and evaluation of a tiny model on this machine (SEED=1)"
	@echo "make quickstart-short  the same path in a few steps, as CI runs it"
	@echo "make minimal           the RL loop on one page, examples/minimal/rl_loop.py, with a tiny model (SEED=1)"
	@echo "make compare-short     two RL algorithms in a few steps from one SFT checkpoint"
	@echo "make chaos-soak        RL of the tiny model while its processes are killed at random (SEED=1, SOAK_FLAGS=...)"
	@echo "make recipes-tiny      every launch script of examples/retool with a tiny model on this machine"
	@echo "make test              lint, types and tests (TESTS=tests/test_x.py for some of them, WORKERS=2 at once)"
	@echo "make test-browser      the viewer's page in a real Chromium (needs one: apt install chromium)"
	@echo "make screenshots       the same, and its pictures into docs/images"
	@echo "make docs              the documentation as a site, outputs/site/index.html; broken links are errors"
	@echo "make sandbox-chaos     10,000 calls by 256 callers while the sandbox's own processes are killed at random"
	@echo "make fuzz-sandbox      random input at every border of the sandbox for ten minutes (SECONDS=600 SEED=1)"
	@echo "make install           only the environment in $(VENV)"
	@echo "make lock              resolve requirements/cpu.in and setup.py into the locks of CPU and GPU hosts (needs uv)"

install: $(STAMP)

$(STAMP): requirements/cpu.lock setup.py
	@test -n "$(TAG)" || { echo "cannot run $(PYTHON): pass PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON) is Python $(TAG), 3.10 to 3.13 are supported: pass PYTHON=python3.12, say" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

test: $(STAMP) lint
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

# Into the same environment, which does without it otherwise. The browser itself is the system's.
$(VENV)/.browser: requirements/browser.lock $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/browser.lock
	touch $@

test-browser: $(VENV)/.browser
	$(PY) -m pytest tests/browser -s $(BROWSER_FLAGS)

screenshots: $(VENV)/.browser
	$(PY) -m pytest tests/browser -s --screenshots docs/images

# An environment of its own: none of it is needed to run, test or read the pages.
.venv/docs/.installed: requirements/docs.lock
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.lock
	touch $@

docs: $(STAMP) .venv/docs/.installed
	$(PY) docs/generate.py
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict
	@echo "open outputs/site/index.html"

sandbox-chaos: $(STAMP)
	for level in namespaces landlock; do $(PY) benchmarks/sandbox_soak.py --chaos --isolation $$level || exit 1; done

fuzz-sandbox: $(STAMP)
	$(PY) tests/fuzz_sandbox.py --seconds $(SECONDS) --seed $(SEED)

quickstart: $(STAMP)
	$(PY) examples/quickstart/run.py --seed $(SEED)

quickstart-short: $(STAMP)
	$(PY) examples/quickstart/run.py --seed $(SEED) --short --output-dir outputs/quickstart-short

minimal: $(STAMP)
	$(PY) -W ignore examples/minimal/rl_loop.py --seed $(SEED)

compare-short: $(STAMP)
	PYTHON="$(abspath $(PY))" bash examples/retool/compare_algorithms.sh --short --algorithms gspo ppo \
	  --output-dir outputs/compare-short

chaos-soak: $(STAMP)
	$(PY) benchmarks/chaos_soak.py --seed $(SEED) $(SOAK_FLAGS)

recipes-tiny: $(RECIPES)

$(RECIPES): recipe-%: tiny-inputs
	MODEL=tiny PYTHON="$(abspath $(PY))" bash examples/retool/$*.sh --no-progress

tiny-inputs: $(STAMP)
	$(PY) examples/quickstart/prepare.py --output-dir outputs/tiny

lock:
	uv pip compile --universal --python-version 3.10 --no-annotate --no-header requirements/cpu.in \
	  -o requirements/cpu.lock
	echo 'sglang==0.5.15.post1' >> requirements/cpu.lock
	uv pip compile --universal --python-version 3.10 --no-annotate --no-header requirements/docs.in \
	  -o requirements/docs.lock
	uv pip compile --universal --python-version 3.10 --no-annotate --no-header requirements/browser.in \
	  -o requirements/browser.lock
	uv pip compile --python-version 3.12 --no-annotate --no-header --extra gpu setup.py -o requirements/gpu.lock

clean:
	rm -rf .venv outputs build *.egg-info
