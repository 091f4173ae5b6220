"""The phases of the chunked backend, composed, are the operator. (Over ranks: tests/multiprocess/test_sequence.py.)"""

import pytest
from agreement import Call, calls, errors
from hypothesis import given, settings

from tost_lm.ops import chunked_phases
from tost_lm.ops.composed import Composed
from tost_lm.ops.split import Pieces


@given(calls())
@settings(max_examples=25, deadline=None)
def test_composed_here_they_are_the_operator(call: Call):
    def composed(backend: str, pieces: Pieces, shard: None, rows: bool, apart: bool) -> Composed:
        return Composed(chunked_phases, pieces, shard, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tost_lm.ops.causal._passes", composed)
        patch.setattr(chunked_phases, "chunk_tokens", lambda *_: 16)
        ours = call.run("chunked")
    assert max(errors(ours, call.run("naive")).values()) < 1e-12
