"""The gated delta rule in PyTorch, chunk by chunk, with its closed-form backward; it stores its inputs and few states.

Within a chunk that starts with the state S₀, and with the decay E_ij = α_{j+1} … α_i between two tokens:

    A = E ∘ K Kᵀ below the diagonal      (I + A diag(β)) X = V − diag(E_i0) K S₀      U = diag(β) X
    Y = diag(E_i0) Q S₀ + (E ∘ Q Kᵀ) U   S_L = E_L0 S₀ + Kᵀ diag(E_Lj) U

X is what the state lacks of each value. The triangular system is solved; nothing is divided by a decay. All documents
advance together, as many chunks of them at once as a core's cache holds. The backward computes these again, last group
of chunks first, from the state before the group.

In the columns of a state the recurrence is affine: S_N = M S₀ + C for the tokens of a document. Values 0 and an initial
state I give M [K, K]; an initial state 0 gives C [K, V].

Shapes: M = B·T tokens, h key heads of size K, G value heads for each (H = h·G) of size V, W = G·V columns of the states
of a key head; n documents, c chunks of L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular, vecdot
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tost_lm.mixers.delta.settings import CHUNK_TOKENS, DEVICE_GROUP_ELEMENTS, GROUP_CHUNKS, GROUP_ELEMENTS
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.naive import running_dtype, statistics_dtype


def delta_rule_chunks(
    query_MhK: Tensor,
    key_MhK: Tensor,
    value_MHV: Tensor,
    log_decay_MH: Tensor,
    beta_MH: Tensor,
    initial_nHKV: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """y [M, H, V], and the states after each document, [n, H, K, V], from those before it, in their dtype."""
    h = key_MhK.shape[1]
    value_MhW, log_decay_MhG, beta_MhG = (x.reshape(len(x), h, -1) for x in (value_MHV, log_decay_MH, beta_MH))
    initial_nhKW = initial_nHKV.unflatten(1, (h, -1)).transpose(2, 3).flatten(3)
    y_MhW, final_nhKW = _DeltaRule.apply(  # pyright: ignore[reportGeneralTypeIssues]
        query_MhK, key_MhK, value_MhW, log_decay_MhG, beta_MhG, initial_nhKW, lengths
    )
    final_nHKV = final_nhKW.unflatten(3, (-1, value_MHV.shape[-1])).transpose(2, 3).flatten(1, 2)
    return y_MhW.reshape(value_MHV.shape), final_nHKV


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query_MhK: Tensor,
        key_MhK: Tensor,
        value_MhW: Tensor,
        log_decay_MhG: Tensor,
        beta_MhG: Tensor,
        initial_nhKW: Tensor,
        lengths: Sequence[int],
    ):
        inputs = query_MhK, key_MhK, value_MhW, log_decay_MhG, beta_MhG
        y_MhW, final_nhKW, states = torch.empty_like(value_MhW), torch.empty_like(initial_nhKW), []
        ctx.sets = _sets(lengths, log_decay_MhG[0].numel(), key_MhK.device)
        for documents, groups in ctx.sets:
            state_nhKW = initial_nhKW[documents]
            for group in groups:
                some_nhKW = state_nhKW[: len(group.rows)]
                states.append(some_nhKW.clone())
                chunks = _Chunks(group, *inputs)
                chunks.scan(some_nhKW)
                group.join(y_MhW, chunks.output())
            final_nhKW[documents] = state_nhKW
        ctx.save_for_backward(*inputs, *states)
        return y_MhW, final_nhKW

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MhW: Tensor, d_final_nhKW: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, states = ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
        d_inputs, d_initial_nhKW = [torch.empty_like(x) for x in inputs], torch.empty_like(d_final_nhKW)
        for documents, groups in reversed(ctx.sets):
            d_state_nhKW = d_final_nhKW[documents]
            for group in reversed(groups):
                chunks = _Chunks(group, *inputs)
                chunks.scan(states.pop().clone())
                found = chunks.backward(group.split(dy_MhW), d_state_nhKW[: len(group.rows)])
                for d_x, part in zip(d_inputs, found, strict=True):
                    group.join(d_x, part)
            d_initial_nhKW[documents] = d_state_nhKW
        return *d_inputs, d_initial_nhKW, None


@dataclass(frozen=True)
class _Group:
    """The same chunks of some documents."""

    rows: tuple[slice, ...]
    """The tokens of each document in the flat sequence, longest documents first, [n]."""
    chunks: int
    chunk_tokens: int

    def split(self, x_MhX: Tensor) -> Tensor:
        """[c, n, h, L, X] in the statistics dtype; zeros behind the last token of a document."""
        documents = [x_MhX[row] for row in self.rows]
        x_nmhX = documents[0][None] if len(documents) == 1 else pad_sequence(documents, batch_first=True)
        missing = self.chunks * self.chunk_tokens - x_nmhX.shape[1]
        x_nmhX = pad(x_nmhX, (0, 0, 0, 0, 0, missing)) if missing else x_nmhX
        x_cnhLX = x_nmhX.unflatten(1, (self.chunks, -1)).permute(1, 0, 3, 2, 4)
        return x_cnhLX.to(statistics_dtype(x_MhX), memory_format=torch.contiguous_format).contiguous()

    def join(self, x_MhX: Tensor, x_cnhLX: Tensor) -> None:
        """Write them back into x."""
        for row, x_cLhX in zip(self.rows, x_cnhLX.permute(1, 0, 3, 2, 4), strict=True):
            tokens = x_MhX[row]
            if len(tokens) == self.chunks * self.chunk_tokens:
                tokens.unflatten(0, (self.chunks, -1)).copy_(x_cLhX)
            else:
                tokens.copy_(x_cLhX.flatten(0, 1)[: len(tokens)])


def _sets(lengths: Sequence[int], heads: int, device: torch.device) -> list[tuple[Tensor, list[_Group]]]:
    """Documents that are computed together, [n], and the groups of their chunks.

    In later groups the first of them are left: they are sorted, longest first.
    """
    elements = GROUP_ELEMENTS if device.type == "cpu" else DEVICE_GROUP_ELEMENTS
    L = min(CHUNK_TOKENS, max(lengths))
    at_once = max(1, elements // (heads * L * L))
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    starts = [0, *accumulate(lengths)]
    some, found = max(1, at_once // GROUP_CHUNKS), []
    for first in range(0, len(order), some):
        documents, groups, chunk = order[first : first + some], [], 0
        counts = [-(-lengths[n] // L) for n in documents]
        while left := sum(count > chunk for count in counts):
            last = min(counts[left - 1], chunk + max(GROUP_CHUNKS, at_once // left))
            rows = (slice(starts[n] + chunk * L, min(starts[n] + last * L, starts[n + 1])) for n in documents[:left])
            groups.append(_Group(tuple(rows), last - chunk, L))
            chunk = last
        found.append((int64_tensor(tuple(documents), device), groups))
    return found


class _Chunks:
    """The chunks of a group, with the tensors that both passes need."""

    def __init__(self, group: _Group, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor):
        self.query, self.key, self.value, self.beta = map(group.split, (query, key, value, beta))
        since_cnhLG = group.split(log_decay.to(running_dtype(key.device))).cumsum(-2)
        self.dtype, L = self.key.dtype, since_cnhLG.shape[-2]
        later_LL = since_cnhLG.new_full((L, L), -torch.inf).triu(1)
        log_cnhGL = since_cnhLG.mT
        log_cnhGLL = (log_cnhGL[..., None] - log_cnhGL[..., None, :]).add_(later_LL)
        self.decay_cnhGLL = log_cnhGLL.to(self.dtype).exp_()
        self.from_start_cnhLG = since_cnhLG.exp().to(self.dtype)
        self.to_end_cnhLG = (since_cnhLG[..., -1:, :] - since_cnhLG).exp().to(self.dtype)
        self.total_cnh1G = since_cnhLG[..., -1:, :].exp()
        self.read_cnhGLL = self.decay_cnhGLL * (self.query @ self.key.mT)[..., None, :, :]
        self.known_cnhGLL = _below_diagonal(self.decay_cnhGLL * (self.key @ self.key.mT)[..., None, :, :])

    def scan(self, state_nhKW: Tensor) -> None:
        """Solve for what is written, chunk by chunk. Changes the state to that after the group."""
        system_cnhGLL = self.known_cnhGLL * self.beta.mT[..., None, :]
        written_cnhLG = self.beta * self.to_end_cnhLG
        self.before = self.key.new_empty(len(self.key), *state_nhKW.shape)
        self.held, self.lacking = torch.empty_like(self.value), torch.empty_like(self.value)
        for i, key_nhLK in enumerate(self.key):
            self.before[i] = state_nhKW
            self.held[i] = _scaled(key_nhLK @ self.before[i], self.from_start_cnhLG[i])
            right = _heads(self.value[i] - self.held[i], self.beta)
            solved = solve_triangular(system_cnhGLL[i].mT, right.mT, upper=True, left=False, unitriangular=True).mT
            self.lacking[i] = _flat(solved)
            added = key_nhLK.mT @ _scaled(self.lacking[i], written_cnhLG[i])
            _decay(state_nhKW, self.total_cnh1G[i]).add_(added)
        self.written = _scaled(self.lacking, self.beta)

    def output(self) -> Tensor:
        """y, [c, n, h, L, W]."""
        y_cnhLW = _scaled(self.query @ self.before, self.from_start_cnhLG)
        return y_cnhLW.add_(_flat(self.read_cnhGLL @ _heads(self.written, self.beta)))

    def backward(self, dy: Tensor, d_state_nhKW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, value, log decay and β. Changes that of the state after to that before."""
        written_cnhGLV, dy_cnhGLV = _heads(self.written, self.beta), _heads(dy, self.beta)
        d_read_cnhGLL = dy_cnhGLV @ written_cnhGLV.mT
        faded_dy = _scaled(dy, self.from_start_cnhLG)
        d_written, after = _flat(self.read_cnhGLL.mT @ dy_cnhGLV), torch.empty_like(self.before)
        d_right, noted = torch.empty_like(d_written), torch.empty_like(d_written)
        d_before, system_cnhGLL = self.query.mT @ faded_dy, self.known_cnhGLL * self.beta.mT[..., None]
        factor_cnhLG = self.beta * self.from_start_cnhLG
        for i, key_nhLK in reversed(list(enumerate(self.key))):
            after[i] = d_state_nhKW
            noted[i] = _scaled(key_nhLK @ after[i], self.to_end_cnhLG[i])
            right = _heads(d_written[i] + noted[i], self.beta)
            solved = solve_triangular(system_cnhGLL[i], right.mT, upper=False, left=False, unitriangular=True).mT
            d_right[i] = _flat(solved)
            d_held = key_nhLK.mT @ _scaled(d_right[i], factor_cnhLG[i])
            _decay(d_state_nhKW, self.total_cnh1G[i]).add_(d_before[i] - d_held)
        d_beta, d_value = _dot(d_right, self.lacking, self.beta), _scaled(d_right, self.beta)
        d_known_cnhGLL = _below_diagonal(_heads(d_value, self.beta) @ written_cnhGLV.mT).neg_()
        faded_d_value = _scaled(d_value, self.from_start_cnhLG)
        d_query_cnhGLK = _heads(faded_dy, self.beta) @ _heads(self.before, self.beta).mT

        aged_cnhGLL = _below_diagonal(d_read_cnhGLL * self.read_cnhGLL + d_known_cnhGLL * self.known_cnhGLL)
        d_since = (aged_cnhGLL.sum(-1) - aged_cnhGLL.sum(-2)).mT + vecdot(self.query[..., None, :, :], d_query_cnhGLK).mT
        passed = _dot(self.written, noted, self.beta)
        d_since -= _dot(d_value, self.held, self.beta) + passed
        d_total = (self.before * after).sum(-2).unflatten(-1, (self.beta.shape[-1], -1)).sum(-1)
        d_since[..., -1, :] += passed.sum(-2) + d_total * self.total_cnh1G[..., 0, :]
        d_log_decay = d_since.to(self.total_cnh1G.dtype).flip(-2).cumsum(-2).flip(-2)

        d_read_cnhLL = (d_read_cnhGLL * self.decay_cnhGLL).sum(-3)
        d_known_cnhLL = (d_known_cnhGLL * self.decay_cnhGLL).sum(-3)
        d_query = (d_read_cnhLL @ self.key).add_(d_query_cnhGLK.sum(-3))
        d_key = (d_read_cnhLL.mT @ self.query).add_((d_known_cnhLL + d_known_cnhLL.mT) @ self.key)
        d_key -= faded_d_value @ self.before.mT
        d_key += _scaled(self.written, self.to_end_cnhLG) @ after.mT
        return d_query, d_key, d_value, d_log_decay, d_beta


