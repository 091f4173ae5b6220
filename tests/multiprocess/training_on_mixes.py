"""A small hybrid model trained on any mix of ranks, and its rival: one process, whole batches, torch alone."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.recompute import hold_less
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.split import SequenceSplit
from tost_lm.optim.adamw import parameter_groups
from tost_lm.parallel import zero
from tost_lm.parallel.apply import kept_of_blocks, parallelize, shard_of
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.mesh import Mesh, build_mesh
from tost_lm.parallel.part import part_of
from tost_lm.parallel.world import start_world
from tost_lm.testing import assert_close
from tost_lm.training.step import train_step
from tost_lm.training.tiled import Tile, TiledLM, Tiling, tile

STEPS, BATCH, T, VOCAB = 3, 4, 26, 64
LR = {"adamw": 1e-3, "sgd": 0.05}


class Record(NamedTuple):
    """What training tells: loss and gradient norm of each step, its whole gradients, and the weights in the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]

    def assert_equals(self, expected: "Record", relative: float) -> None:
        for mine, other in ((self.losses, expected.losses), (self.norms, expected.norms)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=relative, atol=0)
        for step, gradients in enumerate(expected.gradients):
            for name, gradient in gradients.items():
                assert_close(self.gradients[step][name], gradient, relative, f"gradient of {name} in step {step}")
        for name, weight in expected.weights.items():
            assert_close(self.weights[name], weight, relative, name)


def build_model(**settings: Any) -> TiledLM:
    torch.manual_seed(0)
    shape = {"layers": 3, "heads": 4, "width": 32, "vocab_size": VOCAB, "max_positions": T, "layer_scale": 1.0}
    model = TiledLM(validate(ModelConfig, {"pattern": "TTA", "bias": True, **shape, **settings}, "test"))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("denom_bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.1)
        if name.endswith("mixer.in_proj.bias"):
            # Away from 0: a first token that vanishes in a channel makes float32 gradients ill-conditioned.
            torch.nn.init.constant_(parameter, 0.5)
    return model


def build_optimizer(model: TostLM, name: str) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=0.1)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LR[name])
    # eps above the rounding noise of gradients, which AdamW would else turn into whole steps.
    return torch.optim.AdamW(groups, lr=LR[name], eps=1e-4)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; those that do not count stand unevenly, whole sequences and shards of them among them."""
    windows = torch.randint(VOCAB, (BATCH, T + 1), generator=torch.Generator().manual_seed(step))
    tokens, labels = windows[:, :-1], windows[:, 1:].clone()
    labels[0, : T // 2] = IGNORED_LABEL
    labels[1] = IGNORED_LABEL
    labels[2, 3::5] = IGNORED_LABEL
    return tokens, labels


@cache
def plain_training(optimizer_name: str, grad_clip: float, steps: int = STEPS, window: int = 0) -> Record:
    model = build_model(window=window)
    optimizer = build_optimizer(model, optimizer_name)
    losses, norms, gradients = [], [], []
    for step in range(steps):
        tokens, labels = global_batch(step)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    return Record(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def build_engine(
    parallel: ParallelConfig,
    optimizer: str,
    *,
    grad_clip: float = 1.0,
    bfloat16: bool = False,
    weights: dict[str, Tensor] | None = None,
    less: dict[str, Any] | None = None,
    window: int = 0,
) -> Any:
    """DeepSpeed around this rank's part of the model, which holds `less`."""
    mesh = build_mesh(start_world("cpu"), parallel)
    model = build_model(window=window)
    if weights:
        model.load_state_dict(weights)
    hold_less(parallelize(model, mesh), context_fn=kept_of_blocks(mesh), **(less or {}))
    return zero.build_engine(
        model,
        build_optimizer(model, optimizer),
        mesh,
        parallel,
        micro_batch_sequences=micro_batch_sequences(mesh),
        accumulation=BATCH // (mesh.data.size * micro_batch_sequences(mesh)),
        grad_clip=grad_clip,
        bfloat16=bfloat16,
    )


def micro_batch_sequences(mesh: Mesh) -> int:
    return 2 if BATCH // mesh.data.size > 1 else 1


def micro_batches(mesh: Mesh, tiling: Tiling, step: int) -> list[MicroBatch]:
    """A rank's part of the batch of a step."""
    columns = torch.cat([torch.arange(*tile.columns) for tile in tiling.tiles])
    tokens, labels = (x.chunk(mesh.data.size)[mesh.data.rank][:, columns] for x in global_batch(step))
    portions = [x.split(micro_batch_sequences(mesh)) for x in (tokens, labels)]
    return [MicroBatch(*x) for x in zip(*portions, strict=True)]


def take_steps(
    engine: Any, optimizer: str, steps: range, lengths: tuple[int, ...] = (), tile_tokens: int | None = None
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step on this rank's shards of its sequences; `lengths` of uneven ones."""
    mesh, records = engine.mesh, []
    tiling = tile(mesh, T, tile_tokens)
    if lengths:
        split = SequenceSplit(lengths, mesh.sequence.rank)
        tiling = Tiling((Tile(0, split, shard_of(mesh, split)),))
    for step in steps:
        outcome = train_step(engine, micro_batches(mesh, tiling, step), tiling, LR[optimizer])
        records.append((outcome.loss, outcome.grad_norm))
    return records


def training_on_mix(
    parallel: ParallelConfig,
    optimizer: str,
    grad_clip: float,
    steps: int = STEPS,
    lengths: tuple[int, ...] = (),
    less: dict[str, Any] | None = None,
    tile_tokens: int | None = None,
    window: int = 0,
) -> Record:
    engine = build_engine(parallel, optimizer, grad_clip=grad_clip, less=less, window=window)
    gradients = record_gradients(engine)
    losses, norms = zip(*take_steps(engine, optimizer, range(steps), lengths, tile_tokens), strict=True)
    return Record([*losses], [*norms], gradients, dict(zero.full_weights(engine)))


def record_gradients(engine: Any) -> list[dict[str, Tensor]]:
    """Filled with every whole gradient, before clipping, of each optimizer step that the engine takes from now on."""
    from deepspeed.utils import safe_get_full_grad

    recorded: list[dict[str, Tensor]] = []
    take_step = engine.step

    def whole(parameter: torch.nn.Parameter) -> Tensor:
        gradient = safe_get_full_grad(parameter).clone()  # pyright: ignore[reportOptionalMemberAccess]
        part = part_of(parameter)
        return gradient if part is None else part.whole(gradient, engine.mesh.tensor)

    def step() -> None:
        if engine.is_gradient_accumulation_boundary():
            recorded.append({name: whole(p) for name, p in engine.module.named_parameters()})
        take_step()

    engine.step = step
    return recorded
