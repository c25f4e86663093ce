"""Rows of one prompt compute it once, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.model.scoring import divide, score
from rlayout.model.sharing import share, shared_lengths
from tests.model.test_scoring import plain_scores
from tests.model.tiny import SHAPE, random_batch, tiny_model


def answers(prompts: dict[int, int], lengths: list[tuple[int, int]]) -> Batch:
    """Rows (group, answer length); the group's prompt has ``prompts[group]`` tokens."""
    generator = torch.Generator().manual_seed(0)
    heads = {group: torch.randint(61, (n,), generator=generator) for group, n in prompts.items()}
    tokens = [
        torch.cat([heads[group], torch.randint(61, (length,), generator=generator)])
        for group, length in lengths
    ]
    masks = [torch.arange(prompts[g] + n) >= prompts[g] for g, n in lengths]
    return Batch(
        ids=tuple(range(len(lengths))),
        groups=tuple(group for group, _ in lengths),
        lengths=torch.tensor([len(row) for row in tokens]),
        tokens={"tokens": torch.cat(tokens), "mask": torch.cat(masks)},
    )


MIXED = answers(
    {7: 5, 3: 9, 4: 1, 5: 5}, [(3, 4), (7, 2), (4, 6), (7, 2), (3, 1), (7, 9), (4, 3), (5, 8), (3, 4)]
)


def test_every_token_is_computed_in_its_place() -> None:
    sharing = share(MIXED)
    tokens = MIXED.tokens["tokens"]
    assert torch.equal(tokens[sharing.tokens][sharing.places], tokens)
    # 4 + 1 + 4 own tokens of group 3 and its prompt, and so on; group 5 has one row.
    assert len(sharing.tokens) == (9 + 9) + (5 + 13) + (1 + 9) + (5 + 8)
    assert sharing.lengths.sum() == len(sharing.tokens)


def test_continued_sequences_restore_the_rows() -> None:
    sharing, tokens = share(MIXED), MIXED.tokens["tokens"]
    pieces = tokens[sharing.tokens].split(sharing.lengths.tolist())
    whole = [
        torch.cat([pieces[parent], piece]) if parent >= 0 else piece
        for piece, parent in zip(pieces, sharing.parents, strict=True)
    ]
    rows = sorted(row.tolist() for row in MIXED.per_row("tokens"))
    assert sorted(row.tolist() for row in whole[len(set(sharing.parents)) - 1 :]) == rows


def test_nothing_is_shared_where_tokens_differ_or_a_row_is_alone() -> None:
    batch = replace(random_batch([6, 6, 6]), groups=(0, 0, 1))
    batch.tokens["mask"].fill_(False)
    batch.tokens["tokens"][0] += 1
    assert shared_lengths(batch)[2] == 0
    batch.tokens["tokens"][:6] = torch.arange(6)
    batch.tokens["tokens"][6:12] = torch.arange(1, 7)
    assert shared_lengths(batch) == [0, 0, 0]


def test_equal_rows_keep_a_token_of_their_own() -> None:
    row = torch.arange(4)
    tokens = {"tokens": torch.cat([row, row]), "mask": torch.zeros(8, dtype=torch.bool)}
    batch = Batch(ids=(0, 1), groups=(0, 0), lengths=torch.tensor([4, 4]), tokens=tokens)
    assert shared_lengths(batch) == [3, 3]


@pytest.mark.parametrize("window", [None, 3])
def test_scores_and_gradients_are_those_of_separate_rows(window: int | None) -> None:
    shape = replace(SHAPE, sliding_window=window, sliding_layers=(1,) if window else ())
    ours, theirs = (tiny_model(dtype=torch.float64, shape=shape) for _ in range(2))
    found = score(ours, MIXED, need_gradient=True).logprobs
    expected, _ = plain_scores(theirs, MIXED, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (weights * found).sum().backward()
    (weights * expected).sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=f"{name}")


@pytest.mark.parametrize("bound", [1, 12, 30, 1000])
def test_divided_rows_compute_at_most_the_bound(bound: int) -> None:
    parts = divide(MIXED, bound)
    assert sorted(row for part in parts for row in part) == list(range(len(MIXED)))
    for part in parts:
        assert len(part) == 1 or len(share(MIXED.select(part)).tokens) <= bound


def test_bfloat16_gradients_agree_with_separate_rows() -> None:
    ours, theirs = (tiny_model(dtype=torch.bfloat16) for _ in range(2))
    score(ours, MIXED, need_gradient=True).logprobs.sum().backward()
    apart = replace(MIXED, groups=MIXED.ids)
    score(theirs, apart, need_gradient=True).logprobs.sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.float() - b.grad.float()).norm() < 0.05 * b.grad.float().norm()
