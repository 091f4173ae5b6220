"""How old the values are that the heads of slot layers read, and how long they last.

Shapes: N sequences, T tokens, L slot layers, H heads, P position bins.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.eval.analysis.layers import run_in_tiles, standard_error
from tost_lm.eval.analysis.memberships import Analysis
from tost_lm.inference.protocol_names import SLOTS
from tost_lm.markdown import table, with_error
from tost_lm.mixers.slots.layer import SlotMixer
from tost_lm.mixers.slots.memory import SlotSums, slot_memory
from tost_lm.model import TostLM
from tost_lm.ops.positions import position_ends
from tost_lm.report.page import Page
from tost_lm.report.protocols import analysis_section


class ReadAges(NamedTuple):
    """The mean age of what each head reads: the tokens between writing and reading, weighted as in the read."""

    position_ends: list[int]
    """Ends (exclusive) of the bins of the reading token's position."""
    half_life: list[list[float]]
    """Tokens after which a value counts half, [L][H]."""
    age: list[list[list[float]]]
    """Mean over tokens and sequences, [L][H][P]."""
    standard_error: list[list[list[float]]] | None
    """Over documents, [L][H][P]; None if there is only one document."""


def read_ages(model: TostLM, sequences_NT: Tensor, documents_N: Tensor) -> ReadAges:
    """Ages of what slot layers read, and half-lives. Memory is bounded by a tile of one sequence."""
    ends = position_ends(sequences_NT.shape[1])
    age_NLHP = torch.stack([_ages_of(model, tokens_T[None], ends) for tokens_T in sequences_NT])
    error = standard_error(age_NLHP, documents_N)
    half_life_LH = [(math.log(2) / -mixer.log_decay().double()).tolist() for mixer in _mixers(model)]
    return ReadAges(ends, half_life_LH, age_NLHP.mean(0).tolist(), None if error is None else error.tolist())


def _ages_of(model: TostLM, tokens_1T: Tensor, ends: list[int]) -> Tensor:
    """[L, H, P]: positions are read in place of values; the age is the difference from the reader's position."""
    ends_P = torch.tensor(ends, device=tokens_1T.device)
    mixers = _mixers(model)
    sums_LHP = torch.zeros(len(mixers), model.config.heads, len(ends), dtype=torch.float64, device=tokens_1T.device)
    states: dict[int, SlotSums | None] = {}

    def read(layer: int, mixer: SlotMixer, arguments: Any, _: Any) -> None:
        x_BTC, state, info = arguments
        found = mixer.project(x_BTC, state, info)
        start, T = info.start_positions[0], x_BTC.shape[1]
        position_T = torch.arange(start, start + T, dtype=torch.float64, device=x_BTC.device)
        placed_TD = torch.stack([position_T, torch.ones_like(position_T)], -1)
        y_BTHD, states[layer] = slot_memory(
            found.read.double(), found.write.double(), placed_TD[None, :, None].expand(1, T, mixer.heads, 2),
            mixer.log_decay().double(), local=info.local, initial_state=states.get(layer), output_final_state=True,
        )  # fmt: skip
        age_TH = position_T[:, None] - y_BTHD[0, ..., 0] / y_BTHD[0, ..., 1]
        bin_T = torch.bucketize(position_T, ends_P.double(), right=True)
        sums_LHP[layer].index_add_(1, bin_T, age_TH.mT)

    with ExitStack() as hooks:
        for layer, mixer in enumerate(mixers):
            hooks.enter_context(mixer.register_forward_hook(partial(read, layer)))
        run_in_tiles(model, tokens_1T, lambda tile: None)
    return sums_LHP / ends_P.diff(prepend=ends_P.new_zeros(1))


def _mixers(model: TostLM) -> list[SlotMixer]:
    return [module for module in model.modules() if isinstance(module, SlotMixer)]


def measure(of: Analysis) -> dict[str, Any]:
    """Half-lives of slot layers, and the ages of what they read."""
    return read_ages(of.model, of.sequences, of.text.document_of)._asdict()


@analysis_section("Slot memory", SLOTS)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """A row for each head, a column for each bin of positions."""
    rows = [
        (str(layer + 1), str(head + 1), f"{half_life:,.3g}", *_cells(results, layer, head))
        for layer, half_lives in enumerate(results["half_life"])
        for head, half_life in enumerate(half_lives)
    ]
    return [
        "Effective memory length of each head: the mean age in tokens of what it reads, by the position of the reading "
        f"token; mean over {results['sequences']} sequences ± standard error over documents.",
        table(("slot layer", "head", "half-life", *[f"up to {end:,}" for end in results["position_ends"]]), rows),
    ]


def _cells(results: dict[str, Any], layer: int, head: int) -> list[str]:
    ages = results["age"][layer][head]
    errors = results["standard_error"][layer][head] if results["standard_error"] else [None] * len(ages)
    return [with_error(age, error, ".1f") for age, error in zip(ages, errors, strict=True)]
