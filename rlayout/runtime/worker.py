"""One worker per device: holds models, computes its part of every call, exchanges weights."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.data.objective import Statistic
from rlayout.errors import WeightVersionError, WorkerError, nearest
from rlayout.model.generation.engine import Generator
from rlayout.model.host_memory import keep_freed_memory, limit_compiled_products, return_freed_memory
from rlayout.model.huggingface import load_model, save_model
from rlayout.model.scoring import infer
from rlayout.model.training import Trainer
from rlayout.model.transformer import Transformer
from rlayout.planning.transfer import TransferPlan
from rlayout.runtime.checkpoint import whole_folder
from rlayout.runtime.orders import CallOrder, CallReport, RoleOrder
from rlayout.runtime.reallocation import Receipt, digest, transfer
from rlayout.runtime.store import Rows, assemble
from rlayout.runtime.usage import Stopwatch
from rlayout.spec.cluster import DeviceKind
from rlayout.spec.dataflow import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY = Batch((), (), torch.zeros(0, dtype=torch.int64))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class HeldRole:
    """A role's weights on this device."""

    model: Transformer
    trainer: Trainer | None
    version: int = 0


class Worker:
    """Runs in its own process; one method at a time, in the order in which the controller asks."""

    def __init__(self, device: int, kind: DeviceKind, num_threads: int, cache_bytes: int) -> None:
        """Hold device ``device`` of the cluster, the only one of its kind that this process sees."""
        torch.set_num_threads(num_threads)
        keep_freed_memory()
        limit_compiled_products()
        self._device = device
        self._torch_device = torch.device(kind)
        self._cache_bytes = cache_bytes
        self._roles: dict[str, HeldRole] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._progress = (0, 0)

    # -- set-up ---------------------------------------------------------------------------------

    def describe(self) -> tuple[int, str]:
        """Process id and host address of this worker."""
        return os.getpid(), os.uname().nodename

    def free_port(self) -> int:
        """A port that nobody listens on at this moment."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def join(self, address: str, num_workers: int, timeout_seconds: float) -> None:
        """Meet the other workers at ``address`` (``tcp://host:port``)."""
        backend = "nccl" if self._torch_device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=address,
            rank=self._device,
            world_size=num_workers,
            timeout=timedelta(seconds=timeout_seconds),
        )

    def make_groups(self, meshes: Sequence[tuple[int, ...]]) -> None:
        """Create the process groups of ``meshes``; all workers do this with the same list."""
        for mesh in meshes:
            if mesh not in self._groups:
                group = dist.new_group(list(mesh))
                if isinstance(group, dist.ProcessGroup):
                    self._groups[mesh] = group

    def load_role(self, order: RoleOrder) -> None:
        """Read a role's weights from disk; a trained role gets its optimizer."""
        model = load_model(order.source, dtype=DTYPES[order.dtype], device=self._torch_device)
        trainer = None
        if order.train_mesh is not None and order.optimization is not None:
            trainer = Trainer(
                model,
                order.optimization,
                total_steps=order.total_updates,
                group=self._groups[order.train_mesh],
            )
        self._roles[order.role] = HeldRole(model, trainer)
        return_freed_memory()  # loading held some weights twice

    def drop_roles(self) -> None:
        """Free every model and optimizer."""
        self._roles.clear()
        return_freed_memory()

    # -- work -----------------------------------------------------------------------------------

    def execute(self, order: CallOrder, *pieces: Batch) -> tuple[CallReport, Batch | None]:
        """Compute this device's part of a call from the pieces that hold its rows."""
        held = self._role(order)
        ids = [i for mini_batch in order.mini_batches for i in mini_batch]
        batch = EMPTY
        if ids:
            batch = assemble(pieces, ids, [order.groups[i] for i in ids], order.call.inputs)
            batch = batch.to(self._torch_device)
        watch = Stopwatch()
        statistics: Mapping[str, Statistic] = {}
        result = None
        if order.call.kind is Kind.TRAIN:
            statistics = self._train(order, held, batch)
        elif ids:
            result = self._forward(order, held, batch).to(torch.device("cpu"))
        return_freed_memory()  # what the next call needs has other sizes and would not fit into the holes
        usage = watch.usage((result or batch).num_tokens)
        rows = Rows.of(result or EMPTY)
        return CallReport(self._device, rows, order.call.outputs, usage, statistics), result

    def progress(self) -> tuple[int, int]:
        """Finished and total rows of the generate call that runs now; (0, 0) otherwise.

        Answers while another method runs.
        """
        return self._progress

    def _forward(self, order: CallOrder, held: HeldRole, batch: Batch) -> Batch:
        call = order.call
        assert call.sampling is not None, f"call {call.name!r} has no sampling settings"
        if call.kind is Kind.INFER:
            values = infer(
                held.model, batch, sampling=call.sampling, micro_batch_tokens=order.micro_batch_tokens
            )
            return batch.only([]).with_values({call.outputs[0]: values})
        try:
            return Generator(held.model, max_cache_bytes=self._cache_bytes).generate(
                batch,
                sampling=call.sampling,
                samples_per_prompt=call.samples_per_prompt,
                seed=order.seed,
                step=order.step,
                on_progress=self._note_progress,
            )
        finally:
            self._progress = (0, 0)

    def _train(self, order: CallOrder, held: HeldRole, batch: Batch) -> Mapping[str, Statistic]:
        assert held.trainer is not None
        assert order.loss is not None
        place = {row: index for index, row in enumerate(batch.ids)}
        temperature = order.call.sampling.temperature if order.call.sampling else 1.0
        combined: dict[str, Statistic] = {}
        for mini_batch in order.mini_batches:
            result = held.trainer.step(
                batch.select([place[i] for i in mini_batch]),
                order.loss,
                micro_batch_tokens=order.micro_batch_tokens,
                temperature=temperature,
            )
            for name, statistic in result.statistics.items():
                combined[name] = combined[name] + statistic if name in combined else statistic
        held.version = order.version + 1
        return combined

    def _note_progress(self, finished: int, total: int) -> None:
        self._progress = (finished, total)

    def _role(self, order: CallOrder) -> HeldRole:
        held = self._held(str(order.call.role))
        if held.version != order.version:
            raise WeightVersionError(
                f"call {order.call.name!r} of step {order.step} needs version {order.version} of role "
                f"{order.call.role!r}, but device {self._device} holds version {held.version}: "
                f"its weights were not brought up to date"
            )
        return held

    def _held(self, role: str) -> HeldRole:
        if role not in self._roles:
            raise WorkerError(f"device {self._device} holds no role {role!r}. {nearest(role, self._roles)}")
        return self._roles[role]

    # -- weights --------------------------------------------------------------------------------

    def reallocate(self, role: str, plan: TransferPlan, version: int) -> Receipt:
        """Take part in moving a role's weights; afterwards this device holds ``version``."""
        held = self._held(role)
        tensors = weights_of(held.model)
        received, seconds = transfer(plan, tensors, self._device)
        held.version = version
        return Receipt(
            role=role,
            version=version,
            device=self._device,
            digest=digest(tensors),
            bytes_received=received,
            bytes_needed=plan.bytes_needed(self._device),
            seconds=seconds,
        )

    def save_role(
        self, role: str, folder: Path, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]
    ) -> None:
        """Write a role's weights with its tokenizer and end tokens as a Hugging Face folder.

        Raises:
            CheckpointError: the folder could not be written; nothing is left of it.
        """
        held = self._held(role)
        with whole_folder(folder) as partial:
            save_model(partial, held.model.shape, weights_of(held.model), tokenizer, end_tokens=end_tokens)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """Name -> parameter, detached."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
