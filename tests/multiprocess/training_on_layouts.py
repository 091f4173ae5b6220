"""A small hybrid model, trained on any parallel layout, and in one process with whole batches and torch alone."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from engine_state import whole_weights
from torch import Tensor

from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.layout import SequenceSplit
from tost_lm.optim.adamw import parameter_groups
from tost_lm.optim.muon import MuonWithAdamW
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel import fsdp
from tost_lm.parallel.apply import checkpoint_context, parallelize, shard_of
from tost_lm.parallel.engine import StepSettings
from tost_lm.parallel.mesh import Mesh, all_reduce, build_mesh, start_world
from tost_lm.parallel.rank_weights import local_slice
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.engine import engines_of
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import Tile, TiledLM, Tiling, forward_and_backward, tile
from tost_lm.testing import assert_as_accurate

STEPS, BATCH, T, VOCAB = 3, 4, 26, 64
LR = {"adamw": 1e-3, "muon": 1e-3, "sgd": 0.05}


class Record(NamedTuple):
    """Loss, gradient norm and unsharded gradients of each step, and the final weights."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        scalars = {"losses": torch.tensor(self.losses), "gradient norms": torch.tensor(self.norms)}
        steps = enumerate(self.gradients)
        gradients = {f"gradient of {name}, step {step}": x for step, named in steps for name, x in named.items()}
        return {**scalars, **gradients, **self.weights}

    def assert_as_one_process(self, optimizer: str, grad_clip: float, **run: Any) -> None:
        """In float32, this record is as accurate as one process with torch alone."""
        theirs, truth = (
            train_in_one_process(optimizer, grad_clip, dtype, **run).tensors()
            for dtype in (torch.float32, torch.float64)
        )
        ours = self.tensors()
        for name, exact in truth.items():
            assert_as_accurate(ours[name], theirs[name], exact, name)


def layout_of(**settings: Any) -> ParallelConfig:
    return validate(ParallelConfig, settings, "test")


def build_model(z_loss: float = 0.0, seed: int = 0, **settings: Any) -> TiledLM:
    torch.manual_seed(seed)
    shape = {"layers": 3, "heads": 4, "width": 32, "vocab_size": VOCAB, "max_positions": T, "layer_scale": 1.0}
    model = TiledLM(validate(ModelConfig, {"pattern": "TDA", "bias": True, **shape, **settings}, "test"))
    model.z_loss = z_loss
    for name, parameter in model.named_parameters():
        if (parameter.dim() == 1 and not name.endswith("log_rate")) or name.endswith("denom_bias"):
            torch.nn.init.normal_(parameter, 0.5, 0.1)
        if name == "blocks.1.mixer.in_proj.weight":
            # Larger scores: the gradients of nearly uniform memberships are ill-conditioned.
            torch.nn.init.normal_(parameter, std=0.3)
        if name == "blocks.0.mixer.in_proj.bias":
            # Away from 0: a first token that vanishes in a channel makes float32 gradients ill-conditioned.
            torch.nn.init.constant_(parameter, 0.5)
    return model


