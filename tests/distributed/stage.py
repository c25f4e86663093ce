"""A step of GRPO on the tiny model, with real workers: what the tests of the runtime share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlayout.algorithms import Algorithm, Grpo
from rlayout.data.batch import Batch
from rlayout.data.problem import Problem
from rlayout.data.prompts import prompt_batch
from rlayout.data.templates import PromptEncoder
from rlayout.errors import RewardError
from rlayout.rewards.judge import Judge
from rlayout.rewards.verdict import Verdict
from rlayout.runtime.controller import Controller, Program, StepResult
from rlayout.runtime.orders import RoleOrder
from rlayout.runtime.session import Limits, Session
from rlayout.spec.cluster import Cluster
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.optimization import Optimization
from rlayout.spec.parameters import parameters
from rlayout.spec.plan import ExecutionPlan
from rlayout.spec.sampling import Sampling
from rlayout.spec.task import PromptTemplate
from tests import tiny

SAMPLING = Sampling(max_new_tokens=12, stop_token_ids=(tiny.VOCABULARY["<end>"], tiny.VOCABULARY["7"]))
MODEL_BYTES = sum(p.numel for p in parameters(tiny.SHAPE)) * 4


@dataclass(frozen=True)
class CountsSevens:
    """Pays for sevens; raises on demand."""

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        if problem.question == "raise":
            raise RewardError("this reward function fails on purpose")
        return Verdict(text.count("7") + 0.1 * len(text), bool(finished), "counted")


class Silent:
    """A watcher that shows nothing."""

    def started(self, call: str) -> None: ...
    def progressed(self, call: str, finished: int, total: int) -> None: ...
    def ended(self, call: str, seconds: float) -> None: ...


def new_session(num_workers: int, limits: Limits | None = None) -> Session:
    session = Session(Cluster(1, num_workers), address=None, cache_bytes=2**24, limits=limits)
    session.start(Judge(CountsSevens(), tiny.tokenizer()))
    return session


def placement(*devices: int, tokens: int = 64) -> Placement:
    return Placement(devices, Layout(dp=len(devices)), tokens)


def prompts(*questions: str) -> Batch:
    encoder = PromptEncoder(tiny.tokenizer(), PromptTemplate())
    problems = [Problem(q) for q in questions]
    return prompt_batch(problems, range(len(problems)), encoder, max_new_tokens=12, max_positions=256)


QUESTIONS = ("1+1=", "what is 20 + 22?", "7", "a rather long question about nothing at all: 3*3=", "5-8=")


@dataclass
class Trial:
    """A controller with loaded roles and its program."""

    controller: Controller
    program: Program

    def step(self, step: int, rows: Batch) -> StepResult:
        return self.controller.run(self.program, rows, step, Silent())


def start(
    session: Session, source: str, algorithm: Algorithm, placements: dict[str, Placement], **changes: Any
) -> Trial:
    program = Program(
        algorithm.dataflow, ExecutionPlan(placements), {**algorithm.losses, **changes}, algorithm.computes
    )
    controller = Controller(session, dict.fromkeys(algorithm.dataflow.roles, tiny.SHAPE), seed=3)
    # Adam divides by the gradient's own size: where that is near zero its rounding becomes a part of the rate.
    optimization = Optimization(learning_rate=1e-3)
    orders = {
        role: RoleOrder(role, source, "float32", None, optimization, 4) for role in algorithm.dataflow.roles
    }
    controller.load(orders, program)
    return Trial(controller, program)


def grpo(**changes: Any) -> Algorithm:
    return Grpo(samples_per_prompt=4, updates_per_step=2, kl_coef=0.05, **changes).build(SAMPLING)
