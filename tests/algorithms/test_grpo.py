import dataclasses

import pytest
import torch

from rlayout.algorithms import Grpo
from rlayout.algorithms.grpo import GroupAdvantages, GrpoLoss
from rlayout.data.batch import Batch
from rlayout.data.objective import TokenScores
from rlayout.errors import ConfigError, RewardError
from rlayout.spec.dataflow import Kind
from rlayout.spec.sampling import Sampling
from tests.algorithms.cases import evaluate, random_batch, totals_of

SEQUENCE_MEAN = GrpoLoss("sampled_logprobs", 0.2, 0.3, 0.5, "sequence_mean")
TOKEN_MEAN = dataclasses.replace(SEQUENCE_MEAN, aggregation="token_mean")


def test_plain_dataflow():
    algorithm = Grpo(samples_per_prompt=4, updates_per_step=2).build(Sampling(temperature=0.7))
    flow = algorithm.dataflow
    assert flow.order == ("generate", "reward", "advantages", "train")
    assert flow["generate"].samples_per_prompt == 4
    assert flow["train"].updates == 2
    assert flow["train"].inputs == ("tokens", "mask", "sampled_logprobs", "advantages")
    assert flow["train"].sampling == Sampling(temperature=0.7)
    assert algorithm.role_sources == {"actor": "model"}
    assert algorithm.frozen_roles == ()


def test_penalty_brings_the_reference():
    algorithm = Grpo(kl_coef=0.04).build(Sampling(temperature=0.7))
    reference = algorithm.dataflow["ref_infer"]
    assert reference.kind is Kind.INFER
    assert reference.sampling == Sampling(temperature=0.7)
    assert algorithm.frozen_roles == ("ref",)
    assert algorithm.role_sources == {"actor": "model", "ref": "model"}


def test_truncated_sampling_recomputes_the_log_probabilities_without_the_cut():
    flow = Grpo().build(Sampling(temperature=0.7, top_k=50, top_p=0.9)).dataflow
    assert flow["generate"].sampling == Sampling(temperature=0.7, top_k=50, top_p=0.9)
    assert flow["actor_infer"].sampling == Sampling(temperature=0.7)
    assert "old_logprobs" in flow["train"].inputs
    assert "sampled_logprobs" not in flow["train"].inputs


def test_greedy_sampling_is_refused():
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        Grpo().build(Sampling(temperature=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples_per_prompt", 1),
        ("updates_per_step", 0),
        ("clip_low", 0.0),
        ("clip_low", 1.5),
        ("clip_high", 0.0),
        ("clip_high", float("nan")),
        ("kl_coef", -0.1),
        ("kl_coef", float("nan")),
        ("std_floor", -1e-4),
        ("std_floor", float("nan")),
        ("aggregation", "mean"),
    ],
)
def test_wrong_settings_are_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(Grpo(), **{field: value})


def hand_batch() -> Batch:
    """Rows of 2 and 3 tokens; the first token of each is a prompt token."""
    ratio = torch.tensor([9.0, 1.5, 9.0, 0.5, 1.0], dtype=torch.float64)
    logprobs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.5], dtype=torch.float64).clamp(min=0.1).log()
    return Batch(
        ids=(10, 11),
        groups=(1, 1),
        lengths=torch.tensor([2, 3]),
        tokens={
            "mask": torch.tensor([False, True, False, True, True]),
            "logprobs": logprobs,
            "entropy": torch.tensor([9.0, 1.0, 9.0, 2.0, 3.0], dtype=torch.float64),
            "sampled_logprobs": logprobs - ratio.log(),
            "ref_logprobs": logprobs + torch.tensor([9.0, 2.0, 9.0, 1.0, 0.5], dtype=torch.float64).log(),
        },
        rows={"advantages": torch.tensor([1.0, -2.0])},
    )


# Token by token: -min(r A, clip(r) A) with r = 1.5, 0.5, 1 and A = 1, -2, -2 under bounds 0.8 and 1.3;
# k3 = q/p - 1 - log(q/p) with q/p = 2, 1, 0.5.
SURROGATE = [-1.3, 1.6, 2.0]
LOG2 = torch.tensor(2.0, dtype=torch.float64).log().item()
DIVERGENCE = [1 - LOG2, 0.0, -0.5 + LOG2]


