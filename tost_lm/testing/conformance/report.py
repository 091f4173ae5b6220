"""The result of a conformance check."""

from dataclasses import dataclass
from typing import Literal


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
