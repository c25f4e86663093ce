"""One run, from the checked configuration to the checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from rlayout.algorithms import Algorithm, Sft
from rlayout.config import save_config
from rlayout.display import Display, step_line
from rlayout.evaluation.accuracy import Accuracy, accuracy
from rlayout.evaluation.dataflow import evaluation_dataflow, evaluation_plan, generation_dataflow
from rlayout.material import Material
from rlayout.metrics import answer_figures, figures, sample_records, spans
from rlayout.run_folder import new_folder
from rlayout.runtime.checkpoint import keep_last, remove_partial
from rlayout.runtime.controller import Controller, Program, StepResult
from rlayout.runtime.orders import RoleOrder
from rlayout.runtime.session import Limits, Session, check_reachable
from rlayout.setup import Setup
from rlayout.spec.dataflow import Kind
from rlayout.spec.optimization import Optimization
from rlayout.spec.plan import ExecutionPlan
from rlayout.tracking import Tracker

ANSWER_KEYS = ("tokens", "mask", "rewards", "correct", "finished", "problem", "texts", "reasons")
SAMPLES_PER_STEP = 4


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own algorithm and optimizer: the warm-up, then the algorithm."""

    name: str
    algorithm: Algorithm
    plan: ExecutionPlan
    optimization: Optimization
    steps: int
    rows_per_step: int
    first_position: int
    """Where in the endless sequence of training problems the stage begins."""


@dataclass
class Outcome:
    """What a run leaves for its user."""

    folder: Path
    checkpoint: Path | None = None
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    """Held-out greedy accuracy by moment, in order."""
    seconds: float = 0.0


def train(setup: Setup, name: str, display: Display) -> Outcome:
    """Warm up, train, evaluate and save into a new folder named after ``name``."""
    start = time.perf_counter()
    material = _read(setup, stages_of(setup), display)
    folder = _new_folder(setup, name, display)
    outcome = Outcome(folder)
    _describe(setup, folder)
    source = setup.config.model.source
    try:
        with open_session(setup, material, display) as session, Tracker(folder) as tracker:
            context = Context(setup, material, session, tracker, display, outcome)
            for stage in stages_of(setup):
                runner = StageRunner(context, stage)
                runner.load(source)
                source = str(runner.run())
    finally:
        remove_partial(folder)
        remove_partial(folder / "checkpoints")
    outcome.seconds = time.perf_counter() - start
    return outcome


def evaluate(setup: Setup, name: str, display: Display) -> Outcome:
    """Greedy accuracy of the configured model on the held-out problems."""
    start = time.perf_counter()
    material = _read(setup, [], display)
    outcome = Outcome(_new_folder(setup, name, display))
    _describe(setup, outcome.folder)
    source = setup.config.model.source
    with open_session(setup, material, display) as session, Tracker(outcome.folder) as tracker:
        context = Context(setup, material, session, tracker, display, outcome)
        runner = StageRunner(context, stages_of(setup)[-1])
        runner.load(source, training=False)
        runner.evaluate(f"of {Path(source).name}", 0)
    outcome.seconds = time.perf_counter() - start
    return outcome


def generate(
    setup: Setup, questions: list[str], samples: int, greedy: bool, display: Display
) -> list[list[str]]:
    """Answer a user's questions: per question the texts of its answers."""
    material = _read(setup, [], display)
    sampling = setup.sampling.as_greedy() if greedy else setup.sampling
    dataflow = generation_dataflow(sampling, samples)
    plan = evaluation_plan(setup.plan, setup.algorithm.dataflow)
    rows = material.prompts_of(questions)
    with open_session(setup, material, display) as session:
        controller = Controller(session, {"actor": setup.shape}, setup.config.seed)
        program = Program(dataflow, plan)
        with display.phase(f"loading {setup.config.model.source}"):
            controller.load({"actor": _role(setup, "actor", setup.config.model.source)}, program)
        answers = controller.run(program, rows, 0, display).fetch(("tokens", "mask"))
    texts = material.texts(answers)
    return [[t for t, g in zip(texts, answers.groups, strict=True) if g == i] for i in rows.ids]


def _read(setup: Setup, stages: list[Stage], display: Display) -> Material:
    if setup.config.cluster.address is not None:
        check_reachable(setup.config.cluster.address)
    with display.phase("reading tokenizer and problems"):
        material = Material(setup)
        for stage in stages:
            last = stage.first_position + stage.steps * stage.rows_per_step
            material.check(
                stage.algorithm.dataflow.source, range(stage.first_position, last), stage.rows_per_step
            )
    return material


def _describe(setup: Setup, folder: Path) -> None:
    save_config(setup.config, folder / "config.yaml")
    (folder / "plan.yaml").write_text(yaml.safe_dump(setup.plan.to_plain(), sort_keys=False))


def _new_folder(setup: Setup, name: str, display: Display) -> Path:
    folder = new_folder(Path(setup.config.output), name)
    display.say(f"run folder: {folder}")
    return folder


def open_session(setup: Setup, material: Material, display: Display) -> Session:
    """A session for this setup; entering it starts the workers."""
    config = setup.config.cluster
    with display.phase(f"starting {setup.cluster.num_devices} workers"):
        session = Session(
            setup.cluster,
            address=config.address,
            cache_bytes=setup.cache_bytes,
            limits=Limits(call=config.call_timeout_seconds),
        )
        session.start(material.judge)
    return session


