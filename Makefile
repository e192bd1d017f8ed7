# make demo: set up .venv and run the main job.  make test: set up .venv and run the tests.  Nothing else is needed.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check
READY = .venv/.ready-$(shell cat pyproject.toml setup.py constraints.txt kernels/csrc/* kernels/*/*.cpp 2>/dev/null | cksum | cut -d' ' -f1)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export GRAPHRL_CACHE_DIR ?= $(CURDIR)/.cache/graphrl

.PHONY: demo ready test check bench clean
demo: $(READY)
	graphrl demo

# the set-up alone, while CI fetches other things
ready: $(READY)

test: $(READY)
	python -m pytest -n auto --dist worksteal

check: $(READY)
	ruff check .
	ruff format --check .
	mypy

bench: $(READY)
	graphrl bench

clean:
	rm -rf .venv .cache build *.egg-info kernels/_native*

# torch comes first and pinned: a plain requirement would pull the newest CUDA build.
$(READY):
	@echo "setting up .venv: torch, then the rest (about a minute, 3 GB)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet -c constraints.txt torch
	@$(PIP) install --quiet -c constraints.txt -e ".[dev,peers]"
	@rm -f .venv/.ready-* && touch $@
