"""The softmax mixer: causal attention, full or in a sliding window, with rotary embedding and a cache for decoding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.model.attention import causal_attention
from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import SequenceInfo, apply_rotary


class KeyValueState(NamedTuple):
    """Keys (after the rotary embedding) and values of earlier tokens, each [N, H, S, D]: of all tokens, or with a
    window of the last window − 1. Rows with fewer tokens are padded with zeros on the left."""

    key: Tensor
    value: Tensor


class SoftmaxMixer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.window = config.window
        self.in_proj = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(
        self, x_BTC: Tensor, state: KeyValueState | None, info: SequenceInfo
    ) -> tuple[Tensor, KeyValueState | None]:
        """Attend to the earlier tokens of the document (in `state`) and to these."""
        q, k, v = self.in_proj(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if info.rotary is not None:
            q, k = apply_rotary(q, info.rotary), apply_rotary(k, info.rotary)
        if info.shard is not None:
            # Each rank keeps its queries and gathers the keys and values of all ranks, in one exchange.
            k, v = info.shard.gather(torch.cat([k, v], -1)).chunk(2, -1)
        attend = self._attend_rows if info.cu_seqlens is None else self._attend_packed
        y_BHTD, state = attend(q, k, v, state, info)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2)), state

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, info: SequenceInfo
    ) -> tuple[Tensor, KeyValueState | None]:
        local = info.local
        later = local.whole_lengths[0] - local.before[0] - q.shape[2]
        if state is not None:
            k, v = _append(state, max(info.start_positions), k, v)
        before_B = info.position[:, 0] if info.position.dim() == 2 else None
        y = causal_attention(q, _without_last(k, later), _without_last(v, later), self.window, before_B)
        return y, KeyValueState(self._in_window(k), self._in_window(v)) if info.output_state else None

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, info: SequenceInfo
    ) -> tuple[Tensor, KeyValueState | None]:
        local = info.local
        keys, values = list(k.split(local.whole_lengths, 2)), list(v.split(local.whole_lengths, 2))
        if state is not None:
            for n, start in enumerate(info.start_positions[: len(state.key)]):
                row = KeyValueState(state.key[n : n + 1], state.value[n : n + 1])
                keys[n], values[n] = _append(row, start, keys[n], values[n])
        here = local.documents
        ys = []
        for q_n, k_n, v_n, whole, before in zip(
            q.split(local.lengths, 2), keys[here], values[here], local.whole_lengths[here], local.before, strict=True
        ):
            later = whole - before - q_n.shape[2]
            ys.append(causal_attention(q_n, _without_last(k_n, later), _without_last(v_n, later), self.window))
        if not info.output_state:
            return torch.cat(ys, 2), None
        documents = slice(-1, None) if info.output_state == "last" else slice(None)
        states = (_right_aligned([self._in_window(x) for x in rows[documents]]) for rows in (keys, values))
        return torch.cat(ys, 2), KeyValueState(*states)

    def _in_window(self, x_BHSD: Tensor) -> Tensor:
        """The keys or values that later tokens attend to, copied so that the memory of the others can be freed."""
        dropped = x_BHSD.shape[2] - (self.window - 1)
        if self.window and dropped > 0:
            return x_BHSD[:, :, dropped:].clone()
        return x_BHSD if x_BHSD.requires_grad else x_BHSD.contiguous()


def _without_last(x_BHSD: Tensor, tokens: int) -> Tensor:
    """Without the tokens of later ranks."""
    return x_BHSD[:, :, : x_BHSD.shape[2] - tokens] if tokens else x_BHSD


def _append(state: KeyValueState, tokens: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append keys and values to those of `state`, without its padding if no row has more than `tokens` tokens."""
    skip = max(0, state.key.shape[2] - tokens)
    return torch.cat([state.key[:, :, skip:], k], 2), torch.cat([state.value[:, :, skip:], v], 2)


def _right_aligned(rows: list[Tensor]) -> Tensor:
    S = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, S - row.shape[2], 0)) for row in rows])
