# Commands of the project. `make demo` and `make test` need Python 3.11 or 3.12, a compiler and a package index.

PYTHON ?= python3
BIN := .venv/bin
comma := ,
GPU := $(if $(shell command -v nvidia-smi),$(comma)gpu)
# Programs start twice as fast with the bytecode that the first import of a module writes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-rest test-full release-check pages gpu check docs env clean-demo

# The full pipeline, from plain text to a trained and evaluated model, on the GPUs or on two CPU ranks. Each step reuses
# valid results of an earlier run. Training stops half-way and resumes from its checkpoint. A second model learns to
# retrieve.
demo: env
	$(BIN)/tost prepare tokenizer configs/data/embedded.toml
	$(BIN)/tost prepare shards configs/data/embedded.toml
	$(BIN)/tost train configs/pretrain/demo.toml run.stop_at_step=60
	$(BIN)/tost train configs/pretrain/demo.toml
	$(BIN)/tost eval runs/demo heldout
	$(BIN)/tost generate runs/demo sample.temperature=0.8
	$(BIN)/tost report runs/demo
	$(BIN)/tost prepare passages configs/data/passages.toml
	$(BIN)/tost prepare shards configs/data/passages.toml
	$(BIN)/tost train configs/pretrain/recall.toml
	$(BIN)/tost eval runs/recall needle heldout.shards=data/embedded/shards 'needle.lengths=[256, 1024, 4096]'
	$(BIN)/tost report runs/recall

clean-demo:
	rm -rf data/embedded data/passages runs/demo runs/recall

# Shows in five minutes that the installation works: the tests marked quick. With three workers two cores are seldom idle.
test: env
	$(BIN)/python -m pytest -m quick -n 3 --dist loadfile --no-loadscope-reorder --budget 5 $(PYTEST)

test-all: test test-rest

# Runs what `make test` leaves out, without the slow tests.
test-rest: env
	$(BIN)/python -m pytest -m "not quick and not slow" -n 3 --dist loadfile --no-loadscope-reorder --budget 10 $(PYTEST) \
	  tests/golden tests/multiprocess tests/faults tests/programs tests/unit

# All tests, also the slow ones and those of tests/full, which take minutes each. It injects every fault of docs/faults.md,
# most of them several times, and prints a table of them. Only tests/gpu sees a GPU.
test-full: env
	$(BIN)/python -m pytest -vv --full
	$(BIN)/python -m pytest -vv tests/gpu || test $$? = 5  # there is none

# Compares version, changelog and names with the last version, whose run resumes. Builds the wheel and the sdist, and uses
# the wheel alone, outside a checkout: docs/contributing.md. It installs from an index.
release-check: env
	$(BIN)/python -m pytest -v --full tests/unit/test_release.py tests/programs/test_engines.py \
	  tests/programs/test_wheel.py tests/full/test_wheel_fresh.py

# Runs the pages where readers begin as one script each, in fresh clones of this commit: `make pages PAGE=cluster` for one
# (tests/full/test_readers_pages.py names them, and what is replaced). It ends at the first block that fails.
pages: env
	$(BIN)/python -m pytest -vsx --full tests/full/test_readers_pages.py $(if $(PAGE),-k $(PAGE))

# On a machine with a CUDA device, within ten minutes, most valuable first; a part that crashes ends no other. It needs no
# index and no environment: python3 -m benchmarks.gpu names the packages that are missing.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The documentation as a site in site/. A link or an anchor without a target is an error.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

env: .venv/complete

.venv/complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 …" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@# Python compiles what it imports; all that is installed takes it six times as long.
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[train,deepspeed,megatron,report,docs,dev$(GPU)]'
	@# Without a GPU, only tests find fla-core: transformers would call its kernels on CPUs too.
	$(if $(GPU),,$(BIN)/pip install --quiet --no-compile --no-deps --constraint constraints.txt --target .venv/fla fla-core)
	touch .venv/complete
