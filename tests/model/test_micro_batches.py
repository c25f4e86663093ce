from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from rlayout.model.micro_batches import cost, split

ROWS = st.lists(st.integers(1, 300), max_size=60)
BOUND = st.integers(1, 600)


@given(ROWS, BOUND)
@example([], 1)
@example([5], 4)
def test_is_a_partition(lengths: list[int], max_tokens: int) -> None:
    assert sorted(i for part in split(lengths, max_tokens) for i in part) == list(range(len(lengths)))
    assert all(split(lengths, max_tokens))


@given(ROWS, BOUND)
def test_keeps_the_bound_except_for_a_single_longer_row(lengths: list[int], max_tokens: int) -> None:
    for part in split(lengths, max_tokens):
        assert len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens


@given(ROWS, BOUND)
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], max_tokens: int) -> None:
    sizes = sorted(sum(lengths[i] for i in part) for part in split(lengths, max_tokens))
    # Balanced runs may all be half full, but then there are no more of them than first-fit decreasing needs,
    # which itself never leaves two bins that fit together: more than half of the room is used on average.
    assert len(sizes) <= 1 or sum(sizes) * 2 > max_tokens * (len(sizes) - 1)


@given(ROWS, BOUND)
def test_same_rows_same_split(lengths: list[int], max_tokens: int) -> None:
    assert split(lengths, max_tokens) == split(tuple(lengths), max_tokens)


@given(ROWS, BOUND)
def test_rows_of_a_micro_batch_are_sorted(lengths: list[int], max_tokens: int) -> None:
    for part in split(lengths, max_tokens):
        assert [lengths[i] for i in part] == sorted(lengths[i] for i in part)


@given(ROWS, BOUND, st.integers(1, 5), st.randoms(use_true_random=False))
def test_shared_tokens_count_once_in_a_micro_batch(
    own: list[int], max_tokens: int, num_groups: int, random: Random
) -> None:
    prompts = [random.choice([0, 5, 80]) for _ in range(num_groups)]
    groups = [random.randrange(num_groups) for _ in own]
    shared = [prompts[group] for group in groups]
    lengths = [prompt + length for prompt, length in zip(shared, own, strict=True)]
    parts = split(lengths, max_tokens, groups=groups, shared=shared)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        computed = sum(own[i] for i in part) + sum(prompts[group] for group in {groups[i] for i in part})
        assert len(part) == 1 or computed <= max_tokens


def test_rows_that_share_stay_together() -> None:
    lengths = [110, 120, 130, 110, 120, 130]
    parts = split(lengths, 160, groups=[0, 1, 0, 1, 0, 1], shared=[100] * 6)
    assert sorted(sorted(part) for part in parts) == [[0, 2, 4], [1, 3, 5]]


def test_fewest_where_sorted_runs_need_more() -> None:
    # Sorted runs of at most 10: [1 2 3], [7], [8], [9] are four.
    assert len(split([9, 1, 8, 2, 7, 3], 10)) == 3


def test_similar_lengths_meet() -> None:
    assert split([100, 10, 90, 11, 95, 12], 300) == [[1, 3, 5, 2], [4, 0]] or split(
        [100, 10, 90, 11, 95, 12], 300
    ) == [[1, 3, 5], [2, 4, 0]]


def test_balanced() -> None:
    parts = split([10] * 12, 70)
    assert [len(part) for part in parts] == [6, 6]


def test_a_long_row_is_dearer_than_its_tokens() -> None:
    assert cost(8192) == 2 * 8192
