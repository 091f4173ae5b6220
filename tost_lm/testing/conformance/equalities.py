"""The equalities of a token mixer, each as a generator of relative differences and where they are."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tost_lm.testing.conformance.subject import (
    BOUND,
    TOKENS,
    State,
    Subject,
    concatenate,
    cotangent,
    leaf,
    named,
    relative_difference,
    rows,
)
from tost_lm.torch_internals import pytree

Differences = Iterator[tuple[float, str]]
ROWS = 2
EPSILON = torch.finfo(torch.float64).eps
STEPS = (EPSILON**0.2, EPSILON**0.2 / 10)
SLOPE_BOUND = 1e-7


def later_tokens(subject: Subject, T: int) -> Differences:
    """Outputs before a token when it and all later tokens change, and the gradients of these tokens."""
    for B, offsets in _shapes(T):
        x_BTC = leaf(subject.tokens(B, T))
        y, _ = subject(x_BTC, offsets=offsets, output_state=False)
        for t in (1, T // 2, T - 1):
            changed = torch.cat([x_BTC[:, :t], subject.tokens(B, T - t)], 1)
            after, _ = subject(changed, offsets=offsets, output_state=False)
            yield relative_difference(after[:, :t], y[:, :t]), f"outputs before token {t}"
            (d_x,) = torch.autograd.grad(y[:, :t], x_BTC, cotangent("outputs", y[:, :t]), retain_graph=True)
            later, size = d_x[:, t:], d_x.double().norm().item()
            yield relative_difference(later, torch.zeros_like(later), size), f"gradient of tokens from {t}"


def state_in_and_out(subject: Subject, T: int) -> Differences:
    """A row cut at several places, also after one token, with and without an initial state."""
    first, second = sorted((torch.randperm(T - 3, generator=subject.generator)[:2] + 2).tolist())
    for sizes in ([first, second - first, T - second], [1, T - 1], [T - 1, 1], [T - 6, 1, 2, 3]):
        yield from _cuts(subject, T, sizes)


def single_tokens(subject: Subject, T: int) -> Differences:
    """A row token by token, with and without an initial state."""
    yield from _cuts(subject, T, [1] * T)


def packed_documents(subject: Subject, T: int) -> Differences:
    """Packed documents as separate calls: all from a state, the first two from a state, none from a state."""
    offsets = _offsets(T)
    N = len(offsets) - 1
    states = subject.states(N)
    x_1TC = subject.tokens(1, T)

    def separate(output_state: bool, x_1TC: Tensor, states: State | None) -> tuple[Tensor, State | None]:
        given = 0 if states is None else len(pytree.tree_leaves(states)[0])
        results = [
            subject(x_1TC[:, start:end], rows(states, n, n + 1) if n < given else None, output_state=output_state)
            for n, (start, end) in enumerate(pairwise(offsets))
        ]
        ys, final_states = zip(*results, strict=True)
        return torch.cat(ys, 1), concatenate(final_states) if output_state else None

    for given, output_state in ((0, False), (0, True), (2, True), (N, True)):
        initial = rows(states, 0, given) if given else None
        expected = subject.results(partial(separate, output_state), x_1TC, initial)
        found = subject.results(partial(subject, offsets=offsets, output_state=output_state), x_1TC, initial)
        yield from subject.differences(found, expected, f"{given} of {N} documents continue")


def tiles(subject: Subject, T: int) -> Differences:
    """Tiles that are computed again in the backward, from the last to the first, with detached states between them.

    Documents cross the tiles.
    """
    for B, offsets in _shapes(T):
        x_BTC = subject.tokens(B, T)
        for initial in (None, subject.states(B if offsets is None else len(offsets) - 1)):
            expected = subject.results(partial(subject, offsets=offsets), x_BTC, initial)
            for size in (3, 7):
                found = subject.results(partial(_in_tiles, subject, offsets, size), x_BTC, initial)
                yield from subject.differences(found, expected, f"tiles of {size} tokens, {_kind(offsets)}")


def finite_differences(subject: Subject, T: int) -> Differences:
    """The derivative along a random direction of each input."""
    for B, offsets in _shapes(T):
        documents = B if offsets is None else len(offsets) - 1
        x_BTC = subject.tokens(B, T)
        for initial in (None, subject.states(documents)):
            gradients = subject.results(partial(subject, offsets=offsets), x_BTC, initial)
            inputs = {TOKENS: x_BTC} | named("initial state", initial) | subject.parameters
            for name, x in inputs.items():
                if x.is_floating_point():
                    loss = partial(_loss, subject, x_BTC, initial, offsets)
                    error = _slope_error(subject, loss, x, gradients[f"gradient of {name}"])
                    yield error, f"gradient of {name}, {_kind(offsets)}"


def window(subject: Subject, T: int) -> Differences:
    """The outputs that change when one token changes: window − 1 later tokens, the last of them included."""
    size, changed_at = subject.window or 0, 2
    x_BTC = subject.tokens(ROWS, max(T, changed_at + size + 3))
    changed = x_BTC.clone()
    changed[:, changed_at] = subject.tokens(ROWS, 1)[:, 0]
    before, after = (subject(x, output_state=False)[0] for x in (x_BTC, changed))
    end = changed_at + size
    yield relative_difference(after[:, end:], before[:, end:]), f"outputs {size} and more tokens after a change"
    if relative_difference(after[:, end - 1], before[:, end - 1]) <= BOUND:
        yield math.inf, f"no output changes {size - 1} tokens after a change"


def nan_containment(subject: Subject, T: int) -> Differences:
    """Outputs and final states of other documents, and outputs of earlier tokens, when one token is NaN."""
    for B, offsets in _shapes(T):
        document = 2 if offsets else 0
        start, end = offsets[document : document + 2] if offsets else (0, T)
        x_BTC = subject.tokens(B, T)
        y, states = subject(x_BTC, offsets=offsets)
        for bad in ((start + end) // 2, end - 1):
            changed = x_BTC.clone()
            changed[0, bad] = math.nan
            after, new_states = subject(changed, offsets=offsets)
            unaffected = torch.ones(B, T, dtype=torch.bool)
            unaffected[0, bad:end] = False
            where = f"with a NaN at token {bad}, {_kind(offsets)}"
            yield relative_difference(after[unaffected], y[unaffected]), f"outputs {where}"
            found = named("final state", new_states)
            for name, x in named("final state", states).items():
                others = torch.arange(len(x)) != document
                yield relative_difference(found[name][others], x[others]), f"{name} {where}"


def _cuts(subject: Subject, T: int, sizes: Sequence[int]) -> Differences:
    x_BTC = subject.tokens(ROWS, T)

    def chained(x_BTC: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        ys = []
        for x in x_BTC.split(sizes, 1):
            y, state = subject(x, state)
            ys.append(y)
        return torch.cat(ys, 1), state

    for initial in (None, subject.states(ROWS)):
        expected, found = (subject.results(call, x_BTC, initial) for call in (subject, chained))
        cut = "one token at a time" if len(sizes) == T else f"cut into {list(sizes)}"
        yield from subject.differences(
            found, expected, f"{cut}, {'without' if initial is None else 'with'} an initial state"
        )


def _in_tiles(
    subject: Subject, offsets: list[int] | None, size: int, x_BTC: Tensor, states: State | None
) -> tuple[Tensor, State | None]:
    """The tokens of a row in tiles. The state of a document is carried to the tile that continues it."""
    T, carried, ended, ys = x_BTC.shape[1], None, [], []
    if offsets is None:
        for x in x_BTC.split(size, 1):
            y, states = _computed_again(subject, x, states, None)
            ys.append(y)
        return torch.cat(ys, 1), states
    for start in range(0, T, size):
        end = min(start + size, T)
        first, last = bisect_right(offsets, start) - 1, bisect_left(offsets, end) - 1
        inner = [offset - start for offset in offsets if start < offset < end]
        given = [] if carried is None else [carried]
        if states is not None:
            given += [rows(states, n, n + 1) for n in range(first + len(given), last + 1)]
        state = concatenate(given) if given else None
        y, after = _computed_again(subject, x_BTC[:, start:end], state, [0, *inner, end - start])
        ys.append(y)
        after = [rows(after, n, n + 1) for n in range(last - first + 1)]
        carried = None if end in offsets else after.pop()
        ended += after
    return torch.cat(ys, 1), concatenate(ended)


def _computed_again(
    subject: Subject, x_BTC: Tensor, state: State | None, offsets: list[int] | None
) -> tuple[Tensor, State | None]:
    """The call on detached inputs, computed again in the backward."""
    leaves, structure = pytree.tree_flatten(state)
    final_structure: Any = None

    def call(x_BTC: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        nonlocal final_structure
        y, final_state = subject(x_BTC, pytree.tree_unflatten(leaves, structure), offsets)
        final_leaves, final_structure = pytree.tree_flatten(final_state)
        return y, *final_leaves

    y, *final_leaves = checkpoint(call, x_BTC, *leaves, use_reentrant=True)  # pyright: ignore[reportGeneralTypeIssues]
    return y, pytree.tree_unflatten(final_leaves, final_structure)


def _loss(subject: Subject, x_BTC: Tensor, state: State | None, offsets: list[int] | None) -> tuple[float, float]:
    """The sum over outputs and final states that `Subject.results` differentiates, and the sum of absolute values."""
    y, final_state = subject(x_BTC, state, offsets)
    outputs = {"outputs": y} | named("final state", final_state)
    terms = [x.double() * cotangent(name, x).double() for name, x in outputs.items() if x.is_floating_point()]
    return sum(x.sum().item() for x in terms), sum(x.abs().sum().item() for x in terms)


@torch.no_grad()
def _slope_error(subject: Subject, loss: Callable[[], tuple[float, float]], x: Tensor, gradient: Tensor) -> float:
    """The gradient along a direction against a difference of fourth order. Each number moves in proportion to itself.

    The step ε^(1/5) balances truncation and rounding; where derivatives are steep, a smaller one is closer. The
    closest counts, as a wrong gradient is close to none.
    """
    start, direction = x.clone(), x * subject.draw(*x.shape)
    terms, errors = gradient * direction, []
    for step in STEPS:
        values = []
        for factor in (-2, -1, 1, 2):
            x.copy_(start + factor * step * direction)
            values.append(loss())
        (lowest, size), (low, _), (high, _), (highest, _) = values
        slope = (8 * (high - low) - (highest - lowest)) / (12 * step)
        rounding = EPSILON * size / step / SLOPE_BOUND
        difference = abs(slope - terms.sum().item())
        errors.append(
            difference / max(terms.norm().item(), abs(slope), rounding) if difference < math.inf else math.inf
        )
    x.copy_(start)
    return min(errors)


def _shapes(T: int) -> list[tuple[int, list[int] | None]]:
    """Rows, and packed documents: B, and the offsets of documents."""
    return [(ROWS, None), (1, _offsets(T))]


def _offsets(T: int) -> list[int]:
    """Documents of 3, 1, T − 12, 2 and 6 tokens."""
    return [0, *accumulate((3, 1, T - 12, 2, 6))]


def _kind(offsets: list[int] | None) -> str:
    return "rows" if offsets is None else "packed documents"
