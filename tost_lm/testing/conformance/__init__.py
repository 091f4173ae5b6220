"""Conformance of token mixers: whether the same tokens, processed in any way, give the same result.

A token mixer is called in tiles, token by token, on packed documents and on sequence ranks. All of these must equal
one call, in outputs, final states and the gradients of every input. `check` reports which of these equalities hold:

    report = check("T", ModelConfig(layers=1, heads=2, width=8))
    print(report)
    report.require()

Shapes: B rows, T tokens, C channels, N documents (N = B unless packed), R sequence ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tost_lm.mixers.registry import SPECS
from tost_lm.model.config import ModelConfig
from tost_lm.ops.layout import SequenceSplit
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.sequence import RankShard
from tost_lm.testing.conformance import equalities
from tost_lm.testing.conformance.subject import BOUND, TOKENS, State, Subject, cotangent, leaf, named
from tost_lm.testing.ranks import run_on_ranks

__all__ = ["EQUALITIES", "Equality", "Report", "check"]


RANKS = 3


class _Case(NamedTuple):
    """Tokens in one or more tiles, each of them split over the ranks; states are carried between tiles."""

    what: str
    x_BTC: Tensor
    splits: tuple[tuple[int, ...], ...]
    """Tokens of each rank in each tile, [R]."""
    offsets: tuple[tuple[int, ...] | None, ...]
    """Lengths of the documents in each tile."""
    initial: State | None
    output_state: bool


def rank_differences(subject: Subject, T: int) -> equalities.Differences:
    """Rows and packed documents on 3 ranks against one process."""
    cases = list(_cases(subject, T))
    expected = [_results(subject, case) for case in cases]
    for found in run_on_ranks(_on_rank, RANKS, subject.arguments, cases):
        for case, ours, theirs in zip(cases, found, expected, strict=True):
            yield from subject.differences(ours, theirs, case.what)


def _on_rank(arguments: tuple[Any, ...], cases: list[_Case]) -> list[dict[str, Tensor]]:
    subject = Subject(*arguments)
    return [_results(subject, case, Axis(dist.get_rank(), RANKS, dist.group.WORLD)) for case in cases]


def _cases(subject: Subject, T: int) -> Iterator[_Case]:
    """Shards of 1 and 2 tokens among long ones; documents that cross a cut, end at it and lie within a shard."""
    whole = (T // 2 - 1, 2, T - T // 2 - 1)
    yield _Case(f"rows on ranks of {whole}", subject.tokens(2, T), (whole,), (None,), None, False)
    n = T // 2
    splits = ((n - 3, 1, 2), (1, 2, T - n - 3))
    yield _Case(f"rows in tiles on {splits}", subject.tokens(2, T), splits, (None, None), None, True)
    yield _Case("rows that continue", subject.tokens(2, T), (whole,), (None,), subject.states(2), True)
    documents = (0, 2, whole[0], whole[0] + 1, T - 3, T)
    packed = subject.tokens(1, T)
    yield _Case(f"documents at {documents} on {whole}", packed, (whole,), (documents,), None, False)
    short = (1, 2, T - 3)
    yield _Case(f"documents at {documents} on {short}", packed, (short,), (documents,), None, False)
    states = subject.states(len(documents) - 1)
    yield _Case(f"documents that continue, on {short}", packed, (short,), (documents,), states, True)


def _results(subject: Subject, case: _Case, ranks: Axis | None = None) -> dict[str, Tensor]:
    """Outputs, final states, and gradients of a loss on the outputs; summed over ranks, except for the states.

    Gradients of states only pass from tile to tile: a mixer may keep the whole gradient on each rank, or a part.
    """
    x_BTC, state, outputs = leaf(case.x_BTC), case.initial, None
    starts = [0, *accumulate(map(sum, case.splits[:-1]))]  # of each tile
    for start, lengths, offsets in zip(starts, case.splits, case.offsets, strict=True):
        split = SequenceSplit(lengths, ranks.rank) if ranks else SequenceSplit((sum(lengths),), 0)
        shard = RankShard(ranks, split) if ranks else None
        columns = slice(start + split.start, start + split.end)
        y, state = subject(x_BTC[:, columns], state, offsets, shard, case.output_state)
        if outputs is None:
            outputs = y.new_zeros(*x_BTC.shape[:2], *y.shape[2:])
        outputs = outputs.index_copy(1, torch.arange(columns.start, columns.stop), y)
    assert outputs is not None
    outputs.backward(cotangent("outputs", outputs))
    found = {"outputs": outputs.detach()}
    for name, x in ({TOKENS: x_BTC} | subject.parameters).items():
        found[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    subject.mixer.zero_grad()
    if ranks:
        for x in found.values():
            dist.all_reduce(x)
    return found | {name: x.detach() for name, x in named("final state", state).items()}


@dataclass(frozen=True)
class Equality:
    """One line of a report."""

    name: str
    result: Literal["holds", "fails", "not offered"]
    error: float | None
    """The largest relative difference; infinite where a call failed or a number is not finite. None: not offered."""
    bound: float
    """The largest difference that holds."""
    reason: str
    """Where the largest difference is, what a call raised, or why the mixer does not offer the equality."""
    required: bool = True
    """Whether `Report.require` accepts no failure."""


@dataclass(frozen=True)
class Report:
    """Which equalities hold for a mixer. It prints as a Markdown table."""

    mixer: str
    equalities: tuple[Equality, ...]

    def with_result(self, result: Literal["holds", "fails", "not offered"]) -> list[str]:
        """The names of the equalities with this result."""
        return [equality.name for equality in self.equalities if equality.result == result]

    def require(self) -> None:
        """Raises AssertionError with the lines of the required equalities that fail. Those not offered are accepted."""
        failures = [e for e in self.equalities if e.result == "fails" and e.required]
        failed = [f"{e.name}: {e.reason} ({_number(e.error)})" for e in failures]
        if failed:
            raise AssertionError(f"{self.mixer}:\n" + "\n".join(failed))

    def __str__(self) -> str:
        lines = [f"| {self.mixer} | result | error | bound | where or why |", "|---|---|---|---|---|"]
        for e in self.equalities:
            lines.append(f"| {e.name} | {e.result} | {_number(e.error)} | {_number(e.bound)} | {e.reason} |")
        return "\n".join(lines)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.0e}" if x else "0"


MIN_TOKENS = 16


def check(letter: str, config: ModelConfig, *, ranks: bool = False, tokens: int = 24) -> Report:
    """Compare a mixer with itself in every way that the same tokens can be processed.

    Each equality compares outputs, final states, and the gradients of tokens, parameters and initial states, in
    float64. Sequence ranks are real gloo ranks (`tost_lm.testing.run_on_ranks`). All tokens and weights are drawn. Of a
    plugin, the rule about NaN is reported and not required.

    Args:
        letter: of a mixer in `tost_lm.mixers.registry.SPECS`.
        config: the shape of the layer, whose pattern is this letter.
        ranks: also compare sequence ranks, in processes that import the main module again: call it there under
            `if __name__ == "__main__":`.
        tokens: T, at least 16. Larger than the chunks of a kernel to include their boundaries.

    Returns:
        A line for each of `EQUALITIES`. A call that raises counts as a failure, with its message.

    Raises:
        ValueError: too few tokens.
    """
    if tokens < MIN_TOKENS:
        raise ValueError(f"too few tokens to cut: {tokens}; use {MIN_TOKENS} or more")
    arguments, is_plugin = Subject.of(letter, config).arguments, SPECS[letter].plugin is not None
    return Report(letter, tuple(_examine(name, arguments, tokens, ranks, not is_plugin) for name in _TESTS))


def _examine(name: str, arguments: tuple[Any, ...], tokens: int, ranks: bool, contains_nan: bool) -> Equality:
    differences, subject = _TESTS[name], Subject(*arguments)
    bound = equalities.SLOPE_BOUND if differences is equalities.finite_differences else BOUND
    required = contains_nan or differences is not equalities.nan_containment
    for test, offered, obstacle in (
        (rank_differences, ranks, "no sequence ranks"),
        (equalities.window, subject.window, "no window"),
    ):
        if differences is test and not offered:
            return Equality(name, "not offered", None, bound, obstacle, required)
    try:
        error, where = max(differences(subject, tokens))
    except Exception as problem:  # whatever a mixer raises is its result
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        reason = f"{type(problem).__name__}: {lines[-1] if lines else ''}"
        return Equality(name, "fails", math.inf, bound, reason, required)
    return Equality(name, "holds" if error <= bound else "fails", error, bound, where, required)


_TESTS: dict[str, Callable[[Subject, int], equalities.Differences]] = {
    "later tokens change no earlier output": equalities.later_tokens,
    "state in and out equals one call": equalities.state_in_and_out,
    "one token at a time equals one call": equalities.single_tokens,
    "packed documents are independent": equalities.packed_documents,
    "tiles equal whole rows": equalities.tiles,
    "sequence ranks equal one": rank_differences,
    "gradients equal finite differences": equalities.finite_differences,
    "the window has its exact length": equalities.window,
    "a NaN reaches later tokens of its document alone": equalities.nan_containment,
}
EQUALITIES = tuple(_TESTS)
"""The names of the equalities, in the order of a report."""
