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

    def forward(self, x_BTC: Tensor, state: KeyValueState | None, places: Places) -> tuple[Tensor, KeyValueState]:
        """Attend to the tokens of the document so far, those of `state` and these."""
        q, k, v = self.in_proj(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if places.turn is not None:
            q, k = rotate(q, places.turn), rotate(k, places.turn)
        attend = self._attend_rows if places.cu_seqlens is None else self._attend_packed
        y_BHTD, state = attend(q, k, v, state, places)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2)), state

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, places: Places
    ) -> tuple[Tensor, KeyValueState]:
        if state is not None:
            k, v = _after(state, max(places.starts), k, v)
        before_B = places.position[:, 0] if places.position.dim() == 2 else None
        return causal_attention(q, k, v, self.window, before_B), KeyValueState(self._kept(k), self._kept(v))

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None, places: Places
    ) -> tuple[Tensor, KeyValueState]:
        ys, keys, values = [], [], []
        documents = zip(*(x.split(places.lengths, 2) for x in (q, k, v)), strict=True)
        for n, (q_n, k_n, v_n) in enumerate(documents):
            if state is not None:
                row = KeyValueState(state.key[n : n + 1], state.value[n : n + 1])
                k_n, v_n = _after(row, places.starts[n], k_n, v_n)
            ys.append(causal_attention(q_n, k_n, v_n, self.window))
            keys.append(self._kept(k_n))
            values.append(self._kept(v_n))
        return torch.cat(ys, 2), KeyValueState(_on_the_right(keys), _on_the_right(values))

    def _kept(self, x_BHSD: Tensor) -> Tensor:
        """What later tokens can see, without holding what it is a part of: tokens that none sees, or the queries."""
        dropped = x_BHSD.shape[2] - (self.window - 1)
        if self.window and dropped > 0:
            return x_BHSD[:, :, dropped:].clone()
        return x_BHSD if x_BHSD.requires_grad else x_BHSD.contiguous()


def _after(state: KeyValueState, tokens: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values after those of `state`, without what fills up on the left where no row had more `tokens`."""
    skip = max(0, state.key.shape[2] - tokens)
    return torch.cat([state.key[:, :, skip:], k], 2), torch.cat([state.value[:, :, skip:], v], 2)


def _on_the_right(rows: list[Tensor]) -> Tensor:
    S = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, S - row.shape[2], 0)) for row in rows])
