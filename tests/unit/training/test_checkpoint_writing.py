"""Shards are written while Python goes on."""

import threading
from pathlib import Path

import torch

from tost_lm.files import xxh3_file
from tost_lm.model.checkpoint import write_tensors


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
