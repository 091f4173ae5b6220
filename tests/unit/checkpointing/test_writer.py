"""Shards are written while Python goes on, and who writes which tensor."""

import threading
from pathlib import Path

import torch

from tost_lm.checkpointing.format import write_tensors
from tost_lm.checkpointing.writer import assign_writers
from tost_lm.files import xxh3_file


def test_other_threads_go_on_while_a_shard_is_written_and_hashed(tmp_path: Path):
    tensors = {str(number): torch.full((1 << 20,), float(number)) for number in range(64)}

    def write() -> None:
        write_tensors(tmp_path / "shard", tensors)
        xxh3_file(tmp_path / "shard")

    thread, turns = threading.Thread(target=write), 0
    thread.start()
    while thread.is_alive():
        turns += 1
        thread.join(1e-4)
    # A thread that holds the lock gets by on a turn or two.
    assert turns > 50


def test_writers_have_even_loads_and_all_names():
    sizes = {f"p{number}": 1 + number**2 % 17 for number in range(40)}
    shares = assign_writers(sizes, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert shares == assign_writers(dict(reversed(sizes.items())), 3)
    assert assign_writers({"a": 1, "b": 1}, 4) == [["a"], ["b"]]
