"""How far what a TSSA layer gives for a token moves when one token of the past is another.

Shapes: N sequences, T tokens, K swapped tokens, L layers of TSSA, P stretches of distances.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.errors import standard_error
from tost_lm.analysis.layers import LayerPiece, read, tssa_mixers
from tost_lm.errors import DataError
from tost_lm.model import TostLM


class Influence(NamedTuple):
    """‖y' − y‖ / ‖y‖ of what a TSSA layer gives, y' with one token swapped; a token is swapped in the text, so that the
    layers below have a part in it."""

    distance_ends: list[int]
    """1, 2, 4, …: how many tokens later, up to there from behind the one before."""
    mean: list[list[float]]
    """Of each layer and stretch, over the sequences."""
    standard_error: list[list[float]] | None
    """Over the documents; None: there is one."""


def influence(model: TostLM, sequences_NT: Tensor, documents_N: Tensor, swaps: int) -> Influence:
    """By distance, of so many tokens of each sequence, each swapped alone for one from elsewhere in the sequences.

    They are drawn from the first half, and tokens are looked at up to half a sequence later: all distances are of the
    same swaps.
    """
    sequences, tokens = sequences_NT.shape
    reach = tokens // 2
    ends = distance_ends(reach)
    found_NLP = torch.stack([
        _of_sequence(model, sequences_NT, n, swaps, torch.tensor(ends, device=sequences_NT.device))
        for n in range(sequences)
    ])  # fmt: skip
    error = standard_error(found_NLP, documents_N)
    return Influence(ends, found_NLP.mean(0).tolist(), None if error is None else error.tolist())


def distance_ends(reach: int) -> list[int]:
    """1, 2, 4, …, `reach`."""
    doubled = [2**i for i in range(reach.bit_length()) if 2**i < reach]
    return [*doubled, reach]


def _of_sequence(model: TostLM, sequences_NT: Tensor, n: int, swaps: int, ends_P: Tensor) -> Tensor:
    """[L, P], means over the swaps."""
    tokens_T, reach = sequences_NT[n], int(ends_P[-1])
    places_K, others_K = draw_swaps(sequences_NT, n, swaps)
    rows_BT = tokens_T.repeat(1 + swaps, 1)
    rows_BT[torch.arange(1, 1 + swaps, device=tokens_T.device), places_K] = others_K
    sums_LP = torch.zeros(len(tssa_mixers(model)), len(ends_P), dtype=torch.float64, device=tokens_T.device)

    def see(piece: LayerPiece) -> None:
        y_BTC = piece.y_BTC.double()
        moved_KT = (y_BTC[1:] - y_BTC[:1]).norm(dim=-1) / y_BTC[:1].norm(dim=-1)
        at_T = torch.arange(piece.here.start, piece.here.stop, device=tokens_T.device)
        distance_KT = at_T - places_K[:, None]
        counted_KT = (distance_KT >= 1) & (distance_KT <= reach)
        sums_LP[piece.layer].index_add_(0, torch.bucketize(distance_KT[counted_KT], ends_P), moved_KT[counted_KT])

    read(model, rows_BT, see)
    return sums_LP / (swaps * ends_P.diff(prepend=ends_P.new_zeros(1)))


def draw_swaps(sequences_NT: Tensor, n: int, swaps: int) -> tuple[Tensor, Tensor]:
    """Positions in the first half of sequence n, and the words that take the place of those that stand there, each [K].

    Raises:
        DataError: the sequences consist of one word.
    """
    draw = torch.Generator().manual_seed(n)
    lot = partial(torch.randint, size=(swaps,), generator=draw)
    places_K = lot(sequences_NT.shape[1] // 2).to(sequences_NT.device)
    words_M = sequences_NT.flatten()
    if bool((words_M == words_M[0]).all()):
        raise DataError("the sequences consist of one word, so there is none to put in its place: give more text")
    others_K = words_M[lot(len(words_M)).to(words_M.device)]
    while bool((same_K := others_K == sequences_NT[n, places_K]).any()):
        others_K = others_K.where(~same_K, words_M[lot(len(words_M)).to(words_M.device)])
    return places_K, others_K
