"""Cells of `benchmarks.training`: steps of rivals in turns, and a run of the engine."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tost_lm.mixers.tssa.layer as mixer
from benchmarks.engine import engine_of
from benchmarks.measure import CHECKOUT, interleaved_seconds
from benchmarks.plain import plain_loop, plain_loss
from benchmarks.training import CLOSE, COMPILED, LOOP, OURS, PLAIN, PLAIN_COMPILED, WITHOUT
from tost_lm.config import validate
from tost_lm.data.loader import Corpora
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig
from tost_lm.model.lm import TostLM
from tost_lm.model.transforms import compile_blocks
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import GracefulStop
from tost_lm.pretrain import train
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.start import find_start_point
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import TiledLM, tile

SAVE_EVERY = 3
CLOSE_SECONDS = 480.0


def steps_in_turns(device: str, model: dict[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step by rival, and those of ours and the rivals in `CLOSE` in more rounds (`close`)."""
    settings = validate(ModelConfig, model, "benchmarks.training")
    windows = torch.randint(settings.vocab_size, (1, tokens + 1), device=device)
    batch = MicroBatch(windows[:, :-1], windows[:, 1:])
    steps = {
        OURS: _our_step(settings, batch, device),
        COMPILED: _our_step(settings, batch, device, compile_blocks),
        **_plain_steps(settings, batch, device),
    }
    seconds = interleaved_seconds(steps, device, budget_s=float("inf"), repeats=rounds)
    close = {name: steps[name] for name in (OURS, *CLOSE.values())}
    return {"seconds": seconds, "close": interleaved_seconds(close, device, budget_s=CLOSE_SECONDS, repeats=100)}


def _our_step(
    settings: ModelConfig, batch: MicroBatch, device: str, prepare: Callable[[TostLM], object] = lambda model: None
) -> Callable[[], object]:
    engine = engine_of(settings, device, bfloat16=device == "cuda", prepare=prepare)
    return lambda: train_step(engine, [batch], tile(engine.mesh, batch.tokens.shape[1]), OptimConfig().lr)


def _plain_steps(settings: ModelConfig, batch: MicroBatch, device: str) -> dict[str, Callable[[], object]]:
    step = plain_loop(settings, device)

    def ours(model: TiledLM, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        loss = model(tokens_BT, labels=labels_BT, output_state=False).loss
        assert loss is not None
        return loss

    def without(model: TiledLM, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with _operator(lambda w, *others, **options: (w, None)):
            return ours(model, tokens_BT, labels_BT)

    losses = {LOOP: ours, PLAIN: plain_loss, PLAIN_COMPILED: torch.compile(plain_loss), WITHOUT: without}
    return {name: partial(step, loss_of, batch) for name, loss_of in losses.items()}


@contextmanager
def _operator(operator: Callable[..., Any]) -> Iterator[None]:
    """Make the mixers call this function instead of the operator."""
    ours, mixer.causal_tssa = mixer.causal_tssa, operator
    try:
        yield
    finally:
        mixer.causal_tssa = ours


def engine_run(device: str, model: dict[str, Any], tokens: int, steps: int) -> dict[str, Any]:
    """How a real run spends its time, without its first three steps."""
    with tempfile.TemporaryDirectory(prefix="tost_lm_bench_") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        os.environ["WANDB_MODE"] = "offline"
        _make_shards(Path(folder))
        tree = {
            "model": model,
            "data": {"folder": "shards"},
            "train": {
                "steps": steps, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": tokens,
                "dtype": "bfloat16" if device == "cuda" else "float32", "skip_spike_sigma": 6.0,
            },
            "checkpoint": {"interval": SAVE_EVERY, "keep_latest_k": 1},
            "run": {"name": "bench", "device": device, "log_every": 1},
        }  # fmt: skip
        config = validate(PretrainConfig, tree, "benchmarks.training")
        clock = _Clock()
        corpora = Corpora.open(config.data.folders)
        with clock.reading():
            train.train(config, corpora, find_start_point(config, corpora.fingerprint), GracefulStop())
        newest = max(Path("runs/bench/checkpoints").glob("step_*"))
        size = sum(file.stat().st_size for file in newest.iterdir())
    return {**clock.figures(), "checkpoint_bytes": size}


class _Clock:
    """Times the phases of the loop by wrapping the functions that it calls."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[tuple[float, float]]] = {
            phase: [] for phase in ("step", "before", "after", "save")
        }
        self._written: list[float] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        phases = [
            (train, "train_step", "step"),
            (Checksums, "before_update", "before"),
            (Checksums, "after_update", "after"),
            (train.Launch, "save", "save"),
        ]
        originals = [getattr(owner, name) for owner, name, _ in phases]
        for (owner, name, phase), original in zip(phases, originals, strict=True):
            setattr(owner, name, self._timed(phase, original))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(phases, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            outcome = original(*arguments, **options)
            self._intervals[phase].append((start, time.perf_counter()))
            if phase == "save":
                self._written.append(arguments[0].writer.save_seconds)
            return outcome

        return timed

    def figures(self) -> dict[str, Any]:
        """Seconds of each phase of every step, without the first three and the last."""
        took = {phase: [end - start for start, end in intervals] for phase, intervals in self._intervals.items()}
        starts = [start for start, _ in self._intervals["step"]]
        saved = {step: number for number, step in enumerate(range(SAVE_EVERY - 1, len(starts), SAVE_EVERY))}
        write_starts = [self._intervals["save"][number][0] for number in saved.values()]
        write_ends = [start + self._written[-1] for start in write_starts]
        figures: dict[str, list[float]] = {"step_seconds": [], "checksum_seconds": [], "other_seconds": []}
        while_writing = []
        for step in range(3, len(starts) - 1):
            own = took["step"][step] - took["before"][step]
            rest = starts[step + 1] - starts[step] - own - took["before"][step] - took["after"][step]
            writing = any(begin < starts[step] < end for begin, end in zip(write_starts, write_ends, strict=True))
            (while_writing if writing else figures["step_seconds"]).append(own)
            figures["checksum_seconds"].append(took["before"][step] + took["after"][step])
            figures["other_seconds"].append(rest - took["save"][saved[step]] if step in saved else rest)
        saves = [took["save"][number] for number in saved.values()]
        return {**figures, "steps_while_writing": while_writing, "save_seconds": saves, "write_seconds": self._written}


def _make_shards(folder: Path) -> None:
    """Shards of the running Python's documentation and sources."""
    settings = ["tokenizer.path=tokenizer.model", "tokenizer.vocab_size=384", "tokenizer.sample_bytes=1_000_000"]
    settings += ["shards.folder=shards", "corpus.source=embedded", "corpus.valid_fraction=0.05"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    for program in ("tost_lm.data_prep.commands.tokenizer", "tost_lm.data_prep.commands.shards"):
        command = [sys.executable, "-m", program, *settings]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
