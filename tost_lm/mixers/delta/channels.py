"""The delta rule with a decay for each channel of the keys (Kimi Delta Attention, arXiv 2510.26692), chunk by chunk.

As in `chunked`, but E_ij is a vector of K channels, within the products:

    A_ij = Σ_K E_ij ∘ k_i ∘ k_j, below the diagonal; likewise of queries; S_L = Diag(E_L0) S₀ + (E_Lj ∘ K)ᵀ diag(β) X

For the products, the tokens of a chunk are halved, their halves again, and so on. A token i of a second half and j of
the first one have E_ij = E_im · E_mj for the last token m of the first half. So all pairs of two halves are one product
of matrices, factors are at most 1, and nothing is divided.

Shapes: as in `chunked`, with G = 1; b pairs of a document and a head, n pairs of halves of P tokens, and R = 2P rows:
queries and keys of P tokens in turn.
"""

import torch
from torch import Tensor
from torch.linalg import solve_triangular, vecdot

from tost_lm.mixers.delta.groups import Group

Levels = list[tuple[Tensor, Tensor, Tensor, Tensor]]


class ChannelChunks:
    """The chunks of a group, with the tensors that both passes need: as `chunked._Chunks`."""

    def __init__(self, group: Group, query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor):
        self.beta, self.decay_cbLK = group.split(beta), group.split(log_decay).squeeze(3).exp_()
        self.both_cbL2K = self.beta.new_empty(*self.beta.shape[:3], 2, key.shape[-1])
        self.query, self.key = (group.split(x, self.both_cbL2K[..., i, :]) for i, x in enumerate((query, key)))

    def forward(self, value_cbLGV: Tensor, state_bKGV: Tensor) -> tuple[Tensor, Tensor]:
        """y and X, [c, b, L, G, V]. Changes the state to that after the group, and the values."""
        lacking, state_bKV = value_cbLGV.squeeze(3), state_bKGV.squeeze(2)
        self._multiply()
        system, y = self.scores_cbL2L[..., 1, :] * self.beta.mT, torch.empty_like(lacking)
        for i, rows in enumerate(self.rows_cbRK):
            y[i], known = (rows @ state_bKV).unflatten(1, (-1, 2)).unbind(2)
            right = lacking[i].sub_(known).mT
            solve_triangular(system[i].mT, right, upper=True, left=False, unitriangular=True, out=right)
            state_bKV.mul_(self.total_cbK1[i]).baddbmm_(self.ended_key[i].mT, lacking[i] * self.beta[i])
        y += self.scores_cbL2L[..., 0, :] @ (lacking * self.beta)
        return y[:, :, :, None], value_cbLGV

    def restore(self, lacking_cbLGV: Tensor, state_bKGV: Tensor) -> None:
        """Compute again what the backward needs, from X and the state before the group."""
        self.levels: Levels = []
        self._multiply(self.levels)
        self.lacking, state_bKV = lacking_cbLGV.squeeze(3), state_bKGV.squeeze(2)
        self.written = self.lacking * self.beta
        self.before = self.key.new_empty(len(self.key), *state_bKV.shape)
        self.before[0] = state_bKV
        for i in range(len(self.key) - 1):
            torch.mul(self.before[i], self.total_cbK1[i], out=self.before[i + 1])
            self.before[i + 1].baddbmm_(self.ended_key[i].mT, self.written[i])

    def _multiply(self, levels: Levels | None = None) -> None:
        """Scores; rows with their decays since the start of the chunk, keys with those to its end, and all decays.

        Of each size of halves, `levels` gets the decays of first and of second halves, [c, b, n, K], rows and columns.
        """
        (c, b, L, K), decay = self.key.shape, self.decay_cbLK
        self.scores_cbL2L = self.key.new_zeros(c, b, L, 2, L)
        self.scores_cbL2L[..., 0, :].diagonal(dim1=2, dim2=3).copy_(vecdot(self.query, self.key))
        self.ended_key = self.key.clone()
        # Without `levels`, queries and keys are not needed again.
        rows_cbL2K = torch.mul(self.both_cbL2K, decay[..., None, :], out=self.both_cbL2K if levels is None else None)
        P = 1
        while P < L:
            of_first, of_second = decay.unflatten(2, (-1, 2)).unbind(3)
            rows, columns = _halves(rows_cbL2K, P)[1].flatten(3, 4), _halves(self.ended_key, P)[0]
            if levels is not None:
                levels.append((of_first, of_second, rows.contiguous(), columns.contiguous()))
            _blocks(self.scores_cbL2L, P).copy_((rows @ columns.mT).view(c, b, -1, P, 2, P))
            rows.mul_(of_first[..., None, :])
            columns.mul_(of_second[..., None, :])
            decay, P = of_first * of_second, 2 * P
        self.rows_cbRK, self.total_cbK1 = rows_cbL2K.flatten(2, 3), decay.view(c, b, K, 1)

    def backward(self, group: Group, dy_MhGV: Tensor, d_state_bKGV: Tensor) -> tuple[Tensor, ...]:
        """The gradients of query, key, value, log decay and β. Changes that of the state after to that before."""
        beta, ended_key = self.beta, self.ended_key
        d_rows, d_state_bKV = (
            self.key.new_empty(*self.scores_cbL2L.shape[:4], dy_MhGV.shape[-1]),
            d_state_bKGV.squeeze(2),
        )
        dy_cbLV = group.split(dy_MhGV, out=d_rows[:, :, :, :1]).squeeze(3)
        d_right = self.scores_cbL2L[..., 0, :].mT @ dy_cbLV
        system = self.scores_cbL2L[..., 1, :] * beta
        d_ended_key, d_total_cbK = torch.empty_like(ended_key), torch.empty_like(self.total_cbK1[..., 0])
        for i in reversed(range(len(self.key))):
            torch.bmm(self.written[i], d_state_bKV.mT, out=d_ended_key[i])
            torch.sum(d_state_bKV * self.before[i], 2, out=d_total_cbK[i])
            right = d_right[i].baddbmm_(ended_key[i], d_state_bKV).mT
            solve_triangular(system[i], right, upper=False, left=False, unitriangular=True, out=right)
            torch.mul(d_right[i], -beta[i], out=d_rows[i, :, :, 1])
            d_state_bKV.mul_(self.total_cbK1[i]).baddbmm_(self.rows_cbRK[i].mT, d_rows[i].flatten(1, 2))
        d_beta = vecdot(d_right, self.lacking)[..., None]
        d_value = d_right.mul_(beta)

        d_rows = d_rows.flatten(2, 3)
        d_scores_cbL2L = (d_rows @ self.written.mT).view_as(self.scores_cbL2L)
        d_both, d_key = (d_rows @ self.before.mT).view_as(self.both_cbL2K), d_ended_key
        passed, d_since = ended_key * d_ended_key, torch.zeros_like(ended_key)
        for P, (of_first, of_second, rows, columns) in reversed([(1 << i, x) for i, x in enumerate(self.levels)]):
            d_block = _blocks(d_scores_cbL2L, P).flatten(3, 4)
            d_second, d_first = _halves(d_both, P)[1].flatten(3, 4), _halves(d_key, P)[0]
            torch.addcmul(_product(d_block, columns), d_second, of_first[..., None, :], out=d_second)
            d_columns = _product(d_block.mT, rows)
            torch.addcmul(d_columns, d_first, of_second[..., None, :], out=d_first)
            _halves(d_since, P)[0].addcmul_(d_columns, columns, value=-1)
        d_query, d_key_of_rows = d_both.mul_(self.decay_cbLK[..., None, :]).unbind(3)
        # A decay counts for the pairs of a later row and an earlier column; `passed` is of columns and the chunk's end.
        d_since.addcmul_(d_query, self.query).addcmul_(d_key_of_rows, self.key)
        ones_LL = beta.new_ones(beta.shape[2], beta.shape[2])
        d_log_decay = (ones_LL.triu() @ d_since).add_((d_total_cbK * self.total_cbK1[..., 0])[:, :, None])
        d_log_decay += ones_LL.tril(-1) @ passed
        d_itself = d_scores_cbL2L[..., 0, :].diagonal(dim1=2, dim2=3)[..., None]
        d_query.addcmul_(d_itself, self.key)
        d_key.add_(d_key_of_rows).addcmul_(d_itself, self.query)
        return d_query, d_key, d_value[:, :, :, None], d_log_decay[:, :, :, None], d_beta


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for which BLAS takes long if a is a column or a row of two."""
    if a.shape[-1] == 1:
        return a * b
    if a.shape[-2] == 1:
        return (a[..., :1] * b[..., :1, :]).addcmul_(a[..., 1:], b[..., 1:, :])
    return a @ b


def _halves(x_cbL: Tensor, P: int) -> tuple[Tensor, ...]:
    """First and second halves, [c, b, n, P, …] each."""
    return x_cbL.unflatten(2, (-1, 2, P)).unbind(3)


def _blocks(scores_cbL2L: Tensor, P: int) -> Tensor:
    """The scores of second halves for first ones, [c, b, n, P, 2, P], a view."""
    scores = scores_cbL2L.unflatten(4, (-1, 2, P)).unflatten(2, (-1, 2, P))[:, :, :, 1, :, :, :, 0]
    return scores.diagonal(dim1=2, dim2=5).movedim(-1, 2)
