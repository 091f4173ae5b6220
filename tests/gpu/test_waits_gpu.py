"""Where training on a GPU waits: micro-batches of packed documents nowhere, and a step not in DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_prefetch import batches_in, read

from benchmarks.engine import engine_of
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch, _on_host, prefetched
from tost_lm.model import ModelConfig, TostLM
from tost_lm.pretrain.rank_times import RankTimes
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile, tiled_backward

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

T, VOCAB, DEVICE = 512, 64, "cuda"


def settings() -> ModelConfig:
    shape = {"layers": 3, "heads": 4, "width": 64, "vocab_size": VOCAB, "max_positions": T}
    return validate(ModelConfig, {"pattern": "TDA", "softmax": {"window": 40}, **shape}, "test")


@pytest.mark.parametrize("tile_tokens", [None, 200])
def test_packed_documents_wait_for_nothing(tile_tokens: int | None):
    model = TostLM(settings()).to(DEVICE)
    tokens = torch.randint(VOCAB, (1, T), device=DEVICE)

    def step(*ends: int) -> None:
        cu_seqlens = torch.tensor([0, *ends, T], dtype=torch.int32)
        if tile_tokens is None:
            model(tokens, tokens, cu_seqlens=cu_seqlens, label_count=1.0, output_state=False).loss.backward()
        else:
            tiled_backward(model, tokens, tokens, tile_tokens, cu_seqlens)

    step(3, 100, 301)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(7, 33, 250, 402)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_come_through_pinned_memory_without_a_wait(tmp_path: Path):
    batches, device = batches_in(tmp_path), torch.device(DEVICE, torch.cuda.current_device())
    assert _on_host(batches[0], device).tokens.is_pinned()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with prefetched(batches, range(9), 2, device) as steps:
            found = list(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values = [(step, [[x if x is None else x.tolist() for x in micro] for micro in micros]) for step, micros in found]
    assert values == read(batches, range(9), 0)


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("deepspeed")
    return engine_of(settings(), DEVICE, bfloat16=request.param)


@pytest.mark.parametrize("throughput_timer", [False, True])
def test_only_its_throughput_timer_lets_deepspeed_synchronize(
    engine: Any, throughput_timer: bool, monkeypatch: pytest.MonkeyPatch
):
    from deepspeed.accelerator import get_accelerator

    synchronized: list[None] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *device: synchronized.append(None))
    assert not engine._engine.tput_timer.config.enabled
    monkeypatch.setattr(engine._engine.tput_timer.config, "enabled", throughput_timer)
    tokens, times = torch.randint(VOCAB, (2, T), device=DEVICE), RankTimes(engine.module, engine.mesh)
    seconds = [0.0, 0.0]
    for _ in range(3):  # the timer starts with the third step
        synchronized.clear()
        times.begin_step(0.0)
        batches = [MicroBatch(tokens, tokens)]
        seconds = list(train_step(engine, batches, tile(engine.mesh, T), 1e-3, numbers=times.take()).sums)
    assert bool(synchronized) == throughput_timer
    assert 0 < seconds[1] < 60  # of the forward of the second step