def test_token_mean_by_hand():
    batch = hand_batch()
    value, _, figures = evaluate(TOKEN_MEAN, [batch], totals_of(batch))
    assert figures["policy_loss"].figure == pytest.approx(sum(SURROGATE) / 3)
    assert figures["kl_ref"].figure == pytest.approx(sum(DIVERGENCE) / 3)
    assert value == pytest.approx(sum(SURROGATE) / 3 + 0.5 * sum(DIVERGENCE) / 3)
    assert figures["loss"].figure == pytest.approx(value)


def test_sequence_mean_by_hand():
    batch = hand_batch()
    value, _, figures = evaluate(SEQUENCE_MEAN, [batch], totals_of(batch))

    def sequence_mean(values: list[float]) -> float:
        return (values[0] + (values[1] + values[2]) / 2) / 2

    assert figures["policy_loss"].figure == pytest.approx(sequence_mean(SURROGATE))
    assert value == pytest.approx(sequence_mean(SURROGATE) + 0.5 * sequence_mean(DIVERGENCE))
    assert figures["loss"].figure == pytest.approx(value)


def test_other_figures_by_hand():
    batch = hand_batch()
    _, _, figures = evaluate(TOKEN_MEAN, [batch], totals_of(batch))
    assert figures["clip_high"].figure == pytest.approx(1 / 3)
    assert figures["clip_low"].figure == pytest.approx(1 / 3)
    assert figures["entropy"].figure == pytest.approx(2.0)
    assert figures["ratio_mean"].figure == pytest.approx(1.0)
    assert figures["ratio_max"].figure == pytest.approx(1.5)
    gaps = [LOG2 - (2 * LOG2 - torch.tensor(3.0, dtype=torch.float64).log().item()), LOG2, 0.0]
    assert figures["logprob_gap_mean"].figure == pytest.approx(sum(gaps) / 3)
    assert figures["logprob_gap_max"].figure == pytest.approx(max(gaps))
    # KL(sampler || now), k3: r - 1 - log r
    kl = [0.5 - gaps[0], -0.5 + LOG2, 0.0]
    assert figures["kl_sampling"].figure == pytest.approx(sum(kl) / 3)


def test_clip_shares_count_the_tokens_without_gradient():
    ratio = torch.tensor([1.25, 1.35, 1.35, 0.75, 0.75, 0.75], dtype=torch.float64)
    batch = Batch(
        ids=tuple(range(6)),
        groups=(0,) * 6,
        lengths=torch.ones(6, dtype=torch.int64),
        tokens={
            "mask": torch.ones(6, dtype=torch.bool),
            "logprobs": ratio.log(),
            "entropy": torch.zeros(6),
            "sampled_logprobs": torch.zeros(6),
        },
        # 1.25 is within the upper bound 1.3; an advantage of 0 has no gradient to cut off
        rows={"advantages": torch.tensor([1.0, 1.0, 0.0, -1.0, 0.0, 1.0])},
    )
    loss = dataclasses.replace(TOKEN_MEAN, kl_coef=0.0)
    _, gradient, figures = evaluate(loss, [batch], totals_of(batch))
    assert [row for (row, _), grad in gradient.items() if grad == 0.0] == [1, 2, 3, 4]
    assert figures["clip_high"].value == 1
    assert figures["clip_low"].value == 1


@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN])
def test_gradient_by_finite_differences(loss: GrpoLoss):
    batch = random_batch([4, 1, 6, 3], seed=3)
    totals = totals_of(batch)

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(TokenScores(logprobs, batch.tokens["entropy"]), batch, totals).loss

    logprobs = batch.tokens["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (logprobs,), eps=1e-7, atol=1e-6)


def test_without_a_penalty_nobody_reads_the_reference():
    batch = random_batch([4, 3])
    batch = batch.only([key for key in batch.keys if key != "ref_logprobs"])
    loss = dataclasses.replace(TOKEN_MEAN, kl_coef=0.0)
    _, _, figures = evaluate(loss, [batch], totals_of(batch))
    assert "kl_ref" not in figures
    assert figures["loss"] == figures["policy_loss"]


@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN])
def test_what_lies_outside_the_mask_is_not_looked_at(loss: GrpoLoss):
    batch = random_batch([4, 2, 5], seed=1)
    mask = batch.tokens["mask"]
    keys = ("logprobs", "entropy", "sampled_logprobs", "ref_logprobs")
    spoiled = batch.with_values(tokens={k: batch.tokens[k].where(mask, torch.nan) for k in keys})
    assert evaluate(loss, [spoiled], totals_of(batch)) == evaluate(loss, [batch], totals_of(batch))


