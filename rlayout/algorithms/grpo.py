"""Group relative policy optimisation (Shao et al. 2024, *DeepSeekMath*, arXiv 2402.03300).

Several answers per prompt; an answer's advantage is its reward relative to the others of its prompt; the
actor is updated with PPO's clipped surrogate, optionally with a KL penalty to the weights it started from.

Logged figures of the train call (means are over the tokens under the mask unless said otherwise; without a
KL penalty rows with advantage 0 have no gradient, are not computed and not counted):
    loss: what is minimised, policy_loss + kl_coef * (k3 to the reference), aggregated as configured.
    policy_loss: the clipped surrogate alone, aggregated as configured.
    kl_ref: KL(actor || reference) per token in nats, estimated by k3; only with ``kl_coef`` above 0.
    kl_sampling: KL(policy that sampled || actor now) per token in nats, estimated by k3.
    clip_low, clip_high: share of tokens whose gradient the lower or upper bound of the ratio cuts off.
    entropy: entropy of the actor's distributions in nats.
    ratio_mean, ratio_max: probability now over probability at sampling.
    logprob_gap_mean, logprob_gap_max: absolute difference of the log-probabilities of sampling and training
        in nats. Before the first update of a step it must be rounding; more means that sampling and training
        compute different models.
Of the advantages call:
    group_reward_std: standard deviation of the rewards of one prompt, mean over rows.
    no_signal: share of rows whose prompt's rewards are all equal, which therefore teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlayout.algorithms.advantages import group_advantages, group_moments
from rlayout.algorithms.base import Algorithm
from rlayout.algorithms.kl import k3
from rlayout.algorithms.losses import (
    Aggregation,
    check_aggregation,
    clipped_surrogate,
    denominator,
    spread,
    token_weights,
)
from rlayout.algorithms.statistics import gather_statistics
from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, LossOutput, Statistic, TokenScores, Totals
from rlayout.errors import ConfigError, RewardError
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.sampling import Sampling


@dataclass(frozen=True)
class Grpo:
    """Settings of GRPO."""

    name: Literal["grpo"] = "grpo"
    samples_per_prompt: int = 8
    """Answers per prompt. Default as in TRL (the paper uses 64)."""
    updates_per_step: int = 1
    """Optimizer steps that a step's answers are divided into. Default as in the paper."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - ``clip_low``. Default from PPO (arXiv 1707.06347)."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + ``clip_high``. Default from PPO; DAPO (arXiv 2503.14476) takes 0.28."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference model; 0 leaves the reference out. Default as in DAPO and
    TRL (the paper takes 0.04)."""
    normalise_std: bool = True
    """Divide by the standard deviation of the prompt's rewards. Default from the paper; Dr. GRPO
    (arXiv 2503.20783) leaves it out, because it overweights prompts that are nearly always or never solved."""
    std_floor: float = 1e-4
    """Added to that standard deviation, in units of reward. Default as in TRL."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number. Default from DAPO (eq. 8); the paper takes ``sequence_mean``."""

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt must be at least 2, got {self.samples_per_prompt}: an answer is judged "
                "against the others of its prompt, so alone its advantage is always 0"
            )
        if self.updates_per_step < 1:
            raise ValueError(f"updates_per_step must be at least 1, got {self.updates_per_step}")
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must be in (0, 1], got {self.clip_low}")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high must be positive, got {self.clip_high}")
        if not (self.kl_coef >= 0 and math.isfinite(self.kl_coef)):
            raise ValueError(f"kl_coef must be 0 (off) or a positive number, got {self.kl_coef}")
        if not (self.std_floor >= 0 and math.isfinite(self.std_floor)):
            raise ValueError(f"std_floor must be 0 or a positive number, got {self.std_floor}")
        check_aggregation(self.aggregation)

    def build(self, sampling: Sampling) -> Algorithm:
        """Return the algorithm for answers drawn as ``sampling`` says.

        Raises:
            ConfigError: greedy sampling, which draws the same answer every time.
        """
        if sampling.greedy:
            raise ConfigError(
                "sampling.temperature: grpo compares different answers to one prompt, and at temperature 0 "
                "they are all the same; choose a temperature above 0, for instance 1.0"
            )
        sources = {"actor": "model", "ref": "model"} if self.kl_coef > 0 else {"actor": "model"}
        behaviour = "old_logprobs" if sampling.truncated else "sampled_logprobs"
        return Algorithm(
            dataflow=Dataflow(self._calls(sampling, behaviour), source=("prompt_tokens", "problem")),
            losses={
                "train": GrpoLoss(behaviour, self.clip_low, self.clip_high, self.kl_coef, self.aggregation)
            },
            computes={"advantages": GroupAdvantages(self.normalise_std, self.std_floor)},
            role_sources=sources,
        )

    def _calls(self, sampling: Sampling, behaviour: str) -> tuple[Call, ...]:
        # Log-probabilities under top-k or top-p are of a renormalised distribution. A ratio of the
        # actor's own against those would start away from 1, so they are recomputed without the cut.
        scored = replace(sampling, top_k=0, top_p=1.0)
        answers = ("tokens", "mask")
        generate = Call(
            "generate",
            Kind.GENERATE,
            role="actor",
            inputs=("prompt_tokens",),
            outputs=(*answers, "sampled_logprobs", "finished"),
            samples_per_prompt=self.samples_per_prompt,
            sampling=sampling,
        )
        reward = Call(
            "reward", Kind.REWARD, inputs=(*answers, "problem", "finished"), outputs=("rewards", "correct")
        )
        advantages = Call("advantages", Kind.COMPUTE, inputs=("rewards",), outputs=("advantages",))
        calls = [generate, reward, advantages]
        train_inputs = [*answers, behaviour, "advantages"]
        if self.kl_coef > 0:
            calls.append(_infer("ref_infer", "ref", "ref_logprobs", scored))
            train_inputs.append("ref_logprobs")
        if sampling.truncated:
            calls.append(_infer("actor_infer", "actor", behaviour, scored))
        train = Call(
            "train",
            Kind.TRAIN,
            role="actor",
            inputs=tuple(train_inputs),
            sampling=scored,
            updates=self.updates_per_step,
        )
        return (*calls, train)


