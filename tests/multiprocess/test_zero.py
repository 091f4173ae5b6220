"""ZeRO on real gloo ranks: as one process computes, and resumable to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import parameter_groups
from tost_lm.parallel import zero
from tost_lm.parallel.world import is_rank_0, mean_over_ranks, start_world
from tost_lm.testing import assert_close, run_on_ranks
from tost_lm.training.loop import train_step

STEPS, BATCH, T, VOCAB = 20, 8, 24, 61
LR = {"adamw": 1e-3, "sgd": 0.05}


def build_model() -> TostLM:
    torch.manual_seed(0)
    settings = {"layers": 2, "heads": 4, "width": 32, "vocab_size": VOCAB, "max_positions": T, "layer_scale": 1.0}
    model = TostLM(validate(ModelConfig, {**settings, "bias": True}, "test"))
    for block in model.blocks:
        # Away from 0: a first token that vanishes in a channel makes float32 gradients ill-conditioned.
        torch.nn.init.constant_(block.get_submodule("mixer.in_proj").get_parameter("bias"), 0.5)
    return model


def build_optimizer(model: TostLM, name: str) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=0.1)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LR[name])
    # eps above the rounding noise of gradients, which AdamW would else turn into whole steps.
    return torch.optim.AdamW(groups, lr=LR[name], eps=1e-5)


def build_engine(optimizer: str, stage: int, ranks: int, *, grad_clip: float = 1.0, bfloat16: bool = False) -> Any:
    model = build_model()
    return zero.build_engine(
        model,
        build_optimizer(model, optimizer),
        zero_stage=stage,
        micro_batch_sequences=2,
        accumulation=BATCH // (2 * ranks),
        grad_clip=grad_clip,
        bfloat16=bfloat16,
    )


def global_batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, T + 1), generator=torch.Generator().manual_seed(step))


def take_steps(engine: Any, optimizer: str, steps: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, this rank training on its contiguous share."""
    world = start_world("cpu")
    records = []
    for step in steps:
        mine = global_batch(step).chunk(world.size)[world.rank]
        loss = train_step(engine, mine[:, :-1], mine[:, 1:], LR[optimizer], micro_batch_sequences=2)
        records.append((mean_over_ranks(loss), float(engine.get_global_grad_norm())))
    return records


def plain_training(optimizer_name: str, grad_clip: float) -> tuple[list, list, dict[str, Tensor]]:
    """The rival: one process, whole batches, torch alone."""
    model = build_model()
    optimizer = build_optimizer(model, optimizer_name)
    records, gradients = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        loss = model(batch[:, :-1], labels=batch[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf"))
        optimizer.step()
        records.append((loss.item(), norm.item()))
    return records, gradients, dict(model.named_parameters())


def zero_training(optimizer: str, stage: int, ranks: int, grad_clip: float) -> tuple[list, list, dict[str, Tensor]]:
    engine = build_engine(optimizer, stage, ranks, grad_clip=grad_clip)
    gradients = record_gradients(engine)
    return take_steps(engine, optimizer, range(STEPS)), gradients, dict(zero.full_weights(engine))


def record_gradients(engine: Any) -> list[dict[str, Tensor]]:
    """Filled with every whole gradient, before clipping, of each optimizer step that the engine takes from now on."""
    from deepspeed.utils import safe_get_full_grad

    recorded: list[dict[str, Tensor]] = []
    take_step = engine.step

    def step() -> None:
        if engine.is_gradient_accumulation_boundary():
            recorded.append({name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()})  # pyright: ignore[reportOptionalMemberAccess]
        take_step()

    engine.step = step
    return recorded


@pytest.mark.parametrize(
    ("optimizer", "stage", "ranks", "grad_clip"),
    [("adamw", 1, 2, 1.0), ("sgd", 1, 2, 0.0), ("sgd", 1, 2, 0.5), ("adamw", 2, 2, 1.0), ("sgd", 2, 4, 0.5),
     ("adamw", 1, 1, 1.0)],
)  # fmt: skip
def test_n_ranks_train_as_one_process(optimizer: str, stage: int, ranks: int, grad_clip: float):
    expected, expected_gradients, parameters = plain_training(optimizer, grad_clip)
    for records, gradients, weights in run_on_ranks(zero_training, ranks, optimizer, stage, ranks, grad_clip):
        torch.testing.assert_close(torch.tensor(records), torch.tensor(expected), rtol=1e-5, atol=0)
        for step in range(STEPS):
            for name, gradient in expected_gradients[step].items():
                assert_close(gradients[step][name], gradient, relative=1e-5, what=f"gradient of {name}, step {step}")
        for name, p in parameters.items():
            # denom_bias began at 0: its norm is no more than what 20 steps with their rounding made.
            assert_close(weights[name], p, relative=5e-5, what=name)


def stop_and_resume(stage: int, ranks: int, bfloat16: bool) -> tuple[list, list, bool]:
    engine = build_engine("adamw", stage, ranks, bfloat16=bfloat16)
    take_steps(engine, "adamw", range(5))
    weights, moments = dict(zero.full_weights(engine)), list(zero.full_moments(engine))
    went_on = take_steps(engine, "adamw", range(5, 10))
    fresh = build_engine("adamw", stage, ranks, bfloat16=bfloat16)
    zero.restore(fresh, weights, iter(moments), step=5)
    resumed = take_steps(fresh, "adamw", range(5, 10))
    pairs = list(zip(zero.full_weights(engine), zero.full_weights(fresh), strict=True))
    return went_on, resumed, all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(("stage", "bfloat16"), [(1, False), (1, True), (2, False), (2, True)])
def test_resuming_is_not_having_stopped_to_the_bit(stage: int, bfloat16: bool):
    for went_on, resumed, same_weights in run_on_ranks(stop_and_resume, 2, stage, 2, bfloat16):
        assert resumed == went_on
        assert same_weights


def train_and_save(path: Path) -> list[tuple[float, float]]:
    engine = build_engine("adamw", 1, ranks=2)
    take_steps(engine, "adamw", range(5))
    state = dict(zero.full_weights(engine)), list(zero.full_moments(engine))
    if is_rank_0():
        torch.save(state, path)
    return take_steps(engine, "adamw", range(5, 10))


def load_and_go_on(path: Path, stage: int, ranks: int) -> list[tuple[float, float]]:
    weights, moments = torch.load(path)
    engine = build_engine("adamw", stage, ranks)
    zero.restore(engine, weights, iter(moments), step=5)
    return take_steps(engine, "adamw", range(5, 10))


def test_a_run_goes_on_with_other_ranks_and_stages(tmp_path: Path):
    expected = torch.tensor(run_on_ranks(train_and_save, 2, tmp_path / "state.pt")[0])
    for stage, ranks in ((1, 1), (2, 2), (1, 4)):
        resumed = run_on_ranks(load_and_go_on, ranks, tmp_path / "state.pt", stage, ranks)[0]
        torch.testing.assert_close(torch.tensor(resumed), expected, rtol=1e-5, atol=0)


def test_bfloat16_training_stays_near_float32():
    wide = run_on_ranks(bfloat16_losses, 2, False)[0]
    narrow = run_on_ranks(bfloat16_losses, 2, True)[0]
    assert wide != narrow
    assert torch.tensor(narrow).sub(torch.tensor(wide)).abs().max() < 0.05


def bfloat16_losses(bfloat16: bool) -> list[float]:
    return [loss for loss, _ in take_steps(build_engine("adamw", 1, 2, bfloat16=bfloat16), "adamw", range(10))]
