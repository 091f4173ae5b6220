"""The weights that ranks start with: drawn or read slice by slice, equal to the bit under every parallel layout."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from engine_state import whole_state, whole_weights
from other_forms import other_forms
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tost_lm.checkpointing.format import (
    RNG,
    RNG_NAME,
    Progress,
    flush_and_hash,
    publish_checkpoint,
    shard_entries,
    shard_name,
    write_tensors,
)
from tost_lm.checkpointing.reading import read_once_per_node, restore
from tost_lm.config import validate
from tost_lm.errors import DamagedCheckpointError
from tost_lm.model import TostLM
from tost_lm.model.lm import parameter_shapes
from tost_lm.parallel.mesh import Axis, build_mesh, start_world
from tost_lm.parallel.rank_weights import slice_of
from tost_lm.pretrain.engine import build_training_engine
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing import run_on_ranks

SEED = 5
KINDS: tuple[Literal["model"], Literal["optimizer"]] = ("model", "optimizer")
FEW_BYTES = 4096  # messages of gloo, /proc/self/io
MODEL = {"layers": 3, "heads": 4, "width": 32, "vocab_size": 64, "max_positions": 26, "pattern": "TDA", "bias": True}
LAYOUTS: list[dict[str, Any]] = [
    {"zero_stage": 0}, {}, {"zero_stage": 3}, {"dtype": "bfloat16"}, {"tensor": 2, "zero_stage": 2},
    {"tensor": 2, "sequence": 2, "zero_stage": 3},
]  # fmt: skip
LAYOUTS += [{"engine": "deepspeed", "zero_stage": stage} for stage in (1, 3)]


def settings(dtype: str = "float32", **parallel: Any) -> PretrainConfig:
    tree = {
        "model": {**MODEL, **other_forms(kv_heads=4)}, "data": {"folder": "none"}, "parallel": parallel,
        "train": {
            "steps": 9, "seq_len": 26, "global_batch_size": 4, "micro_batch_size": 1, "dtype": dtype, "seed": SEED,
        },
        "run": {"name": "r", "device": "cpu"},
    }  # fmt: skip
    return validate(PretrainConfig, tree, "test")


def whole_tensors(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights, and moments by statistic/name."""
    generator, shapes = torch.Generator().manual_seed(seed), parameter_shapes(settings().model)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    labels = [f"{statistic}/{name}" for statistic in ("exp_avg", "exp_avg_sq") for name in shapes]
    return weights, {label: torch.rand(shapes[label.rpartition("/")[2]], generator=generator) for label in labels}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A step folder with three shards of each kind."""
    folder, temp = tmp_path / "step_00000002", tmp_path / "temp"
    temp.mkdir()
    for kind, tensors in zip(("model", "optimizer"), whole_tensors(seed=1), strict=True):
        for number in range(3):
            part = {name: tensors[name] for name in sorted(tensors)[number::3]}
            write_tensors(temp / shard_name(kind, number, 3), part)
    write_tensors(temp / RNG, {RNG_NAME: torch.get_rng_state()})
    Progress(step=2, updates=2).write(temp)
    publish_checkpoint(temp, folder, {file.name: flush_and_hash(file) for file in temp.iterdir()})
    return folder


def differences(engine: Any, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> list[str]:
    """The tensors that are not equal to the bit in an engine: its weights, their float32 copies or its moments."""
    for module in getattr(engine, "_root", engine.module).modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    dtype, found = next(engine.module.parameters()).dtype, []
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters(parameter):
            whole, held = parameter.detach().clone(), slice_of(engine.parameters[name])
        whole = whole if held is None else held.gather(whole, engine.mesh.tensor)
        found += [f"weight {name}"] * (not torch.equal(whole, weights[name].to(dtype)))
    found += [f"master {name}" for name, x in whole_weights(engine).items() if not torch.equal(x, weights[name])]
    stored = {label: x for label, x in whole_state(engine).items() if label not in weights}
    assert len(stored) == len(moments)
    return found + [label for label, x in stored.items() if not torch.equal(x, moments[label])]


def start_and_resume(layouts: list[dict[str, Any]], checkpoint: Path) -> list[tuple[list[str], list[str]]]:
    torch.manual_seed(SEED)
    drawn = {name: parameter.detach() for name, parameter in TostLM(settings().model).named_parameters()}
    found = []
    for layout in layouts:
        config = settings(**layout)
        engine = build_training_engine(config, build_mesh(start_world("cpu"), config.parallel))
        engine.draw_weights()
        at_start = differences(engine, drawn, {})
        assert restore(engine, checkpoint).step == 2
        found.append((at_start, differences(engine, *whole_tensors(seed=1))))
    return found


@pytest.mark.slow
def test_one_seed_and_one_checkpoint_give_the_same_bits_under_every_parallel_layout(checkpoint: Path):
    for found in run_on_ranks(start_and_resume, 4, LAYOUTS, checkpoint):
        assert found == [([], [])] * len(LAYOUTS)
    (alone,) = run_on_ranks(start_and_resume, 1, LAYOUTS[:1], checkpoint)
    assert alone == [([], [])]


class Reading(NamedTuple):
    """The state of one rank."""

    read_bytes: int
    """By its system calls that read files."""
    is_right: bool
    error: str


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def read_on_two_nodes(checkpoint: Path) -> Reading:
    group: Any = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    shapes = {label: tensor.shape for tensors in whole_tensors(seed=1) for label, tensor in tensors.items()}
    files = {checkpoint / name: entry for kind in KINDS for name, entry in shard_entries(checkpoint, kind).items()}
    before, read, error = bytes_read(), {}, ""
    try:
        for label, tensor in read_once_per_node(files, shapes, Axis(dist.get_rank(group), 2, group)):
            read[label] = tensor.clone()
    except DamagedCheckpointError as damage:
        error = str(damage)
    after = bytes_read()
    expected = {label: tensor for tensors in whole_tensors(seed=1) for label, tensor in tensors.items()}
    is_right = read.keys() == expected.keys() and all(torch.equal(read[label], expected[label]) for label in read)
    return Reading(after - before, is_right, error)


@pytest.mark.quick
def test_each_byte_is_read_once_per_node_and_a_flipped_one_is_found_by_all(checkpoint: Path):
    files = [checkpoint / name for kind in KINDS for name in shard_entries(checkpoint, kind)]
    size = sum(file.stat().st_size for file in files)
    ranks = run_on_ranks(read_on_two_nodes, 4, checkpoint)
    assert [(rank.is_right, rank.error) for rank in ranks] == [(True, "")] * 4
    for node in (ranks[:2], ranks[2:]):
        assert size <= sum(rank.read_bytes for rank in node) <= size + FEW_BYTES
        assert all(rank.read_bytes > size / 4 for rank in node)
    for file, place in ((files[0], 60), (files[-1], -1)):  # in the header, and in a tensor
        data = bytearray(file.read_bytes())
        data[place] ^= 4
        file.write_bytes(data)
        for rank in run_on_ranks(read_on_two_nodes, 4, checkpoint):
            assert rank.error.startswith(f"{file}: damaged, its XXH3 hash differs from the manifest")
        data[place] ^= 4
        file.write_bytes(data)