def stages_of(setup: Setup) -> list[Stage]:
    """The warm-up, if there is one, and the algorithm."""
    config = setup.config
    main = Stage(
        name=config.algorithm.name,
        algorithm=setup.algorithm,
        plan=setup.plan,
        optimization=config.optimizer,
        steps=config.steps,
        rows_per_step=config.prompts_per_step,
        first_position=config.warmup.steps * config.warmup.rows_per_step if config.warmup else 0,
    )
    if config.warmup is None:
        return [main]
    training = next(c.name for c in setup.algorithm.dataflow.calls_of("actor") if c.kind is Kind.TRAIN)
    warmup = Stage(
        name="warmup",
        algorithm=Sft().build(setup.sampling),
        plan=ExecutionPlan({"train": setup.plan[training]}),
        optimization=config.warmup.optimizer,
        steps=config.warmup.steps,
        rows_per_step=config.warmup.rows_per_step,
        first_position=0,
    )
    return [warmup, main]


@dataclass(frozen=True)
class Context:
    """What the stages of a run share."""

    setup: Setup
    material: Material
    session: Session
    tracker: Tracker
    display: Display
    outcome: Outcome


class StageRunner:
    """Runs one stage on the workers of a session."""

    def __init__(self, context: Context, stage: Stage) -> None:
        self._setup, self._material = context.setup, context.material
        self._tracker, self._display, self._outcome = context.tracker, context.display, context.outcome
        self._stage = stage
        self._checkpoints = self._outcome.folder / "checkpoints"
        dataflow = stage.algorithm.dataflow
        self._program = Program(dataflow, stage.plan, stage.algorithm.losses, stage.algorithm.computes)
        held_out = evaluation_dataflow(self._setup.sampling.as_greedy())
        self._evaluation = Program(held_out, evaluation_plan(stage.plan, dataflow))
        shapes = dict.fromkeys(dataflow.roles, self._setup.shape)
        self._controller = Controller(context.session, shapes, self._setup.config.seed)

    def load(self, source: str, training: bool = True) -> None:
        """Put the weights of ``source`` on the workers, in place of what they hold."""
        updates = self._stage.steps * max(c.updates for c in self._program.dataflow.calls)
        optimization = self._stage.optimization if training else None
        orders = {
            role: _role(self._setup, role, source, optimization, updates)
            for role in self._program.dataflow.roles
        }
        with self._display.phase(f"loading {source}"):
            self._controller.load(orders, self._program)

    def run(self) -> Path:
        """All steps of the stage; returns the folder of the weights at its end."""
        config, stage = self._setup.config, self._stage
        main = stage.name == config.algorithm.name
        if main:
            self.evaluate(f"before {stage.name}", 0)
        with self._display.phase(stage.name, total=stage.steps) as phase:
            for step in range(stage.steps):
                line = self._step(step)
                phase.advance()
                self._display.say(line)
                done = step + 1
                if main and _due(done, config.evaluation.every_steps) and done < stage.steps:
                    self.evaluate(f"step {done}", done)
                if main and _due(done, config.checkpoints.every_steps) and done < stage.steps:
                    self._save(self._checkpoints / f"step-{done}")
        if main:
            self.evaluate(f"after {stage.name}", stage.steps)
            return self._save(self._checkpoints / f"step-{stage.steps}")
        return self._save(self._outcome.folder / stage.name)

    def evaluate(self, moment: str, step: int) -> None:
        """Greedy accuracy on the held-out problems, if there are any to judge."""
        if not self._material.num_held_out:
            return
        with self._display.phase(f"evaluating {moment}"):
            rows = self._material.held_out_rows()
            result = self._controller.run(self._evaluation, rows, step, self._display)
            answers = result.fetch(ANSWER_KEYS)
        estimate = accuracy(answers.numbers("correct").tolist())
        self._outcome.accuracy[moment] = estimate
        named = {k.replace("answers/", "held_out/"): v for k, v in answer_figures(answers).items()}
        self._tracker.metrics(self._stage.name, step, named)
        self._tracker.samples(sample_records(answers, f"held out {moment}", step, 2 * SAMPLES_PER_STEP))
        self._log_work(result)
        self._display.say(f"held-out accuracy {moment}: {estimate.mean:.1%} of {estimate.count}")

    def _step(self, step: int) -> str:
        stage = self._stage
        first = stage.first_position + step * stage.rows_per_step
        rows = self._material.rows(self._program.dataflow.source, range(first, first + stage.rows_per_step))
        result = self._controller.run(self._program, rows, step, self._display)
        logged = figures(result) | self._log_answers(result)
        self._tracker.metrics(stage.name, step, logged)
        self._log_work(result)
        return step_line(stage.name, step, stage.steps, logged)

    def _log_work(self, result: StepResult) -> None:
        """What moved and who computed when, in a step or an evaluation."""
        self._tracker.receipts(self._stage.name, result.step, map(asdict, result.receipts))
        self._tracker.spans(spans(result, self._stage.name))

    def _log_answers(self, result: StepResult) -> dict[str, float]:
        if "rewards" not in self._program.dataflow.producer:
            return {}
        answers = result.fetch(ANSWER_KEYS)
        self._tracker.samples(sample_records(answers, self._stage.name, result.step, SAMPLES_PER_STEP))
        return answer_figures(answers)

    def _save(self, folder: Path) -> Path:
        with self._display.phase(f"saving {folder}"):
            stops = self._setup.sampling.stop_token_ids
            self._controller.save("actor", folder.absolute(), self._material.tokenizer, stops)
        if folder.parent == self._checkpoints:
            self._outcome.checkpoint = folder
            keep_last(self._checkpoints, self._setup.config.checkpoints.keep)
        return folder


def _role(
    setup: Setup,
    role: str,
    source: str,
    optimization: Optimization | None = None,
    updates: int = 0,
) -> RoleOrder:
    return RoleOrder(role, source, setup.dtype, None, optimization, updates)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