@pytest.mark.parametrize("loss", [TOKEN_MEAN, SEQUENCE_MEAN])
@pytest.mark.parametrize("lengths", [[3, 2], [1], [0, 2], []])
def test_empty_answers_give_no_loss_and_no_gradient(loss: GrpoLoss, lengths: list[int]):
    batch = random_batch(lengths, share_masked=0.0)
    value, gradient, figures = evaluate(loss, [batch], totals_of(batch))
    assert value == 0.0
    assert set(gradient.values()) <= {0.0}
    assert all(figure.figure == 0.0 for figure in figures.values())


def test_an_empty_answer_counts_as_a_row_of_loss_zero():
    full, empty = random_batch([4, 3], seed=5), random_batch([2], seed=6, share_masked=0.0)
    both = [full, dataclasses.replace(empty, ids=(2,))]
    alone, _, _ = evaluate(SEQUENCE_MEAN, [full], totals_of(full))
    value, _, _ = evaluate(SEQUENCE_MEAN, both, dataclasses.replace(totals_of(full), rows=3.0))
    assert value == pytest.approx(alone * 2 / 3)


def test_a_single_token():
    batch = random_batch([1], share_masked=1.0)
    values = [evaluate(loss, [batch], totals_of(batch))[0] for loss in (TOKEN_MEAN, SEQUENCE_MEAN)]
    assert values[0] == values[1] != 0.0


def test_on_policy_gradient_is_that_of_policy_gradient():
    """With ratio 1 the gradient by a token's log-probability is minus its advantage over the tokens."""
    batch = random_batch([3, 2], share_masked=1.0)
    batch = batch.with_values(tokens={"sampled_logprobs": batch.tokens["logprobs"]})
    loss = dataclasses.replace(TOKEN_MEAN, kl_coef=0.0)
    _, gradient, figures = evaluate(loss, [batch], totals_of(batch))
    advantages = torch.as_tensor(batch.rows["advantages"]).tolist()
    for (row, _), grad in gradient.items():
        assert grad == pytest.approx(-advantages[row] / 5)
    assert figures["logprob_gap_max"].figure == 0.0
    assert figures["ratio_mean"].figure == 1.0


def test_advantages_call():
    batch = Batch(
        ids=(1, 2, 3, 4, 5),
        groups=(0, 9, 0, 9, 4),
        lengths=torch.tensor([1, 1, 1, 1, 1]),
        rows={"rewards": torch.tensor([1.0, 0.5, 0.0, 0.5, 1.0])},
    )
    found, figures = GroupAdvantages(normalise_std=False, std_floor=0.0)(batch)
    assert torch.as_tensor(found.rows["advantages"]).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert figures["no_signal"].figure == pytest.approx(3 / 5)
    assert figures["group_reward_std"].figure == pytest.approx(2 * 0.5**0.5 / 5)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float):
    batch = Batch((7, 8), (3, 3), torch.tensor([1, 1]), rows={"rewards": torch.tensor([1.0, reward])})
    with pytest.raises(RewardError, match="row 8 of prompt 3"):
        GroupAdvantages(normalise_std=True, std_floor=1e-4)(batch)


@pytest.mark.parametrize(("kl_coef", "expected"), [(0.0, [True, False, True]), (0.1, [True, True, True])])
def test_rows_without_an_advantage_teach_only_by_the_penalty(kl_coef: float, expected: list[bool]) -> None:
    loss = GrpoLoss("sampled_logprobs", 0.2, 0.2, kl_coef, "token_mean")
    rows = Batch((0, 1, 2), (0, 0, 0), torch.ones(3, dtype=torch.int64))
    rows = rows.with_values(tokens={"x": torch.zeros(3)}, rows={"advantages": torch.tensor([0.5, 0.0, -0.5])})
    assert loss.teaches(rows).tolist() == expected
    assert loss.teaching_keys == (() if kl_coef else ("advantages",))
