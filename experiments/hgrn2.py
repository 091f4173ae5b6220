"""HGRN2 (arXiv 2404.07904), a token mixer whose decays depend on the token, in plain PyTorch: a plugin.

    tost train demo 'model.plugins=["experiments/hgrn2.py"]' model.pattern=H run.name=hgrn2

docs/tutorials/own_mixer.md is about plugins. Each head has a matrix S [D, D], and f is a gate for each key channel:

    S_t = Diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ        y_t = S_tᵀ q_t

Shapes: B sequences, T tokens, M = B·T, C channels, H heads, D channels of a head, N documents, n of them with tokens on
this rank, c chunks of L tokens of one document each.
"""

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, rms_norm, silu

from tost_lm.config import Section
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.ops.affine import affine_scan, initial_states
from tost_lm.ops.initialization import set_own_constants
from tost_lm.ops.layout import document_layout
from tost_lm.ops.precision import statistics_dtype

CHUNK_TOKENS = 16


class Hgrn2Spec(RecurrentSpec):
    letter, name, tag, settings = "H", "HGRN2", "hgrn2", Section

    def description(self, shape):
        return "HGRN2, linear in time"


class Hgrn2State(NamedTuple):
    memory: Tensor  # S after some tokens, [N, H, D, D], float64; zeros before the first one


class Hgrn2(TokenMixer):
    State, OF_HEADS, FIXED_STATE = Hgrn2State, ("gate_bias", "norm"), True

    def __init__(self, shape):
        super().__init__()
        self.heads, self.norm_epsilon = shape.heads, shape.norm_epsilon
        self.in_proj = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.gate_bias, self.norm = (nn.Parameter(torch.empty(shape.heads, shape.width // shape.heads)) for _ in "bn")
        set_own_constants(self)

    def initial_values(self):  # 1 − f from 1/2 to 1/1,098 in each head
        spread = torch.linspace(0, 7, self.norm.shape[1], device="cpu")
        return {"gate_bias": spread.expand(self.norm.shape), "norm": 1.0}

    def forward(self, x_BTC, state, info):
        heads_BTHE, dtype = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1)), statistics_dtype(x_BTC)
        with torch.autocast(x_BTC.device.type, enabled=False):
            query, gate, value = heads_BTHE.to(dtype).flatten(0, 1).chunk(3, -1)
            gate = gate + self.gate_bias.to(dtype)
            tokens = silu(query), (-gate).sigmoid(), value, logsigmoid(gate)  # q, k = 1 − f, v and log f, [M, H, D]
            shape = [len(info.local.whole_lengths), *self.norm.shape, self.norm.shape[1]]
            initial_NHDD = initial_states(info.pad_rows(state and state.memory), shape, like=value)

            def maps(cut, lengths):  # A, a diagonal, and C, the state that the tokens lead to from 0
                *_, log_f = cut_tokens = [x[cut] for x in tokens]
                _, added_nHDD = scan(cut_tokens, lengths, value.new_zeros(len(lengths), *shape[1:]))
                return torch.stack([x.sum(0) for x in log_f.split(lengths)]).exp()[..., None], added_nHDD

            wanted = {"local": info.local, "shard": info.shard, "output_final_state": bool(info.output_state)}
            y_MHD, memory = affine_scan(partial(scan, tokens, info.local.lengths), maps, initial_NHDD, **wanted)
            y_MHD = rms_norm(y_MHD, y_MHD.shape[-1:], eps=self.norm_epsilon) * self.norm.to(dtype)
        y_BTC = y_MHD.to(heads_BTHE.dtype).unflatten(0, heads_BTHE.shape[:2]).flatten(2)
        return self.out_proj(y_BTC), Hgrn2State(info.select_rows(memory)) if memory is not None else None


def scan(tokens, lengths, before_nHDD):
    """y of each token, [M, H, D], and S after each document, in c chunks of L tokens of one document each."""
    M, L, device = len(tokens[0]), min(CHUNK_TOKENS, max(lengths)), before_nHDD.device
    layout = document_layout((0, *accumulate(lengths)), L, device)
    c, chunk_c = len(layout.start_K), torch.arange(len(layout.start_K), device=device)
    ahead_c, lengths_c = L * chunk_c - layout.start_K, layout.end_K - layout.start_K
    place_M = torch.arange(M, device=device) + ahead_c.repeat_interleave(lengths_c, output_size=M)
    query, key, value, log_f = (  # [c, H, L, D]; zeros after the last token of a chunk
        x.new_zeros(c * L, *x.shape[1:]).index_copy(0, place_M, x).unflatten(0, (c, L)).transpose(1, 2) for x in tokens
    )
    since = log_f.cumsum(2)
    gaps_cHLLD = (since[:, :, :, None] - since[:, :, None]).clamp(max=0).exp()  # above the diagonal not used
    scores_cHLL = (query[:, :, :, None] * key[:, :, None] * gaps_cHLLD).sum(-1).tril()
    total, added = since[:, :, -1, :, None].exp(), (key * (since[:, :, -1:] - since).exp()).mT @ value
    age_c111 = (chunk_c - layout.first_chunk_N1[layout.document_K])[:, None, None, None]
    earlier = lambda x, chunks: pad(x[:-chunks], (0,) * 6 + (chunks, 0))
    for distance in (1 << i for i in range((layout.longest - 1).bit_length())):  # join maps of as many chunks
        added = added + torch.where(age_c111 >= distance, total * earlier(added, distance), 0)
        total = torch.where(age_c111 >= distance, total * earlier(total, distance), total)
    before_cHDD = before_nHDD[layout.document_K]
    after_cHDD = total * before_cHDD + added
    before_cHDD = torch.where(age_c111 > 0, earlier(after_cHDD, 1), before_cHDD).to(value.dtype)
    y_cHLD = scores_cHLL @ value + (query * since.exp()) @ before_cHDD
    return y_cHLD.transpose(1, 2).flatten(0, 1)[place_M], after_cHDD[layout.first_chunk_N1[1:] - 1]


register(Hgrn2Spec(), Hgrn2)
