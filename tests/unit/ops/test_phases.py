"""The phases of the chunked backend equal the operator; tests/multiprocess/test_sequence.py runs them on ranks."""

import pytest
from agreement import Call, errors
from hypothesis import given, settings
from random_calls import calls

from tost_lm.ops import backends, chunked_phases
from tost_lm.ops.phased_backend import PhasedBackend


@given(calls())
@settings(max_examples=25, deadline=None)
def test_phases_on_one_rank_equal_the_operator(call: Call):
    def phased(self: backends.Chunked, call: backends.Call):
        return backends._run(PhasedBackend(chunked_phases, call.local, None), call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.Chunked, "run", phased)
        patch.setattr(chunked_phases, "chunk_tokens", lambda *_: 16)
        ours = call.run("chunked")
    assert max(errors(ours, call.run("naive")).values()) < 1e-12