def _infer(name: str, role: str, output: str, sampling: Sampling) -> Call:
    return Call(name, Kind.INFER, role=role, inputs=("tokens", "mask"), outputs=(output,), sampling=sampling)


@dataclass(frozen=True)
class GroupAdvantages:
    """Compute ``advantages`` float32 [B] from ``rewards`` float32 [B] and the batch's groups."""

    normalise_std: bool
    std_floor: float

    def __call__(self, batch: Batch) -> tuple[Batch, Mapping[str, Statistic]]:
        """Return the batch with ``advantages``.

        Raises:
            RewardError: a reward is not a finite number; it names the row.
        """
        rewards = torch.as_tensor(batch.rows["rewards"], dtype=torch.float32)
        for row in (~rewards.isfinite()).nonzero().flatten().tolist():
            raise RewardError(
                f"row {batch.ids[row]} of prompt {batch.groups[row]}: reward {rewards[row].item()}; "
                "a reward must be a finite number"
            )
        advantages = group_advantages(
            rewards, batch.groups, normalise_std=self.normalise_std, std_floor=self.std_floor
        )
        std = group_moments(rewards, batch.groups).std
        statistics = {
            "group_reward_std": Statistic(float(std.sum()), len(batch)),
            "no_signal": Statistic(float((std == 0).sum()), len(batch)),
        }
        return batch.with_values(rows={"advantages": advantages}), statistics


@dataclass(frozen=True)
class GrpoLoss(Loss):
    """The clipped surrogate, plus ``kl_coef`` times k3 to the reference (arXiv 2402.03300, eq. 3 and 4).

    Attributes:
        behaviour: key of the log-probabilities of the policy that sampled.
        clip_low: distance of the ratio's lower bound from 1.
        clip_high: distance of the ratio's upper bound from 1.
        kl_coef: weight of the penalty; 0 reads no ``ref_logprobs``.
        aggregation: how token losses become one number.
    """

    behaviour: str
    clip_low: float
    clip_high: float
    kl_coef: float
    aggregation: Aggregation

    @property
    def teaching_keys(self) -> tuple[str, ...]:
        return () if self.kl_coef > 0 else ("advantages",)

    def teaches(self, rows: Batch) -> Tensor:
        """Without a penalty, rows with an advantage other than 0 [B]."""
        if self.kl_coef > 0:
            return super().teaches(rows)
        return rows.numbers("advantages") != 0

    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        """Return the micro-batch's share of the loss.

        ``batch.tokens`` holds ``mask`` [T] bool, ``behaviour`` [T] and with a penalty ``ref_logprobs`` [T];
        ``batch.rows`` holds ``advantages`` [B]. Values outside of the mask are not looked at.
        """
        mask = batch.tokens["mask"]
        lengths = batch.lengths.to(mask.device)
        logprobs = scores.logprobs.where(mask, 0.0)
        behaviour = batch.tokens[self.behaviour].where(mask, 0.0)
        row_advantages = torch.as_tensor(batch.rows["advantages"]).to(logprobs)
        advantages = spread(row_advantages, lengths, len(mask))
        weights = token_weights(mask, lengths, self.aggregation, logprobs.dtype)

        surrogate = clipped_surrogate(
            logprobs - behaviour, advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        policy_loss = total = (weights * surrogate).sum()
        figures = self._figures(logprobs.detach(), behaviour, advantages)
        figures["entropy"] = scores.entropy
        if self.kl_coef > 0:
            divergence = k3(logprobs, batch.tokens["ref_logprobs"].where(mask, 0.0))
            total = policy_loss + self.kl_coef * (weights * divergence).sum()
            figures["kl_ref"] = divergence

        share = weights.new_tensor(len(batch)) if self.aggregation == "sequence_mean" else mask.sum()
        masked = {name: values.where(mask, 0.0) for name, values in figures.items()}
        statistics = gather_statistics(
            means={
                "loss": (total, share),
                "policy_loss": (policy_loss, share),
                **{name: (values.sum(), mask.sum()) for name, values in masked.items()},
            },
            maxima={
                # Neither is ever negative, so 0 stands for a micro-batch without tokens under the mask.
                "ratio_max": _largest(masked["ratio_mean"]),
                "logprob_gap_max": _largest(masked["logprob_gap_mean"]),
            },
        )
        return LossOutput(total / denominator(totals, self.aggregation), statistics)

    def _figures(self, logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Per-token values [T] of the figures that follow from the ratio."""
        ratio = (logprobs - behaviour).exp()
        return {
            "kl_sampling": k3(behaviour, logprobs),
            "clip_low": ((ratio < 1 - self.clip_low) & (advantages < 0)).to(ratio),
            "clip_high": ((ratio > 1 + self.clip_high) & (advantages > 0)).to(ratio),
            "ratio_mean": ratio,
            "logprob_gap_mean": (logprobs - behaviour).abs(),
        }


def _largest(values: Tensor) -> Tensor:
    """Largest of nonnegative ``values``, 0 of none."""
    return torch.cat([values, values.new_zeros(1)]).max()
