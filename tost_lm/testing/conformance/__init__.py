"""Conformance of sequence mixers: whether the same tokens, processed in any way, give the same result.

A sequence mixer is called in tiles, token by token, on packed documents and on sequence ranks. All of these must equal
one call, in outputs, final states and the gradients of every input. `check` calls a mixer through a `MixerAdapter` and
reports which of these equalities hold:

    report = check(layer_adapter("T", ModelConfig(layers=1, heads=2, width=8)))
    print(report)
    report.require()

Shapes: B rows, T tokens, C channels, N documents (N = B unless packed), R sequence ranks.
"""

from tost_lm.testing.conformance.adapter import MixerAdapter, concatenate_rows, layer_adapter
from tost_lm.testing.conformance.checks import EQUALITIES, Equality, Report, check

__all__ = ["EQUALITIES", "Equality", "MixerAdapter", "Report", "check", "concatenate_rows", "layer_adapter"]
