"""The softmax over heads of TSSA on two tensor ranks, in float32."""

import torch
from agreement import Call, draw_call
from torch import Tensor

from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.parallel.mesh import all_gather, build_mesh, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.tensor import SoftmaxOverRanks
from tost_lm.testing import assert_as_accurate, run_on_ranks

HEADS, RANKS, DRAWS = 4, 2, 8


def draw_small_first_token(seed: int) -> Call:
    """One head has nearly the whole membership of the first token."""
    call = draw_call(seed, (100,), HEADS, 64, fresh=True)
    call.w[:, :1] *= 1e-5
    call.w.copy_(call.w.float())
    return call


def gradients_of_w() -> list[Tensor]:
    tensor = build_mesh(start_world("cpu"), ParallelConfig(tensor=RANKS)).tensor
    group, found = HEADS // RANKS, []
    heads = slice(tensor.rank * group, (tensor.rank + 1) * group)
    for seed in range(DRAWS):
        call = draw_small_first_token(seed).to(torch.float32)
        w = call.w[:, :, heads].clone().requires_grad_()
        y, final = causal_tssa(
            w, call.temp[heads], call.bias[heads], output_final_state=True, heads=SoftmaxOverRanks(tensor)
        )
        assert final is not None
        dy, *d_state = call.d_outputs
        (dw,) = torch.autograd.grad((y, *final), w, (dy[:, :, heads], *(d[:, heads] for d in d_state)))
        found.append(torch.cat([*all_gather(dw, tensor)()], 2))
    return found


def test_float32_is_stable_when_heads_are_on_several_ranks():
    for seed, dw in enumerate(run_on_ranks(gradients_of_w, RANKS)[0]):
        call = draw_small_first_token(seed)
        # With one number a token sent back instead of three, the error is 4e-2.
        assert_as_accurate(dw, call.rounded().run("naive")["dw"], call.run("naive")["dw"])
