"""The phases of the chunked backend equal the operator; tests/multiprocess/test_sequence.py runs them on ranks."""

from functools import partial

import pytest
import torch
from agreement import Call, errors
from hypothesis import given, settings
from random_calls import calls

from tost_lm.ops import backends, causal_tssa, chunked_phases
from tost_lm.ops.phases import LocalSoftmax, PhasedBackend


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


def test_training_follows_inference_of_the_same_shape():
    w_BTHD = torch.randn(37, 9, 2, 4, requires_grad=True)  # rows of no other test, so nothing is cached
    call = partial(causal_tssa, temp=torch.ones(2), heads=LocalSoftmax())
    with torch.inference_mode():
        call(w_BTHD)
    call(w_BTHD)[0].sum().backward()
