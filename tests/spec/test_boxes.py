import itertools

from hypothesis import given
from hypothesis import strategies as st

from rlayout.spec.boxes import Box, intersect, numel, whole

SPAN = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda span: span[0] < span[1])


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[SPAN] * n)] * 2)))
def test_intersection_is_that_of_the_sets_of_elements(boxes: tuple[Box, Box]):
    left, right = boxes
    common = intersect(left, right)
    assert (elements(common) if common is not None else set()) == elements(left) & elements(right)
    assert numel(left) == len(elements(left))


def test_whole():
    assert whole((2, 3)) == ((0, 2), (0, 3))
    assert whole(()) == ()
    assert numel(()) == 1
    assert intersect((), ()) == ()
