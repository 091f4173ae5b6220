"""Hypothesis's strategy of random calls of the operator."""

from agreement import Call, draw_call
from hypothesis import strategies as st


@st.composite
def calls(draw: st.DrawFn, longest: int = 80) -> Call:
    """T = 1, odd T, odd H and D; documents of one token, shorter and longer than a chunk of 32 tokens."""
    lengths = draw(st.lists(st.sampled_from([1, 1, 2, 5, 16, 31, 32, 33, 48, 65, longest]), min_size=1, max_size=6))
    packed = draw(st.booleans())
    if not packed:
        lengths = lengths[:1] * min(len(lengths), 3)
    H, D = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    return draw_call(draw(st.integers(0, 999)), tuple(lengths), H, D, packed=packed, fresh=draw(st.booleans()))
