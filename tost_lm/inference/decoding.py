"""Decoding: one token of each row per call, in a state of fixed memory, on a GPU as one CUDA graph.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tost_lm.mixers.layer import room_after
from tost_lm.mixers.registry import mixer_class
from tost_lm.model import LMState, TostLM
from tost_lm.model.block import FixedState, LMOutput
from tost_lm.model.streaming import to_running_dtype
from tost_lm.ops.layout import to_device

WARM_UP_STEPS = 8
"""Steps before the first capture, which takes the time of a few."""


def decoder(model: Callable[..., LMOutput], state: LMState) -> Callable[[Tensor], Tensor]:
    """Decoding after `state`, which does not change. It is called with the next token of each row, int64 [B], and
    returns the logits after it, [B, V], which the next call may overwrite.

    It is a `Decoder` for a `TostLM` whose mixers all have `FIXED_STATE`; else it calls the model as usual.
    """
    if isinstance(model, TostLM) and all(mixer_class(letter).FIXED_STATE for letter in model.config.letters):
        return Decoder(model, state)

    def step(next_B: Tensor) -> Tensor:
        nonlocal state
        output = model(next_B[:, None], state=state)
        assert output.state is not None
        state = output.state
        return output.logits[:, -1]

    return step


class Decoder:
    """Decoding in place: see `decoder`.

    On a GPU, the first steps run in the stream of the capture, where they fill caches and tune kernels. Then one is
    captured, and later ones replay the graph. With full attention, a graph serves until the memory of keys is full.
    """

    @torch.inference_mode(False)  # steps may update the tensors in and outside of this mode
    @torch.no_grad()
    def __init__(self, model: TostLM, state: LMState):
        running = to_running_dtype(state)
        assert running is not None
        mixers: Any = (block.mixer for block in model.blocks)
        pairs = zip(mixers, running.layers, strict=True)
        layers = [mixer.fixed_state(layer, state.positions) for mixer, layer in pairs]
        position_B = to_device(torch.tensor(state.positions), model.embedding.weight.device)
        self._model, self._state = model, FixedState(layers, position_B)
        self._token_B1 = torch.zeros_like(position_B)[:, None]
        self._logits_BV: Tensor | None = None
        self._tokens, self._kept = max(state.positions), model.config.kept_tokens
        self._room = room_after(self._tokens, self._kept)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm_up = WARM_UP_STEPS

    @torch.no_grad()
    def __call__(self, next_B: Tensor) -> Tensor:
        """Raises ConfigError if rows are longer than the model's positions."""
        if self._tokens == self._room != self._kept:
            self._make_room()
        self._tokens += 1
        self._model.check_length(self._tokens)
        self._token_B1.copy_(next_B[:, None])
        if self._token_B1.is_cuda:
            self._step_on_gpu()
        else:
            self._step()
        assert self._logits_BV is not None
        return self._logits_BV

    def _step(self) -> None:
        self._logits_BV = self._model(self._token_B1, state=self._state).logits[:, -1]

    def _step_on_gpu(self) -> None:
        current, stream = torch.cuda.current_stream(self._token_B1.device), _capture_stream(self._token_B1.device)
        if self._graph is None and self._warm_up > 0:
            self._warm_up -= 1
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._step()
            current.wait_stream(stream)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._step()
        self._graph.replay()

    @torch.inference_mode(False)
    def _make_room(self) -> None:
        self._graph, self._warm_up = None, max(1, self._warm_up)
        self._state.make_room(self._kept)
        self._room = room_after(self._tokens, self._kept)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all decoders: `tost_lm.ops.layout` keeps tensors for each stream."""
    return torch.cuda.Stream(device)
