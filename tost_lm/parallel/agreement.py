"""Comparison of settings, shards and versions between ranks; every rank gets the same result.

Values travel as JSON in uint8 tensors, not as pickles: no rank executes code that another rank sent. Background threads
of ranks exchange messages through the store, since collectives belong to the main thread.
"""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.config import Section, leaves
from tost_lm.errors import ConfigError, TostError
from tost_lm.parallel.watchdog import StoreTimeoutError, TimeoutStore
from tost_lm.version import VERSION, code_sha256

Facts = Mapping[str, str]


def require_agreement(facts: Facts, fix: str) -> None:
    """Compare named facts between ranks; a collective call.

    Raises:
        ConfigError: on every rank, with the lines of `find_mismatches`.
    """
    if lines := find_mismatches(facts, fix):
        raise error_of_all_ranks(lines)


def error_of_all_ranks(lines: Sequence[str], kind: type[TostError] = ConfigError) -> TostError:
    """An error that all ranks raise; the first rank of each node prints it."""
    error = kind("\n".join(lines))
    error.printed_here = os.environ.get("LOCAL_RANK", "0") == "0"
    return error


def find_mismatches(facts: Facts, fix: str) -> list[str]:
    """One line for each fact that differs between ranks; a collective call.

    A line has the values of the ranks that differ from the majority (in a tie: from rank 0), then the majority's, then
    `fix`. Values are not shortened and must not contain line breaks.
    """
    hosts, facts_of_ranks = zip(*all_gather_object((socket.gethostname(), dict(facts))), strict=True)
    names = dict.fromkeys(name for facts_of_rank in facts_of_ranks for name in facts_of_rank)
    values = {name: [facts_of_rank.get(name, "missing") for facts_of_rank in facts_of_ranks] for name in names}
    return [f"{_mismatch(name, values[name], hosts)}; {fix}" for name in names if len(set(values[name])) > 1]


def settings_as_facts(settings: Section) -> dict[str, str]:
    """Every setting in TOML by its path, `section.key`."""
    tree = settings.model_dump(mode="json")
    return {path: json.dumps(value, ensure_ascii=False) for path, value in leaves(tree)}


def versions_as_facts() -> dict[str, str]:
    """Facts that decide how ranks compute: version and code of this package, and the version of torch."""
    return {"tost_lm": VERSION, "the code of tost_lm": code_sha256()[:16], "torch": torch.__version__}


def all_gather_object(value: Any) -> list[Any]:
    """`value` of each rank after a round trip through JSON, in rank order; a collective call."""
    message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in _all_gather(torch.tensor(len(message)))]
    padded = _all_gather(pad(message, (0, max(lengths) - len(message))))
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(padded, lengths, strict=True)]


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 8-15 (node-b), rank 17 (node-c)`; `hosts` has the host of every rank of the world."""
    names = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        here = [rank for rank in ranks if hosts[rank] == host]
        names.append(f"{'ranks' if here[1:] else 'rank'} {rank_numbers(here)} ({host})")
    return ", ".join(names)


def rank_numbers(ranks: Iterable[int]) -> str:
    """Ascending numbers as ranges: `0-3, 5`."""
    ranges = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{ranks[0]}-{ranks[-1]}" if ranks[1:] else f"{ranks[0]}" for ranks in ranges)


def communication_device() -> torch.device:
    """The device for tensors in collectives: NCCL needs a GPU, gloo the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _all_gather(tensor: Tensor) -> list[Tensor]:
    sent = tensor.to(communication_device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [row.cpu() for row in received]


def _mismatch(name: str, values: Sequence[str], hosts: Sequence[str]) -> str:
    [(majority, count)] = Counter(values).most_common(1)  # the first of equally frequent values, so rank 0's
    ranks = {value: [rank for rank, other in enumerate(values) if other == value] for value in dict.fromkeys(values)}
    agreeing = ranks.pop(majority)
    others = f"the other {count} ranks" if count > 1 else f"rank {agreeing[0]}"
    minority = [f"{value} on {name_ranks(differing, hosts)}" for value, differing in ranks.items()]
    return f"{name} differs between ranks: {', '.join(minority)}, {majority} on {others}"


MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 0.5  # between two requests of a thread that waits: all ranks share one store


class NoMessageError(Exception):
    """A message did not arrive; the text gives the reason."""


class ThreadMessages:
    """Short texts for all ranks, each under a key and a number; all ranks create it together.

    Both methods raise torch.distributed.DistError if the store is lost.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = TimeoutStore(name) if self.size > 1 else None

    def write(self, key: str, number: int, text: str) -> None:
        """Publish a text."""
        if self._store:
            self._store.set(f"{number}/{key}", json.dumps(text))

    def read(self, key: str, number: int, timeout_s: float) -> str:
        """Wait for another rank's text. Raises NoMessageError after `timeout_s`, or if the main thread has ended."""
        assert self._store, "a single rank has no messages"
        deadline, pause = time.monotonic() + timeout_s, MIN_PAUSE_S
        while threading.main_thread().is_alive() and time.monotonic() < deadline:
            with suppress(StoreTimeoutError):  # it may recover
                if text := self._store.get(f"{number}/{key}"):
                    return json.loads(text)
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_PAUSE_S)
        raise NoMessageError(f"no message within {timeout_s:g} s")
