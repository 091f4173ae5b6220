# The project's commands. `make demo` and `make test` need nothing but Python 3.11+, a compiler and a package index.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-full gpu check env clean-demo

# The whole road once, from plain text to a trained and evaluated model, on two CPU ranks. Each station keeps what is
# valid from an earlier run. The pre-training stops half-way and goes on from its checkpoint.
demo: env
	$(BIN)/python -m data_prep.train_tokenizer configs/data/embedded.toml
	$(BIN)/python -m data_prep.build_shards configs/data/embedded.toml
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m pretrain.train configs/pretrain/demo.toml run.stop_step=80
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m pretrain.train configs/pretrain/demo.toml
	$(BIN)/python -m eval.zero_shot runs/demo
	$(BIN)/python -m eval.retrieval runs/demo
	$(BIN)/python -m tost_lm.generate runs/demo sample.temperature=0.8
	$(BIN)/python -m eval.report runs/demo

clean-demo:
	rm -rf data/embedded runs/demo

# Tiers in order of their speed; tests/conftest.py holds each to its budget of minutes.
test: env
	$(BIN)/python -m pytest -n 2 tests/unit
	$(BIN)/python -m pytest tests/multiprocess
	$(BIN)/python -m pytest tests/faults
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/programs

# The suite, what takes minutes a test, and each fault as often as docs/faults.md says; it ends with that table.
test-full: test
	$(BIN)/python -m pytest -vv --full tests/full tests/faults tests/programs/test_lost_rank.py tests/unit/data/test_shards.py

# On a machine with a CUDA device: the kernels' tests on it, then the benchmarks.
gpu: env
	$(BIN)/python -m pytest tests/gpu tests/unit/model/test_gated.py
	$(BIN)/python -m benchmarks.operator
	$(BIN)/python -m benchmarks.model
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.long shape.layers=12 shape.heads=12 shape.width=768 shape.vocab_size=50304 \
	  bench.tile_tokens=16384 'bench.lengths=[131072, 1048576, 4194304]'

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

env: .venv/complete

.venv/complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 …" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[train,gpt2,report,dev]'
	@# On all cores, where pip takes one; a package may bring files that are no Python.
	$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	touch .venv/complete
