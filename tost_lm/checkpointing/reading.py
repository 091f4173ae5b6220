"""Reading checkpoints into models and engines, on one rank or on all.

On several ranks each byte is read once per node, and one tensor at a time is in memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tost_lm.checkpointing.format import (
    GIVE,
    HUGGING_FACE_PREFIX,
    REPLACE,
    RNG,
    RNG_NAME,
    FileEntry,
    Progress,
    StoredTensors,
    other_hash,
    read_model_config,
    shard_entries,
    verify_checkpoint,
)
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.errors import CheckpointError, DamagedCheckpointError
from tost_lm.files import regular_file
from tost_lm.model import ModelConfig
from tost_lm.model.lm import TostLM, parameter_shapes
from tost_lm.parallel.agreement import all_gather_object, communication_device, error_of_all_ranks
from tost_lm.parallel.apply import ShardedInference, parallelize
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.mesh import Axis, Mesh, broadcast
from tost_lm.parallel.rank_weights import allocate, local_slice

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ_BYTES = 1 << 24
"""Read and hashed at once."""

Named = tuple[str, str, list[int]]
"""Name, dtype as in `DTYPES`, and shape of a tensor."""


def load(path: str | Path, device: str = "cpu") -> TostLM:
    """Load a model in evaluation mode from a run folder (its newest valid checkpoint), a step folder or a model folder.

    Raises:
        CheckpointError: there is no checkpoint, one of its files does not match the manifest, or its settings are not
            those of its weights.
    """
    folder = find_checkpoint(Path(path))
    config, stored = read_model_config(folder), StoredTensors(folder, "model")
    # Before anything is allocated. A model with more layers than tensors would take long to build.
    model = _without_values(config, folder) if config.layers <= len(stored) else None
    if model is None or {name: list(x.shape) for name, x in model.state_dict().items()} != stored.shapes():
        raise CheckpointError(_other_sizes(folder))
    model.to_empty(device="cpu").load_state_dict(dict(stored))
    return model.to(device).eval()


def _without_values(config: ModelConfig, folder: Path) -> TostLM:
    try:
        with torch.device("meta"):
            return TostLM(config)
    except (RuntimeError, TypeError):  # sizes that 64 bits do not hold
        raise CheckpointError(_other_sizes(folder)) from None


def _other_sizes(folder: Path) -> str:
    return f"{folder}: its settings are not those of its weights; {REPLACE}"


def load_on_ranks(checkpoint: Path, mesh: Mesh) -> ShardedInference:
    """Load a checkpoint's model onto the ranks of a mesh, in evaluation mode; a collective call.

    Raises:
        CheckpointError: as `tost_lm.load`.
        ConfigError: heads or vocabulary are not divisible by the tensor ranks.
    """
    folder = find_checkpoint(checkpoint, verify=partial(verify_checkpoint, hash_shards=False))
    model = _without_values(read_model_config(folder), folder)
    parallelize(model, mesh, lambda model: allocate(model, mesh.device, torch.float32))
    with torch.no_grad():
        for name, local in _read(dict(model.named_parameters()), model.config, folder, mesh):
            model.get_parameter(name).copy_(local)
    return ShardedInference(model, mesh).eval()


def restore(engine: Engine, folder: Path) -> Progress:
    """Load a checkpoint's state, tensor by tensor, into a new engine; a collective call. Returns its progress.

    Raises:
        DamagedCheckpointError: on all ranks; the engine must not be used.
    """
    progress = Progress.read(folder)
    engine.create_state(progress.updates)
    engine.set_state(_read(engine.parameters, engine.module.config, folder, engine.mesh, engine.statistics()))
    torch.set_rng_state(load_file(regular_file(folder / RNG))[RNG_NAME])
    return progress


def load_weights(engine: Engine, folder: Path) -> None:
    """Load the weights of a model folder into a new engine; a collective call. Raises as `restore`."""
    engine.set_state(_read(engine.parameters, engine.module.config, folder, engine.mesh))


def _read(
    parameters: Mapping[str, nn.Parameter],
    config: ModelConfig,
    folder: Path,
    mesh: Mesh,
    statistics: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(label, value) of this tensor rank's slice of each weight, in the order of `read_once_per_node`.

    With `statistics`, what the optimizer keeps of each parameter, its state follows. A label is a parameter's name, or
    statistic/name.

    Raises:
        DamagedCheckpointError: after the last tensor, on all ranks: also if the weight of a parameter is missing.
    """
    files = {folder / name: entry for name, entry in shard_entries(folder, "model").items()}
    if statistics:
        files |= {folder / name: entry for name, entry in shard_entries(folder, "optimizer").items()}
    shapes = parameter_shapes(config)
    labelled = {f"{one}/{name}": shapes[name] for name, kept in (statistics or {}).items() for one in kept}
    missing = {*shapes}
    for label, whole in read_once_per_node(files, shapes | labelled, mesh.node):
        missing.discard(label)
        yield label, local_slice(whole, parameters[label.rpartition("/")[2]], mesh.tensor)
    if missing:
        raise error_of_all_ranks([f"{folder}: has no tensor {min(missing)}; {REPLACE}"], DamagedCheckpointError)