def build_optimizer(model: TostLM, name: str) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=0.1)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LR[name])
    # eps is above the rounding errors of gradients, which AdamW would turn into full steps.
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=LR[name], eps=1e-4)
    muon = MuonWithAdamW(model, OptimConfig(kind="muon", lr=LR[name]))
    for group in muon.param_groups[1:]:
        group["eps"] = 1e-4
    return muon


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; the ignored labels are unevenly spread and fill a whole sequence and a sequence shard."""
    windows = torch.randint(VOCAB, (BATCH, T + 1), generator=torch.Generator().manual_seed(step))
    tokens, labels = windows[:, :-1], windows[:, 1:].clone()
    labels[0, : T // 2] = IGNORED_LABEL
    labels[1] = IGNORED_LABEL
    labels[2, 3::5] = IGNORED_LABEL
    return tokens, labels


def train_in_one_process(
    optimizer_name: str, grad_clip: float, dtype: torch.dtype, steps: int = STEPS, **settings: Any
) -> Record:
    return _trained(optimizer_name, grad_clip, dtype, steps, json.dumps(settings, sort_keys=True))


@cache
def _trained(optimizer_name: str, grad_clip: float, dtype: torch.dtype, steps: int, settings: str) -> Record:
    model = build_model(**json.loads(settings)).to(dtype)
    optimizer = build_optimizer(model, optimizer_name)
    losses, norms, gradients = [], [], []
    for step in range(steps):
        tokens, labels = global_batch(step)
        output = model(tokens, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf")).item())
        optimizer.step()
        losses.append(output.scalars["loss"].item())
    return Record(losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()})


def build_engine(
    parallel: ParallelConfig,
    optimizer: str,
    *,
    grad_clip: float = 1.0,
    bfloat16: bool = False,
    accumulation: int = 0,
    memory: dict[str, Any] | None = None,
    prepare: Callable[[TostLM], object] = lambda model: None,
    **settings: Any,
) -> Any:
    """The engine of `parallel` around this rank's shard of the model of `settings`, which gets values as in a run.

    A step has `accumulation` micro-batches, or as many as `micro_batches` returns.
    `memory` has settings of activation checkpointing, `prepare` changes the model in place.
    """
    mesh = build_mesh(start_world("cpu"), parallel)
    with torch.device("meta"):
        model = build_model(**settings)
    engines = engines_of(parallel)
    parallelize(model, mesh, partial(engines.allocate_for_engine, mesh=mesh, parallel=parallel, bfloat16=bfloat16))
    apply_activation_checkpointing(model, context_fn=checkpoint_context(mesh), **(memory or {}))
    prepare(model)
    engine = engines.build_engine(
        model,
        build_optimizer(model, optimizer),
        mesh,
        parallel,
        StepSettings(accumulation or BATCH // (mesh.data.size * micro_batch_size(mesh)), grad_clip, bfloat16),
    )
    set_whole(engine, {name: value.detach() for name, value in build_model(**settings).named_parameters()})
    return engine


def set_whole(engine: Any, tensors: dict[str, Tensor]) -> None:
    """Set the state of a new engine from whole tensors, named as in `Engine.set_state`."""
    parameters = {label: engine.parameters[label.rpartition("/")[2]] for label in tensors}
    slices = {label: local_slice(x, parameters[label], engine.mesh.tensor) for label, x in tensors.items()}
    engine.set_state(slices.items())


def restore(engine: Any, state: dict[str, Tensor], step: int) -> None:
    """Set weights and optimizer state of a new engine after `step` updates."""
    engine.create_state(step)
    set_whole(engine, state)


def micro_batch_size(mesh: Mesh) -> int:
    return 2 if BATCH // mesh.data.size > 1 else 1


def micro_batches(mesh: Mesh, tiling: Tiling, step: int) -> list[MicroBatch]:
    """The micro-batches of this rank in a step."""
    columns = torch.cat([torch.arange(*tile.columns) for tile in tiling.tiles])
    tokens, labels = (x.chunk(mesh.data.size)[mesh.data.rank][:, columns] for x in global_batch(step))
    rows = [x.split(micro_batch_size(mesh)) for x in (tokens, labels)]
    return [MicroBatch(*x) for x in zip(*rows, strict=True)]


def train_steps(
    engine: Any, optimizer: str, steps: range, lengths: tuple[int, ...] = (), tile_tokens: int | None = None
) -> list[tuple[float, float]]:
    """Train on this rank's sequence shards, of uneven `lengths` if given; loss and gradient norm of each step."""
    mesh, records = engine.mesh, []
    tiling = tile(mesh, T, tile_tokens)
    if lengths:
        split = SequenceSplit(lengths, mesh.sequence.rank)
        tiling = Tiling((Tile(0, split, shard_of(mesh, split)),))
    for step in steps:
        outcome = train_step(engine, micro_batches(mesh, tiling, step), tiling, LR[optimizer])
        records.append((outcome.loss, outcome.grad_norm))
    return records


def train_on_layout(
    parallel: ParallelConfig,
    optimizer: str,
    grad_clip: float,
    steps: int = STEPS,
    lengths: tuple[int, ...] = (),
    memory: dict[str, Any] | None = None,
    tile_tokens: int | None = None,
    **model: Any,
) -> Record:
    """`model` has arguments of `build_engine`."""
    engine = build_engine(parallel, optimizer, grad_clip=grad_clip, memory=memory, **model)
    gradients = record_gradients(engine)
    losses, norms = zip(*train_steps(engine, optimizer, range(steps), lengths, tile_tokens), strict=True)
    return Record([*losses], [*norms], gradients, whole_weights(engine))


def train_in_stages(
    settings: dict[str, Any], stages: tuple[int, ...], optimizer: str, grad_clip: float, **run: Any
) -> list[Record]:
    """On the layout of `settings`, in each ZeRO stage; `run` has arguments of `train_on_layout`."""
    layouts = [layout_of(**settings, zero_stage=stage) for stage in stages]
    return [train_on_layout(layout, optimizer, grad_clip, **run) for layout in layouts]


def exact_gradients(
    model: TostLM,
    mesh: Mesh,
    batches: Sequence[MicroBatch],
    tiling: Tiling,
    labels: Tensor,
    zero_stage: Literal[0, 3] = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and unsharded gradients of the micro-batches of all ranks, with so many labels, in the model's precision."""
    engine = fsdp.build_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), mesh, ParallelConfig(zero_stage=zero_stage),
        StepSettings(len(batches)),
    )  # fmt: skip
    parts = mesh.replicas.size * len(batches)
    losses = [forward_and_backward(engine, batch, labels / parts, tiling, ends_step=False)["loss"] for batch in batches]
    recorded = record_gradients(engine)
    engine.collect()
    return all_reduce(torch.stack(losses).sum(), mesh.replicas) / parts, recorded[0]


def record_gradients(engine: Any) -> list[dict[str, Tensor]]:
    """A list that receives the unsharded gradients, before clipping, of every following optimizer step."""
    recorded, collect = list[dict[str, Tensor]](), engine.collect

    def collect_and_record() -> None:
        collect()
        named = engine.parameters.items()
        recorded.append({name: engine.gathered(p, p.grad).clone() for name, p in named if p.grad is not None})

    engine.collect = collect_and_record
    return recorded
