# Everything is set up by the target that needs it: a machine with Python 3.11 or
# later, make and a package index is enough. `make` alone prints the targets.

.DEFAULT_GOAL := help
# One after the other, also under `make -j`: two targets would set up one environment.
# The checks of `make test` run where it is set up.
ifndef CHECKS_AT_ONCE
.NOTPARALLEL:
endif
.PHONY: help train train-explicit train-gpt notebooks test bench sweep clients counts-cuda counts-tpu wheel docs serve venv lint format types layers unsure pytest \
	test-newest test-newest-part newest-part-venv newest-venv torch-venv test-oldest-part oldest-venv lock clean

# A target that fails half-way must not look finished.
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported when it is; that is a small part of what is installed.
PIP := -m pip --disable-pip-version-check --no-input install --quiet --no-compile

# The first of these that runs and is new enough; PYTHON=... chooses another one.
CANDIDATES := python3.13 python3.12 python3.11 python3
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# The same for the newest versions, which want the newest Python: also of pyenv, whose
# `python3.13` runs only where one has said so.
PYENV_ROOT ?= $(HOME)/.pyenv
OF_PYENV = $(shell ls -d $(PYENV_ROOT)/versions/3.$(1).*/bin/python3 2>/dev/null)
NEWEST ?= $(shell for p in python3.13 $(call OF_PYENV,13) python3.12 \
	$(call OF_PYENV,12) $(PYTHON); do \
	$$p -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)
# Tests that see most of JAX's own programs, and of mpx's functions, for other versions
# in `.ci/run`.
PART := tests/test_xla.py tests/program tests/settings/test_function.py tests/autocast/test_gathers.py \
	tests/autocast/test_control_flow.py tests/autocast/test_custom_rules.py \
	tests/step/test_transforms.py tests/tools/inspect/test_costs.py \
	tests/nnx/test_bad_input.py tests/quantize/test_derivatives.py

# Arguments for the program behind a target: make train ARGS="--steps 100"
ARGS ?=
# Images of Docker often have it set. Each of some thirty processes would parse JAX anew,
# which is two thirds of the time to import it.
export PYTHONDONTWRITEBYTECODE :=
# An accelerator to install for: make train EXTRA=cuda12 (or cuda13, tpu)
EXTRA ?=
SUFFIX := $(if $(EXTRA),-$(EXTRA))

# Stamps: an environment is touched only when what it is made from has changed.
LOCKED := pyproject.toml constraints.txt
EXAMPLES := $(VENV)/.installed-examples$(SUFFIX)
ALL := $(VENV)/.installed-all$(SUFFIX)

help: ## Print this list
	@printf 'mpx: mixed precision training for JAX\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@printf '\nOptions: ARGS="..." for the program, EXTRA=cuda12|cuda13|tpu, PYTHON=...\n'

train: $(EXAMPLES) ## Train a Vision Transformer in float32, float16 and bfloat16
	@$(BIN)/python -m examples.vit $(ARGS)

train-explicit: $(EXAMPLES) ## The same, with every cast written by hand
	@$(BIN)/python -m examples.vit_explicit $(ARGS)

train-gpt: $(EXAMPLES) ## Train a GPT in float32, float16 and bfloat16
	@$(BIN)/python -m examples.gpt $(ARGS)

