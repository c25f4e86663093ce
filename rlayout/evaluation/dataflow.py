"""Evaluation as a dataflow: answer held-out problems, judge the answers."""

from __future__ import annotations

from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.plan import ExecutionPlan
from rlayout.spec.sampling import Sampling


def evaluation_dataflow(sampling: Sampling, role: str = "actor") -> Dataflow:
    """One answer of ``role`` to every prompt, drawn as ``sampling`` says, and its verdict."""
    generate = _generate(sampling, role, 1)
    reward = Call(
        "reward",
        Kind.REWARD,
        inputs=("tokens", "mask", "problem", "finished"),
        outputs=("rewards", "correct"),
    )
    return Dataflow((generate, reward), source=("prompt_tokens", "problem"))


def generation_dataflow(sampling: Sampling, samples_per_prompt: int, role: str = "actor") -> Dataflow:
    """Answers of ``role`` and nothing else."""
    return Dataflow((_generate(sampling, role, samples_per_prompt),), source=("prompt_tokens", "problem"))


def _generate(sampling: Sampling, role: str, samples_per_prompt: int) -> Call:
    return Call(
        "generate",
        Kind.GENERATE,
        role=role,
        inputs=("prompt_tokens",),
        outputs=("tokens", "mask", "sampled_logprobs", "finished"),
        sampling=sampling,
        samples_per_prompt=samples_per_prompt,
    )


def evaluation_plan(plan: ExecutionPlan, dataflow: Dataflow, role: str = "actor") -> ExecutionPlan:
    """Place the evaluation where the run generates, or where it trains if it never generates."""
    calls = dataflow.calls_of(role)
    generating = [c for c in calls if c.kind is Kind.GENERATE] or list(calls)
    return ExecutionPlan({"generate": plan[generating[0].name]})
