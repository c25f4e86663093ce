"""Joining the pieces of a step into the batch that a call reads."""

from __future__ import annotations

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.errors import DataError
from rlayout.runtime.store import Piece, Rows, Store, assemble

PROMPTS = Batch(
    ids=(7, 8),
    groups=(7, 8),
    lengths=torch.tensor([2, 1]),
    tokens={"prompt_tokens": torch.tensor([1, 2, 3])},
    rows={"problem": ("seven", "eight")},
)


def samples(ids: tuple[int, ...]) -> Batch:
    lengths = torch.tensor([i % 3 + 1 for i in ids])
    return Batch(
        ids=ids,
        groups=tuple(i // 2 for i in ids),
        lengths=lengths,
        tokens={"tokens": torch.cat([torch.full((int(n),), i) for i, n in zip(ids, lengths, strict=True)])},
    )


def store_of(*batches: Batch) -> Store:
    store = Store()
    for batch in batches:
        store.add(Piece(Rows.of(batch), batch.keys, batch))
    return store


def test_a_call_over_prompts_and_samples_works_on_samples() -> None:
    store = store_of(PROMPTS, samples((16, 14)), samples((15, 17)))
    rows = store.rows_of(("tokens", "problem"))
    assert rows == Rows((14, 15, 16, 17), (7, 7, 8, 8), (3, 1, 2, 3))
    assert store.rows_of(("problem",)).ids == (7, 8)


def test_only_the_pieces_that_hold_a_wanted_row_travel() -> None:
    store = store_of(PROMPTS, samples((14, 15)), samples((16, 17)))
    rows = store.rows_of(("tokens", "problem"))
    pieces = store.pieces_for(rows, [16], ("tokens", "problem"))
    assert [p.rows.ids for p in pieces] == [(7, 8), (16, 17)]
    assert [p.rows.ids for p in store.pieces_for(rows, [14], ("tokens",))] == [(14, 15)]


def test_assemble_orders_rows_and_takes_the_prompt_s_value_for_its_samples() -> None:
    rewards = Batch((15, 16), (7, 8), torch.tensor([1, 2]), rows={"rewards": torch.tensor([0.5, 0.25])})
    pieces = [rewards, PROMPTS, samples((14, 16)), samples((15, 17))]
    batch = assemble(pieces, [16, 15], [8, 7], ("problem", "tokens", "rewards"))
    assert batch.ids == (16, 15)
    assert batch.groups == (8, 7)
    assert batch.tokens["tokens"].tolist() == [16, 16, 15]
    assert batch.lengths.tolist() == [2, 1]
    assert batch.rows["problem"] == ("eight", "seven")
    assert torch.as_tensor(batch.rows["rewards"]).tolist() == [0.25, 0.5]


def test_a_missing_key_or_row_is_named() -> None:
    with pytest.raises(DataError, match="'rewards' has not been produced"):
        store_of(PROMPTS).rows_of(("rewards",))
    with pytest.raises(DataError, match="'rewards' is in none of the 1 pieces"):
        assemble([PROMPTS], [7], [7], ("rewards",))
    with pytest.raises(DataError, match="'problem' has no value for row 9"):
        assemble([PROMPTS], [18], [9], ("problem",))
