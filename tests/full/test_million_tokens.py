"""2^20 tokens in one call."""

from agreement import assert_long_sequence_is_right


def test_a_million_tokens_in_one_call():
    assert_long_sequence_is_right(1 << 20)
