"""run_on_ranks: results by rank, failures with the traceback of the rank, no wait for dead ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tost_lm.testing import run_on_ranks


def rank_and_sum(add: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + add)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def sleep() -> None:
    time.sleep(1000)


def test_results_come_in_order_of_rank():
    assert run_on_ranks(rank_and_sum, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_failure_carries_its_rank_and_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*fail_on_rank_1.*KeyError: 'no such thing'"):
        run_on_ranks(fail_on_rank_1, 2)


def test_a_rank_that_dies_or_hangs_is_named():
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 7"):
        run_on_ranks(die_on_rank_1, 2)
    with pytest.raises(RuntimeError, match="rank 0 is still running"):
        run_on_ranks(sleep, 1, timeout_s=1)
