"""Collectives of all ranks beside each other: groups of a layout, planted mismatches by name, loops."""

import pytest

from tost_lm.pretrain.execute import AXES, ExecutedClass, Message, RankLayout, in_loops, mismatch

LAYOUT = RankLayout(tensor=2, sequence=3, world=12)
GATHER, SCATTER = Message("all-gather", "sequence", 64), Message("reduce-scatter", "tensor", 256)
# Columns 2, 1 and 1 of 4: first each rank sends its row, then its columns of the results of all.
COLUMNS = (2, 1, 1)
OWN = [(columns,) * 3 for columns in COLUMNS]
EXCHANGED = [
    (
        Message("all-to-all", "sequence", 16, (COLUMNS, own)),
        Message("all-to-all", "sequence", 4 * sum(own), (own, COLUMNS)),
    )
    for own in OWN
]


def on_all_ranks(*sequences: tuple[Message, ...]) -> list[ExecutedClass]:
    """By sequence rank."""
    ranks = [tuple(rank for rank in range(12) if LAYOUT.coordinates(rank)[1] == place) for place in range(3)]
    return [ExecutedClass(of, messages, {}) for of, messages in zip(ranks, sequences, strict=True)]


def test_groups_of_each_axis_are_disjoint_and_cover_all_ranks():
    assert [LAYOUT.coordinates(rank) for rank in (0, 1, 2, 6, 11)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 2, 1),
    ]  # fmt: skip
    for axis in AXES:
        assert sorted(rank for group in LAYOUT.groups(axis) for rank in group) == list(range(12))
        assert all(LAYOUT.group(axis, rank) == group for group in LAYOUT.groups(axis) for rank in group)
    assert list(LAYOUT.group("sequence", 7)) == [7, 9, 11]
    assert list(LAYOUT.group("replicas", 7)) == [1, 3, 5, 7, 9, 11]
    assert LAYOUT.axis_of((7, 9, 11), 7) == "sequence"


def test_equal_sequences_match_whatever_the_order_between_groups():
    assert mismatch(on_all_ranks(*[(GATHER, SCATTER)] * 3), LAYOUT) is None
    assert mismatch(on_all_ranks((SCATTER, GATHER), *[(GATHER, SCATTER)] * 2), LAYOUT) is None
    assert mismatch(on_all_ranks(*EXCHANGED), LAYOUT) is None


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ((GATHER, GATHER._replace(bytes=65)), "collective 2 is all-gather over sequence of 64 bytes on rank 0, "
         "all-gather over sequence of 65 bytes on rank 4"),
        ((GATHER,), "collective 2 is all-gather over sequence of 64 bytes on rank 0, missing on rank 4"),
        ((GATHER, GATHER, GATHER), "collective 3 is missing on rank 0, all-gather over sequence of 64 bytes on rank 4"),
        ((GATHER._replace(kind="barrier"), GATHER), "collective 1 is all-gather over sequence of 64 bytes on rank 0, "
         "barrier over sequence of 64 bytes on rank 4"),
    ],
)  # fmt: skip
def test_a_planted_mismatch_is_named_with_its_group_place_and_ranks(planted: tuple[Message, ...], named: str):
    found = mismatch(on_all_ranks((GATHER, GATHER), (GATHER, GATHER), planted), LAYOUT)
    assert found == f"sequence group of ranks 0, 2, 4: {named}"


def test_rows_that_no_rank_expects_are_named():
    first, second = EXCHANGED[2]
    wrong = first, second._replace(rows=((2, 2, 2), COLUMNS), bytes=24)
    found = mismatch(on_all_ranks(*EXCHANGED[:2], wrong), LAYOUT)
    assert found is not None
    assert found.startswith("sequence group of ranks 0, 2, 4: collective 2 is all-to-all over sequence of 24 bytes")
    assert "on rank 0" in found or "on rank 4" in found


def test_a_mismatch_among_data_ranks_only():
    """Sequence groups are right by themselves."""
    equal, sum_of = GATHER, Message("all-reduce", "replicas", 400)
    classes = [
        ExecutedClass(tuple(range(6)), (equal, sum_of), {}),
        ExecutedClass(tuple(range(6, 12)), (equal, sum_of._replace(bytes=404)), {}),
    ]
    found = mismatch(classes, LAYOUT)
    assert found == (
        "replicas group of ranks 0, 2, 4, 6, 8, 10: collective 1 is all-reduce over replicas of 400 bytes on rank 0, "
        "all-reduce over replicas of 404 bytes on rank 6"
    )


def test_loops_are_the_same_sequence():
    sequence = [SCATTER, *[GATHER, SCATTER, SCATTER] * 4, GATHER, *[GATHER._replace(bytes=1)] * 3]
    loops = in_loops(sequence)
    assert [message for times, body in loops for message in body * times] == sequence
    assert [(times, len(body)) for times, body in loops] == [(4, 3), (1, 1), (1, 1), (3, 1)]
