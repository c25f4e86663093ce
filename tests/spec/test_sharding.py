"""Which part of a model a device holds."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.errors import PlanError
from rlayout.spec.boxes import intersect, numel, whole
from rlayout.spec.layout import Layout
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import Unit, parameters
from rlayout.spec.sharding import Part, check, divide, part_of, shares, stages, whole_model

SMOLLM2 = ModelShape(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    tie_embeddings=True,
)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads, per_kv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return ModelShape(
        family="llama",
        vocab_size=draw(st.integers(1, 60)),
        hidden_size=8,
        intermediate_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 8)),
        num_heads=kv_heads * per_kv,
        num_kv_heads=kv_heads,
        head_dim=2,
        max_positions=8,
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Layout]:
    shape = draw(shapes())
    most = min(shape.num_heads, shape.intermediate_size, shape.vocab_size)
    return shape, Layout(tp=draw(st.integers(1, most)), pp=draw(st.integers(1, shape.num_layers)))


def parts_of(shape: ModelShape, layout: Layout) -> list[Part]:
    return [part_of(shape, layout, layout.rank(i)) for i in range(layout.num_devices)]


@given(cases())
def test_parts_cover_the_model_and_are_equal_or_disjoint(case):
    shape, layout = case
    check(shape, layout)
    parts = parts_of(shape, layout)
    for parameter in parameters(shape):
        boxes = {box for part in parts if (box := part.box(parameter)) is not None}
        assert sum(numel(box) for box in boxes) == parameter.numel
        assert not any(intersect(a, b) for a, b in itertools.combinations(boxes, 2))


@given(cases())
def test_every_rank_has_work_and_query_heads_stay_with_their_keys(case):
    shape, layout = case
    for part in parts_of(shape, layout):
        (first, after), (key, key_after) = part.units(Unit.QUERY_HEAD), part.units(Unit.KV_HEAD)
        assert first < after
        assert {head // shape.queries_per_kv for head in range(first, after)} == set(range(key, key_after))
        assert part.layers[0] < part.layers[1]
        assert all(start < stop for start, stop in (part.units(Unit.INNER), part.units(Unit.WORD)))


@given(cases())
def test_stages_follow_each_other(case):
    shape, layout = case
    ranges = stages(shape, layout.pp)
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(range(shape.num_layers))


def test_smollm2_over_two_and_four_tensor_ranks():
    def heads(tp: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        parts = parts_of(SMOLLM2, Layout(tp=tp))
        return [(part.units(Unit.QUERY_HEAD), part.units(Unit.KV_HEAD)) for part in parts]

    assert heads(2) == [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    # one key-value head is held twice
    assert heads(4) == [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))]


def test_boxes_by_hand():
    table = {p.name: p for p in parameters(SMOLLM2)}
    first, last = (part_of(SMOLLM2, Layout(tp=2, pp=2), Layout(tp=2, pp=2).rank(i)) for i in (0, 3))
    assert first.box(table["layers.0.attention.k.weight"]) == ((0, 128), (0, 576))
    assert first.box(table["layers.0.attention.output.weight"]) == ((0, 576), (0, 384))
    assert first.box(table["layers.29.mlp.up.weight"]) is None
    assert first.box(table["norm.weight"]) is None
    assert last.box(table["norm.weight"]) == ((0, 576),)
    assert last.box(table["layers.29.mlp.down.weight"]) == ((0, 576), (768, 1536))
    # tied: the last stage needs the embedding as its head
    assert last.box(table["embedding.weight"]) == ((24576, 49152), (0, 576))


def test_the_head_counts_when_stages_are_balanced():
    # SmolLM2's head costs as much as eight layers
    assert stages(SMOLLM2, 2) == ((0, 19), (19, 30))
    assert stages(SMOLLM2, 1) == ((0, 30),)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_the_largest_range_is_the_least_possible(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    found = divide(costs, parts)
    assert [i for a, b in found for i in range(a, b)] == list(range(len(costs)))
    assert len(found) == parts
    assert all(a < b for a, b in found)
    assert max(sum(costs[a:b]) for a, b in found) == best


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_differ_by_one_at_most(count, parts):
    sizes = [stop - start for start, stop in shares(count, parts)]
    assert sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_a_whole_model_holds_everything():
    part = whole_model(SMOLLM2)
    assert all(part.box(p) == whole(p.shape) for p in parameters(SMOLLM2))
    assert Counter(part.first for part in parts_of(SMOLLM2, Layout(pp=3))) == {True: 1, False: 2}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(tp=10),
            "tp 10 is more than the model's 9 parts of this kind: query head. The nearest possible is tp 9",
        ),
        (Layout(pp=31), "pp 31 is more than the model's 30 layers. The nearest possible is pp 30"),
    ],
)
def test_impossible_layouts_are_refused(layout, message):
    with pytest.raises(PlanError, match=message):
        check(SMOLLM2, layout)
