"""The gated delta rule in PyTorch, chunk by chunk, with its closed-form backward.

Within a chunk that starts with the state S₀, and with the decay E_ij = α_{j+1} … α_i between two tokens:

    A = E ∘ K Kᵀ below the diagonal      (I + A diag(β)) X = V − diag(E_i0) K S₀      U = diag(β) X
    Y = diag(E_i0) Q S₀ + (E ∘ Q Kᵀ) U   S_L = E_L0 S₀ + Kᵀ diag(E_Lj) U

X is what the state lacks of each value. The triangular system is solved, and nothing is divided by a decay. The
backward reads the inputs, X and the state before each group of chunks (`groups`).

In the columns of a state the recurrence is affine: S = M S₀ + C after the tokens of a document. M [K, K] is the state
that values 0 and S₀ = I lead to, C [K, V] the one of S₀ = 0.

Shapes: M = B·T tokens, h key heads of size K, G value heads for each (H = h·G) of size V; n documents, c chunks of L
tokens.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular, vecdot
from torch.nn.functional import pad

from tost_lm.mixers.delta.channels import ChannelChunks
from tost_lm.mixers.delta.groups import Group, groups_of_chunks, pieces_of
from tost_lm.mixers.delta.settings import CHUNK_TOKENS
from tost_lm.ops.layout import LocalDocuments, int64_tensor
from tost_lm.ops.precision import running_dtype, statistics_dtype


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None,
    local: LocalDocuments, with_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `fla.delta_rule`; with `initial`, the final state is in its dtype."""
    query_M, key_M, value_M, log_decay_M, beta_M = (x.flatten(0, 1) for x in (query, key, value, log_decay, beta))
    if initial is None:
        shape = len(local.lengths), *value_M.shape[1:2], key.shape[-1], value.shape[-1]
        initial = value.new_zeros(shape, dtype=running_dtype(value.device))
    y_MHV, final_nHKV = delta_rule_chunks(query_M, key_M, value_M, log_decay_M, beta_M, initial, local.lengths)
    return y_MHV.view_as(value), final_nHKV if with_final else None


