"""Cell of `benchmarks.generation`."""

import time
from typing import Any

import torch

from benchmarks.measure import call_seconds, held_bytes
from tost_lm.config import validate
from tost_lm.inference.generation import continuations, greedy, state_bytes
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.streaming import to_running_dtype
from tost_lm.ops.cross_entropy import IGNORED_LABEL


@torch.inference_mode()
def generation(device: str, model: dict[str, Any], lengths: list[int], rounds: int) -> dict[str, Any]:
    """For each length: seconds of generating the tokens since the previous length, seconds of reading the whole text
    again, and memory beyond that at the first length. With 0 rounds the rival does not run, so that memory is that of
    generation alone."""
    torch.manual_seed(0)
    lm = TostLM(validate(ModelConfig, model, "benchmark")).to(device).eval()
    ids, first, seconds = [0], 0, 0.0
    output = lm(torch.tensor([ids], device=device))
    state = to_running_dtype(output.state)  # the form it has from the first token on
    assert state is not None
    found: dict[str, Any] = {"state_bytes": state_bytes(state), "seconds": {}, "prefix_seconds": {}, "extra_bytes": {}}
    began = time.perf_counter()
    for next_B in continuations(lm, output, lengths[-1], greedy):
        ids.append(int(next_B))
        seconds += time.perf_counter() - began
        tokens = len(ids) - 1
        if tokens in lengths:
            found["seconds"][tokens], seconds = seconds, 0.0
            first = first or held_bytes(device)
            found["extra_bytes"][tokens] = held_bytes(device) - first
            if rounds:
                found["prefix_seconds"][tokens] = _seconds_of_reading(lm, ids, device, rounds)
        began = time.perf_counter()
    return found


def _seconds_of_reading(lm: TostLM, ids: list[int], device: str, rounds: int) -> list[float]:
    """Read all ids but the last, with the head on one token."""
    inputs, labels = (torch.tensor([x], device=device) for x in (ids[:-1], ids[1:]))
    labels[:, :-1] = IGNORED_LABEL
    lm(inputs, labels)
    return [call_seconds(lambda: lm(inputs, labels), device) for _ in range(rounds)]