notebooks: $(ALL) ## Run the notebooks of examples/notebooks and keep what they show
	@for each in examples/notebooks/*.ipynb; do \
		$(BIN)/python -m tests.notebooks $$each || exit 1; done

# Every check runs, also after one has failed, two at a time, each of which prints when
# it is done (make 4.0 and later; before, line by line). pytest has the last word. Two
# processes, each with whole files, whose tests share what they compiled.
EACH_AS_ONE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
test: $(ALL) ## Run everything: lint, types, layers, docs, doctests and tests
	@$(MAKE) --no-print-directory --keep-going --jobs=2 $(EACH_AS_ONE) \
		CHECKS_AT_ONCE=yes types docs lint layers; checks=$$?; \
	$(MAKE) --no-print-directory pytest ARGS="-n 2 --dist loadfile $(ARGS)" \
		&& exit $$checks

bench: $(ALL) ## Measure against the peers and write the report
	@$(BIN)/python -m benchmarks $(ARGS)

# 20 minutes of one core. A part of it: ARGS="--part 1/4", ARGS="--group numpy".
sweep: $(ALL) ## Try the numbers of autocast on every function, and write the table
	@$(BIN)/python -m rigs.sweep $(ARGS)

# The versions are exact, JAX's those of the tests. Some packages' requirements contradict
# each other (typeguard, NumPy), so nothing is resolved. mpx is the one in this folder.
CLIENTS := .venv-clients/.installed
clients: $(CLIENTS) ## Try mpx on programs of other packages and write docs/works-with.md
	@.venv-clients/bin/python -m examples.guides.with_keras
	@.venv-clients/bin/python -m tests.pages docs/coming-from-qwix.md
	@.venv-clients/bin/python -m rigs.clients $(ARGS)

$(CLIENTS): rigs/clients/constraints.txt pyproject.toml
	@$(call make_venv,.venv-clients)
	@echo 'Installing the packages of rigs/clients into .venv-clients ...'
	@.venv-clients/bin/python $(PIP) --no-deps -r rigs/clients/constraints.txt
	@touch $@

# In environments of their own: one with what builds, one with the wheel and nothing else.
wheel: ## Build the files of a release, check them, run the README with the wheel alone
	@echo '== release (build, twine, the README by the wheel)'
	@$(call make_venv,.venv-release)
	@.venv-release/bin/python $(PIP) -c constraints.txt build twine hatchling
	@rm -rf dist .venv-wheel
	@.venv-release/bin/python -m build --no-isolation >/dev/null
	@.venv-release/bin/python -m twine check --strict dist/*
	@$(call make_venv,.venv-wheel)
	@.venv-wheel/bin/python $(PIP) -c constraints.txt dist/*.whl optax
	@.venv-wheel/bin/python tests/pages.py README.md

# Commit what it writes: `make test` compares the programs' fingerprints with it.
counts-cuda: $(ALL) ## Count the programs compiled for an H100 (5 GB, no GPU needed)
	@$(BIN)/python -m benchmarks residuals workloads whole-steps few-bits wire monitor docs --out benchmarks/results $(ARGS)

counts-tpu: $(ALL) ## Count the programs compiled for TPUs (no TPU needed)
	@$(BIN)/python -m benchmarks whole-steps-tpu docs --out benchmarks/results $(ARGS)

docs: $(ALL) ## Build the documentation, strictly, into site/
	@echo '== documentation (mkdocs --strict)'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'Written to site/; make serve shows it.'

serve: $(ALL) ## Serve the documentation on localhost while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

lint: $(ALL) ## Check style and format with ruff
	@echo '== lint and format (ruff)'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { \
		$(BIN)/ruff format --check .; echo 'Run: make format'; exit 1; }

format: $(ALL) ## Mend style and format with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(ALL) ## Check types with basedpyright
	@echo '== types (basedpyright)'
	@$(BIN)/basedpyright

layers: $(ALL) ## Check that imports only go down the layers
	@echo '== layers (import-linter)'
	@$(BIN)/lint-imports --no-logo

unsure: ## List what was guessed: the comments `# unsure: why`
	@grep -rn --include='*.py' '# unsure:' mpx examples benchmarks || echo 'None.'

pytest: $(ALL) ## Run tests and doctests only; ARGS="tests/settings/test_cast.py -k keys"
	@echo '== tests and doctests (pytest)'
	@$(BIN)/python -m pytest $(ARGS)

test-newest: newest-venv ## Run the tests with the newest versions that are allowed
	@.venv-newest/bin/python -m pytest $(ARGS)

# JAX since 0.11 needs Python 3.12.
HAS_NEWEST := '$(NEWEST)' -c 'import sys; sys.exit(sys.version_info < (3, 12))'
test-newest-part:
	@if $(HAS_NEWEST); then target=test-newest; else \
		target=pytest; \
		echo 'With the locked versions: the newest JAX needs Python 3.12, and the newest'; \
		echo "Python that runs here is $$('$(NEWEST)' --version). NEWEST=... names another one."; \
	fi; \
	$(MAKE) --no-print-directory $$target \
		ARGS="$(PART) -n 2 --dist loadfile $(ARGS)"

# The oldest JAX that is allowed, beside the locked versions of all else. It differs from
# the locked one in what `_base/jax_compat.py` tells apart: fewer tests see all of that.
OLDEST := jax==0.10.0 jaxlib==0.10.0
test-oldest-part: oldest-venv ## Run a part of the tests with the oldest JAX that is allowed
	@.venv-oldest/bin/python -m pytest $(PART) -n 2 --dist loadfile $(ARGS)

oldest-venv:
	@$(call make_venv,.venv-oldest)
	@grep -v '^jax' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python $(PIP) -c .venv-oldest/constraints.txt -e '.[test]' $(OLDEST)

newest-part-venv:
	@if $(HAS_NEWEST); then $(MAKE) --no-print-directory newest-venv; fi

# Unlocked on purpose, so in an environment of its own, upgraded at every run; and made
# anew where it is of another Python.
newest-venv:
	@[ "$$(.venv-newest/bin/python --version 2>&1)" = "$$('$(NEWEST)' --version)" ] \
		|| rm -rf .venv-newest
	@$(call make_venv,.venv-newest,$(NEWEST))
	@.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -e '.[test]'
	@.venv-newest/bin/python -m pip --disable-pip-version-check list \
		| grep -iE '^(jax|jaxlib|equinox|jaxtyping|optax|flax|numpy) '

torch-venv: ## Create .venv-torch, with the PyTorch that benchmarks compare with
	@$(call make_venv,.venv-torch)
	@.venv-torch/bin/python $(PIP) -r benchmarks/peers/torch.txt

venv: $(ALL) ## Create .venv with all that the other targets need

# hatchling comes from the lock too, hence no build isolation.
$(EXAMPLES): $(LOCKED)
	@$(call make_venv,$(VENV))
	@echo 'Installing mpx and its examples into $(VENV) (0.8 GB$(if $(findstring cuda,$(EXTRA)),$(,) and 5 GB of CUDA)) ...'
	@$(BIN)/python $(PIP) -c constraints.txt hatchling editables
	@$(BIN)/python $(PIP) --no-build-isolation -c constraints.txt \
		-e '.[examples$(if $(EXTRA),$(,)$(EXTRA))]'
	@touch $@

$(ALL): $(EXAMPLES)
	@echo 'Installing what tests, checks and documentation need into $(VENV) ...'
	@$(BIN)/python $(PIP) --no-build-isolation -c constraints.txt -e '.[test,docs,dev]'
	@touch $@

, := ,
define make_venv
	if [ ! -x $(1)/bin/pip ]; then \
		if [ -z '$(PYTHON)' ]; then \
			echo 'mpx needs Python 3.11 or later with venv; none of these will do:' >&2; \
			echo '  $(CANDIDATES)' >&2; \
			echo 'Install one, or name it: make PYTHON=/path/to/python' >&2; exit 1; \
		fi; \
		echo "Creating $(1) with $$($(or $(2),$(PYTHON)) --version) ..."; \
		$(or $(2),$(PYTHON)) -m venv $(1); \
	fi
endef

# All but `clients`, which has versions of its own.
EXTRAS := cuda12 cuda13 tpu examples test docs dev release

# uv is the one tool here that locks for every Python version and platform at once.
lock: ## Write constraints.txt anew with the newest versions
	@$(call make_venv,.venv-lock)
	@.venv-lock/bin/python $(PIP) --upgrade uv
	@sed '/^[^#]/,$$d' constraints.txt > .venv-lock/header
	@.venv-lock/bin/uv pip compile pyproject.toml --quiet --universal \
		--python-version 3.11 $(EXTRAS:%=--extra %) --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links --output-file .venv-lock/lock --upgrade
	@cat .venv-lock/header .venv-lock/lock > constraints.txt
	@git --no-pager diff --stat -- constraints.txt || true

clean: ## Delete environments, caches and what was built; runs/ stays
	rm -rf .venv .venv-* site .jax_cache .hypothesis \
		.pytest_cache .ruff_cache .reached_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
