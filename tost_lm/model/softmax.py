"""The softmax mixer: causal attention, full or in a sliding window, with rotary embedding and a cache for decoding."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.model.attention import causal_attention
from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import Places, rotate


class KeyValueState(NamedTuple):
    """Keys (turned by their positions) and values of earlier tokens, each [N, H, S, D]: all of them, or with a window
    the last window − 1. Rows of fewer tokens stand on the right, behind zeros."""

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
        self, x_BTC: Tensor, state: KeyValueState | None, places: Places
    ) -> tuple[Tensor, KeyValueState | None]:
        """Attend to the tokens of the document so far, those of `state` and these."""
        q, k, v = self.in_proj(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if places.turn is not None:
            q, k = rotate(q, places.turn), rotate(k, places.turn)
        if places.shard is not None:
            # Queries stay; the keys and values of all ranks come here, both in one exchange.
            k, v = places.shard.gather(torch.cat([k, v], -1)).chunk(2, -1)
        attend = self._attend_rows if places.cu_seqlens is None else self._attend_packed
        y_BHTD, state = attend(q, k, v, state, places)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2)), state

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, places: Places
    ) -> tuple[Tensor, KeyValueState | None]:
        pieces = places.pieces
        later = pieces.whole_lengths[0] - pieces.before[0] - q.shape[2]
        if state is not None:
            k, v = _after(state, max(places.starts), k, v)
        before_B = places.position[:, 0] if places.position.dim() == 2 else None
        y = causal_attention(q, _without_last(k, later), _without_last(v, later), self.window, before_B)
        return y, KeyValueState(self._kept(k), self._kept(v)) if places.output_state else None

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, places: Places
    ) -> tuple[Tensor, KeyValueState | None]:
        pieces = places.pieces
        keys, values = list(k.split(pieces.whole_lengths, 2)), list(v.split(pieces.whole_lengths, 2))
        if state is not None:
            for n, start in enumerate(places.starts[: len(state.key)]):
                row = KeyValueState(state.key[n : n + 1], state.value[n : n + 1])
                keys[n], values[n] = _after(row, start, keys[n], values[n])
        here = pieces.documents
        ys = []
        for q_n, k_n, v_n, whole, before in zip(
            q.split(pieces.lengths, 2), keys[here], values[here], pieces.whole_lengths[here], pieces.before, strict=True
        ):
            later = whole - before - q_n.shape[2]
            ys.append(causal_attention(q_n, _without_last(k_n, later), _without_last(v_n, later), self.window))
        if not places.output_state:
            return torch.cat(ys, 2), None
        wanted = slice(-1, None) if places.output_state == "last" else slice(None)
        kept = (_on_the_right([self._kept(x) for x in rows[wanted]]) for rows in (keys, values))
        return torch.cat(ys, 2), KeyValueState(*kept)

    def _kept(self, x_BHSD: Tensor) -> Tensor:
        """What later tokens can see, without holding what it is a part of: tokens that none sees, or the queries."""
        dropped = x_BHSD.shape[2] - (self.window - 1)
        if self.window and dropped > 0:
            return x_BHSD[:, :, dropped:].clone()
        return x_BHSD if x_BHSD.requires_grad else x_BHSD.contiguous()


def _without_last(x_BHSD: Tensor, tokens: int) -> Tensor:
    """Without those of later ranks."""
    return x_BHSD[:, :, : x_BHSD.shape[2] - tokens] if tokens else x_BHSD


def _after(state: KeyValueState, tokens: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values after those of `state`, without what fills up on the left where no row had more `tokens`."""
    skip = max(0, state.key.shape[2] - tokens)
    return torch.cat([state.key[:, :, skip:], k], 2), torch.cat([state.value[:, :, skip:], v], 2)


def _on_the_right(rows: list[Tensor]) -> Tensor:
    S = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, S - row.shape[2], 0)) for row in rows])
