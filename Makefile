# `make` sets up, `make help` lists the rest.
#
# The interpreter: a python3 that has torch and numpy already (a training container, a GPU machine without network) is
# used as it is and nothing is installed into it. Otherwise the pinned packages of requirements.txt go into .venv here.
# Either way the package runs from this tree, so PYTHONPATH names it.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
COMMAND := $(VENV)/bin/hybrid-ep

HAS_LIBRARIES := $(shell $(PYTHON) -c 'from importlib.util import find_spec as f; print(f("torch") and f("numpy") and "yes" or "")' 2>/dev/null)
ifneq ($(wildcard $(VENV)),)
    OWN_VENV := yes
else ifeq ($(HAS_LIBRARIES),)
    OWN_VENV := yes
endif

ifdef OWN_VENV
    PY := $(VENV)/bin/python
    PACKAGES := $(INSTALLED)
    export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
else
    PY := $(PYTHON)
    PACKAGES :=
endif

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

CSRC_FILES := find . -path './csrc/*' \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) -print0

TOOL ?= memcheck
# pytest's: tests wait more than they compute, for processes to start and for deadlines
WORKERS ?= 3

.DEFAULT_GOAL := setup
.PHONY: setup build consumers demo test lint format sanitize bench kernel-times compare-kernels wheel wheel-check clean help

setup: build $(if $(OWN_VENV),$(COMMAND))  ## install what is missing and build (the default)
	@echo "ready: $$($(PY) -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)') ($(PY))"

build: $(PACKAGES)  ## compile the extension, where there is an nvcc, and check the kernels
	@$(PY) setup.py --quiet build_ext --inplace
	@$(PY) tools/check_kernels.py

consumers: $(PACKAGES)  ## fetch the frameworks that tests/unit/test_frameworks.py drives, into build/consumers
	@$(PY) tools/fetch_consumers.py

demo: setup  ## train a small MoE model on real text, on whatever this machine has
	@$(PY) -m hybrid_ep demo

# One after the other, as CI runs them: a style error shows before any compiling.
test: $(PACKAGES)  ## lint, build, then the whole test suite
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory build
	@echo "== pytest"
	@if $(PY) -c 'import xdist' 2>/dev/null; then \
	    $(PY) -m pytest -q -m exclusive && \
	    $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not exclusive"; \
	else $(PY) -m pytest; fi

# The tools are pinned with the packages; a machine that brings its own torch may lack them, and then says so.
lint: $(PACKAGES)  ## ruff and the check of imports over the Python, clang-format over csrc, the figures of README
	@echo "== lint"
	@if command -v ruff >/dev/null; then ruff check --quiet . && ruff format --check --quiet .; \
	    else echo "SKIPPED: no ruff here, Python style not checked"; fi
	@$(PY) tools/check_imports.py
	@$(PY) tools/wrap_markdown.py --check *.md $$(find docs -name "*.md")
	@$(PY) tools/readme_figures.py --check
	@$(PY) tools/draw_overview.py --check
	@if command -v clang-format >/dev/null; then $(CSRC_FILES) | xargs -0r clang-format --dry-run -Werror; \
	    else echo "SKIPPED: no clang-format here, csrc style not checked"; fi

format: $(PACKAGES)  ## rewrite the files as lint wants them
	@ruff check --quiet --fix . ; ruff format --quiet .
	@$(PY) tools/readme_figures.py
	@$(PY) tools/draw_overview.py
	@$(PY) tools/wrap_markdown.py *.md $$(find docs -name "*.md")
	@$(CSRC_FILES) | xargs -0r clang-format -i

sanitize: setup  ## on GPUs: compute-sanitizer over small calls of every kind (TOOL=memcheck or racecheck)
	@compute-sanitizer --tool $(TOOL) --target-processes all --error-exitcode 1 $(PY) -m hybrid_ep check --ranks 2 --backend nvlink

bench: setup  ## measure dispatch and combine
	@$(PY) -m hybrid_ep bench

kernel-times:  ## build build/kernel_times, which times the kernels without Python
	@mkdir -p build
	@nvcc -std=c++17 -O3 --threads=0 --expt-relaxed-constexpr -gencode=arch=compute_90,code=sm_90 -Icsrc -o build/kernel_times \
	    benchmarks/kernel_times.cpp csrc/runtime.cpp csrc/call_state.cpp csrc/copy_engine.cpp csrc/memory/*.cpp csrc/kernels/*/one_node.cu csrc/kernels/route/assign_rows.cu csrc/kernels/ceilings.cu csrc/kernels/loading.cpp

compare-kernels: build  ## which kernels differ in machine code from the extensions in the folder BEFORE
	@$(PY) tools/compare_kernels.py $(BEFORE) hybrid_ep

wheel: build  ## build a wheel of what this environment allows, into dist/
	@$(PY) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@$(PY) -c 'import json; r = json.load(open("hybrid_ep/_build_report.json")); print("built:", ", ".join(r["built"]) or "pure Python"); [print("left out:", m + ",", why) for m, why in r["left_out"].items()]'
	@ls -1t dist/*.whl | head -1

wheel-check: build  ## build a wheel and use it in a clean environment with the oldest torch supported (TORCH=2.8.0: that one)
	@PYTHON=$(PY) TORCH=$(or $(TORCH),oldest) tools/check_wheel.sh

clean:  ## remove everything built (but not .venv)
	@rm -rf build dist *.egg-info hybrid_ep/*.so hybrid_ep/_build_report* .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): requirements.txt pyproject.toml
	@echo "== installing requirements.txt into $(VENV) (once; torch takes a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 14) else "hybrid_ep needs Python 3.10 to 3.13, not " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt
	@touch $@

# An editable install of the package, for its `hybrid-ep` command; all else runs from the tree. After `build`, so that
# compiling shows.
$(COMMAND): pyproject.toml $(INSTALLED) | build
	@$(PY) -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@
