"""Checkpoint shards on several ranks: each byte is read once per node, and one tensor at a time is in memory."""

import json
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tost_lm.errors import DamagedCheckpointError
from tost_lm.model.checkpoint import GIVE, HUGGING_FACE_PREFIX, REPLACE, FileEntry, other_hash
from tost_lm.parallel.agreement import all_gather_object, communication_device, error_of_all_ranks
from tost_lm.parallel.mesh import Axis

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READ_BYTES = 1 << 24
"""Read and hashed at once."""

Named = tuple[str, str, list[int]]
"""Name, dtype as in `DTYPES`, and shape of a tensor."""


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
            _broadcast(octets, reader, node)
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
            self._file = path.open("rb", buffering=0)
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
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return [(name.removeprefix(HUGGING_FACE_PREFIX), x.get_dtype(), x.get_shape()) for name, x in slices.items()]


def _bytes(_name: str, dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * DTYPES[dtype].itemsize


def _broadcast(x: Tensor, source: int, node: Axis) -> None:
    """Overwrite x with that of rank `source` of the node."""
    if node.size > 1 and x.numel():
        dist.broadcast(x, group=node.group, group_src=source)


def _broadcast_text(text: str, source: int, node: Axis) -> str:
    octets = torch.tensor(list(text.encode()), dtype=torch.uint8, device=communication_device())
    length = torch.tensor(len(octets), device=octets.device)
    _broadcast(length, source, node)
    octets = octets if node.rank == source else octets.new_empty(int(length))
    _broadcast(octets, source, node)
    return octets.cpu().numpy().tobytes().decode()
