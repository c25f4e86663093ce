import pytest
import torch

from rlayout.algorithms import Sft
from rlayout.algorithms.sft import SftLoss
from rlayout.data.objective import TokenScores
from rlayout.spec.sampling import Sampling
from tests.algorithms.cases import evaluate, random_batch, totals_of


def test_dataflow():
    algorithm = Sft(updates_per_step=3).build(Sampling(temperature=0))
    assert algorithm.dataflow.order == ("train",)
    assert algorithm.dataflow.source == ("tokens", "mask")
    assert algorithm.dataflow["train"].updates == 3
    assert algorithm.dataflow["train"].sampling is None


@pytest.mark.parametrize(("field", "value"), [("updates_per_step", 0), ("aggregation", "mean")])
def test_wrong_settings_are_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        Sft(**{field: value})  # pyright: ignore[reportArgumentType]


def test_token_mean_is_cross_entropy_of_the_batch():
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.tensor([0, 3, 6, 2, 2, 10, 4])
    batch = random_batch([4, 3])
    mask = batch.tokens["mask"]
    batch = batch.with_values(
        tokens={"logprobs": logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].where(mask, 0.0)}
    )
    value, _, figures = evaluate(SftLoss("token_mean"), [batch], totals_of(batch))
    expected = torch.nn.functional.cross_entropy(logits, tokens.where(mask, -100)).item()
    assert value == pytest.approx(expected)
    assert figures["loss"].figure == pytest.approx(expected)


def test_sequence_mean_by_hand():
    batch = random_batch([2, 1, 1], share_masked=1.0)
    batch = batch.with_values(tokens={"logprobs": torch.tensor([-1.0, -3.0, -4.0, -6.0])})
    value, _, _ = evaluate(SftLoss("sequence_mean"), [batch], totals_of(batch))
    assert value == pytest.approx((2 + 4 + 6) / 3)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradient_by_finite_differences(aggregation):
    batch = random_batch([4, 1, 6, 3], seed=3)
    totals, loss = totals_of(batch), SftLoss(aggregation)

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(TokenScores(logprobs, batch.tokens["entropy"]), batch, totals).loss

    assert torch.autograd.gradcheck(value, (batch.tokens["logprobs"].clone().requires_grad_(),))


def test_what_lies_outside_the_mask_is_not_looked_at():
    batch, loss = random_batch([4, 2, 5], seed=1), SftLoss("token_mean")
    mask = batch.tokens["mask"]
    spoiled = batch.with_values(
        tokens={key: batch.tokens[key].where(mask, torch.nan) for key in ("logprobs", "entropy")}
    )
    assert evaluate(loss, [spoiled], totals_of(batch)) == evaluate(loss, [batch], totals_of(batch))


def test_nothing_to_learn_from():
    batch = random_batch([3, 2], share_masked=0.0)
    value, gradient, figures = evaluate(SftLoss("token_mean"), [batch], totals_of(batch))
    assert value == 0.0
    assert set(gradient.values()) == {0.0}
    assert figures["loss"].figure == 0.0
