"""The check of a mixer: each equality, whether the mixer offers it, and what it finds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tost_lm.testing.conformance import equalities
from tost_lm.testing.conformance.adapter import MixerAdapter, Subject
from tost_lm.testing.conformance.on_ranks import rank_differences


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


@dataclass(frozen=True)
class Report:
    """Which equalities hold for a mixer. It prints as a Markdown table."""

    mixer: str
    equalities: tuple[Equality, ...]

    def with_result(self, result: Literal["holds", "fails", "not offered"]) -> list[str]:
        """The names of the equalities with this result."""
        return [equality.name for equality in self.equalities if equality.result == result]

    def require(self) -> None:
        """Raises AssertionError with the lines of the equalities that fail. Those not offered are accepted."""
        failed = [f"{e.name}: {e.reason} ({_number(e.error)})" for e in self.equalities if e.result == "fails"]
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


class _Test(NamedTuple):
    differences: Callable[[Subject, int], equalities.Differences]
    obstacle: Callable[[MixerAdapter], str | None]
    """Why the mixer does not offer the equality; None: it does."""
    bound: float | None = None
    """None: that of the mixer."""


def check(adapter: MixerAdapter, *, tokens: int = 24, seed: int = 0) -> Report:
    """Compare a mixer with itself in every way that the same tokens can be processed.

    Each equality compares outputs, final states, and the gradients of tokens, parameters and initial states. Sequence
    ranks are real gloo ranks (`tost_lm.testing.run_on_ranks`). All tokens and weights are drawn.

    Args:
        tokens: T, at least 16. Larger than the chunks of a kernel to include their boundaries.
        seed: of weights, tokens and cuts.

    Returns:
        A line for each of `EQUALITIES`. A call that raises counts as a failure, with its message.

    Raises:
        ValueError: too few tokens.
    """
    if tokens < MIN_TOKENS:
        raise ValueError(f"too few tokens to cut: {tokens}; use {MIN_TOKENS} or more")
    return Report(adapter.name, tuple(_examine(name, test, adapter, tokens, seed) for name, test in _TESTS.items()))


def _examine(name: str, test: _Test, adapter: MixerAdapter, tokens: int, seed: int) -> Equality:
    bound = test.bound or adapter.bound
    if obstacle := test.obstacle(adapter):
        return Equality(name, "not offered", None, bound, obstacle)
    try:
        error, where = max(test.differences(Subject(adapter, seed), tokens))
    except Exception as problem:  # whatever a mixer raises is its result
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        return Equality(name, "fails", math.inf, bound, f"{type(problem).__name__}: {lines[-1] if lines else ''}")
    return Equality(name, "holds" if error <= bound else "fails", error, bound, where)


def _always(adapter: MixerAdapter) -> None:
    return None


def _without_state(adapter: MixerAdapter) -> str | None:
    return None if adapter.has_state else "no state"


def _without_documents(adapter: MixerAdapter) -> str | None:
    return None if adapter.has_documents else "no packed documents"


def _without_ranks(adapter: MixerAdapter) -> str | None:
    return None if adapter.shard else "no sequence ranks"


def _without_float64(adapter: MixerAdapter) -> str | None:
    return None if adapter.dtype == torch.float64 else f"computed in {adapter.dtype}, not in float64"


def _without_window(adapter: MixerAdapter) -> str | None:
    return None if adapter.window else "no window"


_TESTS = {
    "later tokens change no earlier output": _Test(equalities.later_tokens, _always),
    "state in and out equals one call": _Test(equalities.state_in_and_out, _without_state),
    "one token at a time equals one call": _Test(equalities.single_tokens, _without_state),
    "packed documents are independent": _Test(equalities.packed_documents, _without_documents),
    "tiles equal whole rows": _Test(equalities.tiles, _without_state),
    "sequence ranks equal one": _Test(rank_differences, _without_ranks),
    "gradients equal finite differences": _Test(
        equalities.finite_differences, _without_float64, equalities.SLOPE_BOUND
    ),
    "the window has its exact length": _Test(equalities.window, _without_window),
    "a NaN reaches later tokens of its document alone": _Test(equalities.nan_containment, _always),
}
EQUALITIES = tuple(_TESTS)
"""The names of the equalities, in the order of a report."""
