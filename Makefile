# `make demo` and `make test` need nothing beforehand: install.sh sets up .venv, and is
# quick to see that nothing changed. PYTHON=/path/to/python3.12 chooses the interpreter;
# ARGS="..." adds options to what demo and the tests run.

BIN := .venv/bin
# A process for each core and one more, up to eight; the tests of a file share what they set up, and files come
# in the order that tests/conftest.py gives them.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=30

.DEFAULT_GOAL := help
.PHONY: help install demo test test-unit test-trust test-gpu matrix dist gpu lint format docs site clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

install: ## set up .venv, or bring it up to date
	@./install.sh

demo: install ## compare five position encodings with three seeds each; the results go to demo/
	$(BIN)/fairseq-posenc compare --out demo $(ARGS)

test: install ## all tests, of products a choice
	@echo "all tests: 5 to 9 minutes on two idle cores, with 6 GB of memory and 3 GB of room for temporary files"
	@echo "(removed at the end); the fast ones alone: make test-unit. Chromium and Slurm are used where they are installed."
	$(PYTEST) $(ARGS)

test-unit: install ## the fast tests
	$(PYTEST) -m "not slow" $(ARGS)

test-trust: install ## kill training runs at random moments, for hours, make up inputs, and combine all of them
	$(BIN)/python -m tests.helpers.kills $(ARGS)
	TRUST_EXAMPLES=2000 $(BIN)/pytest --timeout 0 tests/workbench/test_inputs.py
	WHOLE_PRODUCTS=1 $(PYTEST)

test-gpu: install ## the tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

matrix: install ## whole products, with other Pythons, fairseqs and torches: tox.ini
	@$(BIN)/python -c "import tox" 2>/dev/null || $(BIN)/python -m pip install \
		--quiet --no-build-isolation --constraint constraints.txt --editable '.[matrix]'
	$(BIN)/python -m tox run $(ARGS)

dist: install ## build wheel and source in dist/, and check what a package index would show
	@$(BIN)/python -c "import tox" 2>/dev/null || $(BIN)/python -m pip install \
		--quiet --no-build-isolation --constraint constraints.txt --editable '.[matrix]'
	$(BIN)/python -m tox run -e dist

gpu: install ## all that needs a GPU: tests, memory checks, speed; the results go to demo/gpu/
	$(BIN)/python benchmarks/gpu.py --out demo/gpu $(ARGS)

lint: install ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install ## rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: install ## rewrite the generated parts of the documentation
	$(BIN)/python -m docs.generate
	$(BIN)/python -m tests.helpers.support
	$(BIN)/python -m tests.helpers.vectors

site: install ## build the site of docs/ in site/; what it needs is installed once
	@$(BIN)/python -c "import furo, myst_parser" 2>/dev/null || $(BIN)/python -m pip install \
		--quiet --no-build-isolation --constraint constraints.txt --editable '.[site]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs site
	@echo "open site/index.html"

clean: ## remove what the other targets made, .venv excepted
	rm -rf demo build dist site .tox *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find fairseq_posenc tests -name __pycache__ -exec rm -rf {} +