def read_once_per_node(
    files: Mapping[Path, FileEntry], shapes: Mapping[str, torch.Size], node: Axis
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor in some shards, in the same order on all ranks; a collective call.

    On each node, one rank reads a shard from beginning to end, hashes it and broadcasts its tensors. A tensor is on the
    device of collectives and is valid until the next one. Use nothing of them before the last one.

    Args:
        files: shards with their entries in the manifest.
        shapes: the tensors that are expected. A shard with another one is refused; one that is missing is not noticed.

    Raises:
        DamagedCheckpointError: after the last tensor, on all ranks: a shard differs from its hash or cannot be read.
    """
    device, problems = communication_device(), []
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    for number, (path, entry) in enumerate(files.items()):
        reader = number % node.size
        shard = _Shard(path, entry, shapes) if reader == node.rank else None
        header = _broadcast_text(json.dumps(shard.tensors) if shard else "", reader, node)
        for name, dtype, shape in json.loads(header):
            size = _bytes(name, dtype, shape)
            if len(buffer) < size:
                del buffer  # before there is another
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
            octets = buffer[:size]
            if shard:
                shard.read_into(octets)
            broadcast(octets, reader, node)
            yield name, octets.view(DTYPES[dtype]).view(shape)
        if shard and (problem := shard.finish()):
            problems.append(problem)
    if found := [problem for of_rank in all_gather_object(problems) for problem in of_rank]:
        raise error_of_all_ranks(found[:1], DamagedCheckpointError)


class _Shard:
    """A shard that this rank reads, once and in order."""

    def __init__(self, path: Path, entry: FileEntry, shapes: Mapping[str, torch.Size]) -> None:
        self._path, self._entry, self._hash = path, entry, xxhash.xxh3_128()
        self._file: FileIO | None = None
        self._error = self._obstacle = ""
        self.tensors: list[Named] = []
        """In the order of the file; none if they are not as expected."""
        try:
            self._file = regular_file(path).open("rb", buffering=0)
            tensors, file_bytes = _header(path), path.stat().st_size
        except (OSError, SafetensorError) as error:
            self._obstacle = f"{path}: cannot be read: {error}; {REPLACE}"
            return
        for name, dtype, shape in tensors:
            if dtype not in DTYPES or name not in shapes or list(shapes[name]) != shape:
                self._obstacle = f"{path}: its tensor {name} {shape} is not one of this model; {GIVE}"
                return
        self.tensors = tensors
        self.read_into(torch.empty(file_bytes - sum(_bytes(*tensor) for tensor in tensors), dtype=torch.uint8))

    def read_into(self, octets: Tensor) -> None:
        """Fill it with the next bytes of the file, as far as they can be read."""
        on_host = octets if octets.device.type == "cpu" else torch.empty(len(octets), dtype=torch.uint8)
        memory = on_host.numpy().data
        while memory and (count := self._read(memory[:READ_BYTES])):
            memory = memory[count:]
        if on_host is not octets:
            octets.copy_(on_host)

    def finish(self) -> str:
        """Read the remaining bytes. Returns the problem of the shard; empty: there is none."""
        block = memoryview(bytearray(READ_BYTES))
        while self._read(block):
            pass
        if self._file and not self._error and self._hash.hexdigest() != self._entry["xxh3"]:
            return other_hash(self._path)
        return self._error or self._obstacle

    def _read(self, memory: memoryview) -> int:
        try:
            count = self._file.readinto(memory) if self._file else 0
        except OSError as error:
            self._error, count = f"{self._path}: cannot be read: {error.strerror}; {REPLACE}", 0
        self._hash.update(memory[:count])
        return count


def _header(path: Path) -> list[Named]:
    with safe_open(regular_file(path), framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return [(name.removeprefix(HUGGING_FACE_PREFIX), x.get_dtype(), x.get_shape()) for name, x in slices.items()]


def _bytes(_name: str, dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * DTYPES[dtype].itemsize


def _broadcast_text(text: str, source: int, node: Axis) -> str:
    octets = torch.tensor(list(text.encode()), dtype=torch.uint8, device=communication_device())
    length = torch.tensor(len(octets), device=octets.device)
    broadcast(length, source, node)
    octets = octets if node.rank == source else octets.new_empty(int(length))
    broadcast(octets, source, node)
    return octets.cpu().numpy().tobytes().decode()