def _heads(x_LW: Tensor, like_LG: Tensor) -> Tensor:
    """[…, G, L, V]."""
    return x_LW.unflatten(-1, (like_LG.shape[-1], -1)).transpose(-3, -2)


def _flat(x_GLV: Tensor) -> Tensor:
    """[…, L, W]."""
    return x_GLV.transpose(-3, -2).flatten(-2)


def _scaled(x_LW: Tensor, factor_LG: Tensor) -> Tensor:
    return (x_LW.unflatten(-1, (factor_LG.shape[-1], -1)) * factor_LG[..., None]).flatten(-2)


def _decay(state_KW: Tensor, factor_1G: Tensor) -> Tensor:
    """The state itself, changed."""
    state_KW.unflatten(-1, (factor_1G.shape[-1], -1)).mul_(factor_1G[..., None])
    return state_KW


def _dot(x_LW: Tensor, y_LW: Tensor, like_LG: Tensor) -> Tensor:
    """The sums of products over V, […, L, G]."""
    return vecdot(*(x.unflatten(-1, (like_LG.shape[-1], -1)) for x in (x_LW, y_LW)))


def _below_diagonal(x_LL: Tensor) -> Tensor:
    """x itself, whose diagonal becomes 0."""
    x_LL.diagonal(dim1=-2, dim2=-1).zero_()
    return x_LL