def delta_rule_chunks(
    query_MhK: Tensor, key_MhK: Tensor, value_MHV: Tensor, log_decay_MH: Tensor, beta_MH: Tensor,
    initial_nHKV: Tensor, lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [M, H, V], and the states after each document, [n, H, K, V], from those before it, in their dtype.

    With H = h, the logarithms of decays may also be of key channels, [M, H, K].
    """
    h, dtype = key_MhK.shape[1], statistics_dtype(value_MHV)
    broken_MH = _broken(key_MhK, value_MHV, log_decay_MH, beta_MH)
    if broken_MH is not None:
        finite = (x.where(x.isfinite(), 0) for x in (key_MhK, value_MHV, log_decay_MH, beta_MH))
        key_MhK, value_MHV, log_decay_MH, beta_MH = finite
    value_MhGV, log_decay_MhG, beta_MhG = (x.unflatten(1, (h, -1)) for x in (value_MHV, log_decay_MH, beta_MH))
    initial_nhKGV = initial_nHKV.to(dtype).unflatten(1, (h, -1)).transpose(2, 3).contiguous()
    y_MhGV, final_nhKGV = _DeltaRule.apply(  # pyright: ignore[reportGeneralTypeIssues]
        query_MhK, key_MhK, value_MhGV, log_decay_MhG, beta_MhG, initial_nhKGV, lengths
    )
    y_MHV, final_nHKV = y_MhGV.flatten(1, 2), final_nhKGV.transpose(2, 3).flatten(1, 2).to(initial_nHKV.dtype)
    if broken_MH is not None:
        since_MH = torch.cat([tokens.cumsum(0) for tokens in broken_MH.split(lengths)])
        last_n = int64_tensor(tuple(accumulate(lengths)), since_MH.device) - 1
        y_MHV, final_nHKV = y_MHV + since_MH[..., None].to(y_MHV.dtype), final_nHKV + since_MH[last_n, :, None, None]
    return y_MHV, final_nHKV


def delta_rule_maps(
    key_MhK: Tensor, value_MHV: Tensor, log_decay_MH: Tensor, beta_MH: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """M and C of n documents of equal lengths, [n, H, K, K] and [n, H, K, V]: the states that the tokens lead to from
    units, and from 0. On devices, those of pieces of a document are computed together and then joined.

    They are float32, or float64 for float64 values, also where the tokens are computed by kernels of 16 bits.
    """
    n, (H, V), K = len(lengths), value_MHV.shape[1:], key_MhK.shape[-1]
    pieces = pieces_of(lengths, H, key_MhK.device)
    of_piece = -(-lengths[0] // (pieces * CHUNK_TOKENS)) * CHUNK_TOKENS if pieces > 1 else lengths[0]

    def side_by_side(x_Mh: Tensor) -> Tensor:
        """Pieces as other heads of the tokens of one piece. Zeros at the end change no state."""
        x_nth = x_Mh.unflatten(0, (n, -1))
        x_nth = pad(x_nth, (0, 0) * (x_nth.dim() - 2) + (0, pieces * of_piece - lengths[0]))
        return x_nth.unflatten(1, (pieces, of_piece)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    unit_KE = torch.eye(K, K + V, dtype=statistics_dtype(value_MHV), device=value_MHV.device).roll(V, 1)
    value_MHE = torch.cat([value_MHV, value_MHV.new_zeros(*value_MHV.shape[:2], K)], -1)
    inputs = key_MhK, value_MHE, log_decay_MH, beta_MH
    key, value, log_decay, beta = map(side_by_side, inputs) if pieces > 1 else inputs
    initial = unit_KE.expand(n, pieces * H, K, V + K)
    _, map_nPHKE = delta_rule_chunks(key, key, value, log_decay, beta, initial, [of_piece] * n)
    map_nHKE, *others = map_nPHKE.unflatten(1, (pieces, H)).unbind(1)
    for other_nHKE in others:
        added_nHKV, factor_nHKK = other_nHKE.split([V, K], -1)
        map_nHKE = factor_nHKK @ map_nHKE + pad(added_nHKV, (0, K))
    added_nHKV, factor_nHKK = map_nHKE.split([V, K], -1)
    return factor_nHKK, added_nHKV


def _broken(key_MhK: Tensor, value_MHV: Tensor, *scalars_MH: Tensor) -> Tensor | None:
    """NaN for each token and head with an input that is not finite, else 0, [M, H]; None: all of them are finite.

    The products of a chunk would carry a NaN to earlier tokens, as 0 · NaN. It is added to the later tokens instead.
    """
    with torch.no_grad():
        sums_MH = sum((x.sum(-1) if x.dim() == 3 else x for x in scalars_MH), value_MHV.sum(-1))
        broken_MH = 0 * (sums_MH.unflatten(1, (key_MhK.shape[1], -1)) + key_MhK.sum(-1, keepdim=True)).flatten(1)
        # Other devices would have to be waited for.
        return None if broken_MH.is_cpu and bool(broken_MH.sum().isfinite()) else broken_MH


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query_MhK: Tensor, key_MhK: Tensor, value_MhGV: Tensor, log_decay_MhG: Tensor, beta_MhG: Tensor,
        initial_nhKGV: Tensor, lengths: Sequence[int],
    ):  # fmt: skip
        inputs = query_MhK, key_MhK, log_decay_MhG, beta_MhG
        y_MhGV, final_nhKGV, stored = torch.empty_like(value_MhGV), torch.empty_like(initial_nhKGV), []
        ctx.sets = groups_of_chunks(lengths, beta_MhG[0].numel(), key_MhK.device)
        for documents, groups in ctx.sets:
            state_nhKGV = initial_nhKGV[documents]
            for group in groups:
                state_bKGV = state_nhKGV[: len(group.rows)].flatten(0, 1)
                before_bKGV, chunks = state_bKGV.clone(), _chunks(group, *inputs)
                y, lacking = chunks.forward(group.split(value_MhGV), state_bKGV)
                group.join(y_MhGV, y)
                stored += [before_bKGV, lacking]
            final_nhKGV[documents] = state_nhKGV
        ctx.save_for_backward(*inputs, *stored)
        return y_MhGV, final_nhKGV

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MhGV: Tensor, d_final_nhKGV: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, log_decay, beta, *stored = ctx.saved_tensors
        inputs = query, key, log_decay, beta
        d_query, d_key, d_log_decay, d_beta = (torch.empty_like(x) for x in inputs)
        d_inputs = d_query, d_key, torch.empty_like(dy_MhGV), d_log_decay, d_beta
        d_final_nhKGV = d_final_nhKGV.contiguous()
        d_initial_nhKGV = torch.empty_like(d_final_nhKGV)
        for documents, groups in reversed(ctx.sets):
            d_state_nhKGV = d_final_nhKGV[documents]
            for group in reversed(groups):
                d_state_bKGV = d_state_nhKGV[: len(group.rows)].flatten(0, 1)
                with torch.autocast(dy_MhGV.device.type, enabled=False):
                    chunks = _chunks(group, *inputs)
                    chunks.restore(stored.pop(), stored.pop())
                    found = chunks.backward(group, dy_MhGV, d_state_bKGV)
                for d_x, part in zip(d_inputs, found, strict=True):
                    group.join(d_x, part)
            d_initial_nhKGV[documents] = d_state_nhKGV
        return *d_inputs, d_initial_nhKGV, None


def _chunks(group: Group, query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor) -> "_Chunks | ChannelChunks":
    return (ChannelChunks if log_decay.dim() == 4 else _Chunks)(group, query, key, log_decay, beta)


class _Chunks:
    """The chunks of a group, with the tensors that both passes need.

    What is computed of queries and of keys alike is stored as 2L rows, keys second.
    """

    def __init__(self, group: Group, query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor):
        self.beta_cbLG1, L = group.split(beta)[..., None], group.chunk_tokens
        self.both = self.beta_cbLG1.new_empty(*self.beta_cbLG1.shape[:2], 2 * L, key.shape[-1])
        self.key = group.split(key, out=self.both[:, :, L:])
        group.split(query, out=self.both[:, :, :L])
        since_cbLG = group.split(log_decay.to(running_dtype(key.device))).cumsum(2)
        self.from_start_cbLG1 = since_cbLG.exp().to(self.key.dtype)[..., None]
        self.to_end_cbLG1 = (since_cbLG[:, :, -1:] - since_cbLG).exp().to(self.key.dtype)[..., None]
        self.total_cb1G1 = self.from_start_cbLG1[:, :, -1:]
        log_cbGL = since_cbLG.mT
        later_LL = log_cbGL.new_full((L, L), -torch.inf).triu(1)
        log_cbGLL = (log_cbGL[..., None] - log_cbGL[..., None, :]).add_(later_LL)
        self.decay_cbG1LL = log_cbGLL.to(self.key.dtype).exp_()[:, :, :, None]
        products_cb12LL = (self.both @ self.key.mT).unflatten(2, (2, L))[:, :, None]
        self.scores_cbG2LL = _without_itself(products_cb12LL * self.decay_cbG1LL)

    def forward(self, value: Tensor, state_bKGV: Tensor) -> tuple[Tensor, Tensor]:
        """y and X, [c, b, L, G, V]. Changes the state to that after the group, and the values."""
        L, lacking = self.key.shape[2], value
        factor = self.beta_cbLG1 * self.to_end_cbLG1
        twice = self.from_start_cbLG1.repeat(1, 1, 2, 1, 1)
        system = self.scores_cbG2LL[..., 1, :, :] * self.beta_cbLG1[..., 0].mT[..., None, :]
        y, state_bKW = torch.empty_like(value), state_bKGV.flatten(2)
        reads = self.both.new_empty(*self.both.shape[1:3], *value.shape[3:])
        added = torch.empty_like(reads[:, L:])
        for i, both in enumerate(self.both):
            torch.bmm(both, state_bKW, out=reads.flatten(2))
            reads.mul_(twice[i])
            y[i] = reads[:, :L]
            right = _rows(lacking[i].sub_(reads[:, L:])).mT
            solve_triangular(system[i].mT, right, upper=True, left=False, unitriangular=True, out=right)
            torch.mul(lacking[i], factor[i], out=added)
            state_bKGV.mul_(self.total_cb1G1[i])
            state_bKW.baddbmm_(self.key[i].mT, added.flatten(2))
        y += _rows(self.scores_cbG2LL[..., 0, :, :] @ _rows(lacking * self.beta_cbLG1))
        return y, lacking

    def restore(self, lacking: Tensor, state_bKGV: Tensor) -> None:
        """Compute again what the backward needs, from X and the state before the group."""
        self.lacking, self.written = lacking, lacking * self.beta_cbLG1
        self.ended = self.written * self.to_end_cbLG1
        self.before = self.key.new_empty(len(self.key), *state_bKGV.shape)
        self.before[0] = state_bKGV
        for i in range(len(self.key) - 1):
            torch.mul(self.before[i], self.total_cb1G1[i], out=self.before[i + 1])
            self.before[i + 1].flatten(2).baddbmm_(self.key[i].mT, self.ended[i].flatten(2))

    def backward(self, group: Group, dy_MhGV: Tensor, d_state_bKGV: Tensor) -> tuple[Tensor, ...]:
        """The gradients of query, key, value, log decay and β. Changes that of the state after to that before."""
        L, beta = self.key.shape[2], self.beta_cbLG1
        d_rows = beta.new_empty(*self.both.shape[:3], *self.written.shape[3:])
        dy, faded = group.split(dy_MhGV, out=d_rows[:, :, :L]), torch.empty_like(d_rows)
        torch.mul(dy, self.from_start_cbLG1, out=faded[:, :, :L])
        d_right = _rows(self.scores_cbG2LL[..., 0, :, :].mT @ _rows(dy)).contiguous()
        system = self.scores_cbG2LL[..., 1, :, :] * _rows(beta)
        minus_factor, read = -beta * self.from_start_cbLG1, torch.empty_like(d_right[0])
        d_ended_key = beta.new_empty(*_rows(self.ended).shape[:-1], self.key.shape[-1])
        d_total_cbG = torch.empty_like(self.total_cb1G1[:, :, 0, :, 0])
        for i in reversed(range(len(self.key))):
            torch.matmul(_rows(self.ended[i]), _rows(d_state_bKGV).mT, out=d_ended_key[i])
            torch.sum(d_state_bKGV * self.before[i], (1, 3), out=d_total_cbG[i])
            torch.bmm(self.key[i], d_state_bKGV.flatten(2), out=read.flatten(2))
            right = _rows(d_right[i].addcmul_(read, self.to_end_cbLG1[i])).mT
            solve_triangular(system[i], right, upper=False, left=False, unitriangular=True, out=right)
            torch.mul(d_right[i], minus_factor[i], out=faded[i, :, L:])
            d_state_bKGV.mul_(self.total_cb1G1[i])
            d_state_bKGV.flatten(2).baddbmm_(self.both[i].mT, faded[i].flatten(2))
        d_beta = vecdot(d_right, self.lacking)
        d_value = d_right.mul_(beta)
        torch.neg(d_value, out=d_rows[:, :, L:])

        d_scores = _without_itself((_rows(d_rows) @ _rows(self.written).mT).unflatten(3, (2, L)))
        aged_cbGLL = self.scores_cbG2LL.mul_(d_scores).sum(3)
        aged_cbGLL.diagonal(dim1=-2, dim2=-1).zero_()
        d_read, d_known = _over_heads(d_scores.mul_(self.decay_cbG1LL)).unbind(2)
        d_both = _rows(faded) @ _rows(self.before).mT
        d_since_cbGL = vecdot(d_both, self.both[:, :, None]).unflatten(-1, (2, L)).sum(-2)
        d_both = _over_heads(d_both)
        d_query, d_key = d_both[:, :, :L], d_both[:, :, L:]
        passed_cbGL = vecdot(d_ended_key, self.key[:, :, None])
        d_query += d_read @ self.key
        d_key += _over_heads(d_ended_key)
        d_key += torch.cat([d_read.mT, d_known + d_known.mT], -1) @ self.both

        d_since_cbGL += aged_cbGLL.sum(-1) - aged_cbGLL.sum(-2)
        d_total_cbG1 = d_total_cbG[..., None] * self.total_cb1G1[:, :, 0]
        d_log_decay = d_since_cbGL.flip(-1).cumsum(-1).flip(-1) + d_total_cbG1
        d_log_decay[..., 1:] += passed_cbGL[..., :-1].cumsum(-1)
        return d_query, d_key, d_value, d_log_decay.mT, d_beta


def _rows(x_LGV: Tensor) -> Tensor:
    """[…, G, L, V], or back."""
    return x_LGV.transpose(-3, -2)


def _over_heads(x_cbG: Tensor) -> Tensor:
    """The sum over the value heads of a key head."""
    return x_cbG.squeeze(2) if x_cbG.shape[2] == 1 else x_cbG.sum(2)


def _without_itself(scores_2LL: Tensor) -> Tensor:
    """The scores themselves: a token's key does not read what the token writes."""
    scores_2LL[..., 1, :, :].diagonal(dim1=-2, dim2=-1).zero_()
    return scores_2LL
