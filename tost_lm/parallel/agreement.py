"""What ranks must agree on, compared before they work together: all end with the same lines, none waits for the others.

What travels is JSON in uint8 tensors, so no rank runs what another has sent.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.config import Section
from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError, TostError

Facts = Mapping[str, str]


def require_agreement(facts: Facts, what_to_do: str) -> None:
    """Compare named facts of all ranks; the process group must exist, and all ranks call it.

    Raises:
        ConfigError: on every rank, with the lines of `disagreements`.
    """
    lines = disagreements(facts, what_to_do)
    if lines:
        raise error_of_all_ranks(lines)


def error_of_all_ranks(lines: Sequence[str], kind: type[TostError] = ConfigError) -> TostError:
    """To be raised by all ranks; the first of each node prints it."""
    error = kind("\n".join(lines))
    error.printed_here = os.environ.get("LOCAL_RANK", "0") == "0"
    return error


def disagreements(facts: Facts, what_to_do: str) -> list[str]:
    """A line for each fact in which ranks differ, the same lines on every rank; all ranks call it.

    A line names the ranks that differ from most others (in a tie, from rank 0), both values, and ends with
    `what_to_do`. Values are shown whole: give them in one line.
    """
    told = gather((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in told]
    names = dict.fromkeys(name for _, facts_of_rank in told for name in facts_of_rank)
    values = {name: [facts_of_rank.get(name) for _, facts_of_rank in told] for name in names}
    return [f"{_deviation(name, values[name], hosts)}: {what_to_do}" for name in names if len(set(values[name])) > 1]


def settings_as_facts(settings: Section) -> dict[str, str]:
    """Every setting by its path, `section.key`, as TOML shows it."""
    tree = settings.model_dump(mode="json")
    return {path: json.dumps(value, ensure_ascii=False) for path, value in leaves(tree)}


def gather(value: Any) -> list[Any]:
    """What JSON makes of each rank's `value`, in order of rank; all ranks call it."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in _all_gather(torch.tensor(len(message)))]
    padded = _all_gather(pad(message, (0, max(lengths) - len(message))))
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(padded, lengths, strict=True)]


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 8-15 (node-b), rank 17 (node-c)`, where `hosts` has the host of every rank of the world."""
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        here = [rank for rank in ranks if hosts[rank] == host]
        parts.append(f"{'ranks' if here[1:] else 'rank'} {rank_numbers(here)} ({host})")
    return ", ".join(parts)


def rank_numbers(ranks: Iterable[int]) -> str:
    """Ascending numbers with neighbours drawn together: `0-3, 5`."""
    stretches = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{ranks[0]}-{ranks[-1]}" if ranks[1:] else f"{ranks[0]}" for ranks in stretches)


def wire_device() -> torch.device:
    """Where tensors that travel must be: NCCL sends from GPUs only, gloo from the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _all_gather(tensor: Tensor) -> list[Tensor]:
    sent = tensor.to(wire_device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [row.cpu() for row in received]


def _deviation(name: str, values: Sequence[str | None], hosts: Sequence[str]) -> str:
    [(expected, count)] = Counter(values).most_common(1)  # the first met, rank 0's, where several are as common
    odd = [
        f"{name_ranks([rank for rank, other in enumerate(values) if other == value], hosts)}: {name} is "
        f"{'missing' if value is None else value}"
        for value in dict.fromkeys(values)
        if value != expected
    ]
    rest = f"the other {count} ranks have" if count > 1 else f"rank {values.index(expected)} has"
    return f"{'; '.join(odd)} where {rest} {'none' if expected is None else expected}"
