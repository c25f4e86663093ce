import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.errors import PlanError
from rlayout.spec.layout import Layout, Placement, Rank

LAYOUTS = st.builds(Layout, dp=st.integers(1, 5), tp=st.integers(1, 5), pp=st.integers(1, 5))


@given(LAYOUTS)
def test_short_form_and_back(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [("d4", Layout(dp=4)), ("t2", Layout(tp=2)), ("d1p3", Layout(pp=3)), ("d2t3p4", Layout(dp=2, tp=3, pp=4))],
)
def test_short_forms(text, layout):
    assert Layout.parse(text) == layout


@pytest.mark.parametrize("text", ["", "d0", "2", "d-1", "p2t2", "d2 t2", "d2x", "D2", "d2t", "d01"])
def test_other_texts_are_refused(text):
    with pytest.raises(PlanError, match="for instance d2, d1t2 or d2t2p3"):
        Layout.parse(text)


@given(LAYOUTS)
def test_ranks_number_the_devices(layout):
    ranks = [layout.rank(i) for i in range(layout.num_devices)]
    assert [layout.index(rank) for rank in ranks] == list(range(layout.num_devices))
    assert len(set(ranks)) == layout.num_devices


def test_neighbours_are_tensor_ranks():
    assert [Layout(dp=2, tp=2, pp=2).rank(i) for i in (1, 2, 4)] == [
        Rank(0, 0, 1),
        Rank(0, 1, 0),
        Rank(1, 0, 0),
    ]


def test_rank_of_a_device():
    placement = Placement((7, 3), Layout(tp=2), 1)
    assert placement.rank_of(3) == Rank(0, 0, 1)
    assert placement.rank_of(4) is None


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"layout d1t2 needs 2 devices, but the mesh \[0, 1, 2\] has 3"):
        Placement((0, 1, 2), Layout(tp=2), 1)
