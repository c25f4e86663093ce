"""Which sequence sits in which slot of the cache: continuous batching as a pure function of what ended.

Running sequences fill the slots from 0 without a gap, so a decode step works on the first ``n`` slots.
Sequences start in one fixed order, all samples of a prompt one after the other. So when a later sample of
a prompt starts, no other prompt has started since the sample before it, and some slot still holds the
prompt's keys and values: a prompt is computed once, and its other samples copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Copy:
    """Copy what ``sequence``, the new tenant of slot ``target``, has cached in slot ``source``."""

    source: int
    target: int
    sequence: int


@dataclass(frozen=True)
class Prefill:
    """Compute the prompt of ``sequence`` into slot ``target``."""

    target: int
    sequence: int


@dataclass
class Changes:
    """What to do with the cache before the next decode step, in this order."""

    early_copies: list[Copy] = field(default_factory=list)
    """Prompts that are in the cache already; a prefill may overwrite their source."""
    prefills: list[Prefill] = field(default_factory=list)
    late_copies: list[Copy] = field(default_factory=list)
    """Prompts that were just computed, then running sequences that close a gap."""


class Scheduler:
    """Slots and waiting sequences of one generate call.

    Sequence ``s`` is sample ``s % samples_per_prompt`` of prompt ``s // samples_per_prompt``.

    Attributes:
        running: the sequence in each slot in use.
        num_ended: sequences that have ended.
    """

    def __init__(self, *, num_prompts: int, samples_per_prompt: int, num_slots: int) -> None:
        self.running: list[int] = []
        self.num_ended = 0
        self._num_sequences = num_prompts * samples_per_prompt
        self._samples_per_prompt = samples_per_prompt
        self._num_slots = num_slots
        self._next = 0
        self._prompt_in_slot: dict[int, int] = {}

    def advance(self, ended: Collection[int] = ()) -> Changes:
        """Free the slots in ``ended``, start waiting sequences, close the gaps that are left."""
        changes = Changes()
        self.num_ended += len(ended)
        free = sorted(ended)
        while self._next < self._num_sequences and (free or len(self.running) < self._num_slots):
            if not free:
                free.append(len(self.running))
                self.running.append(self._next)
            self._start(free.pop(0), changes)
        self._close_gaps(free, changes)
        return changes

    def _start(self, slot: int, changes: Changes) -> None:
        sequence = self._next
        prompt = sequence // self._samples_per_prompt
        self._next += 1
        self.running[slot] = sequence
        if sequence % self._samples_per_prompt == 0:
            changes.prefills.append(Prefill(slot, sequence))
        elif self._prompt_in_slot.get(slot) != prompt:
            source = next(s for s, held in self._prompt_in_slot.items() if held == prompt)
            new = any(p.sequence // self._samples_per_prompt == prompt for p in changes.prefills)
            copies = changes.late_copies if new else changes.early_copies
            copies.append(Copy(source, slot, sequence))
        self._prompt_in_slot[slot] = prompt

    def _close_gaps(self, free: list[int], changes: Changes) -> None:
        """Fill free slots from the end; nothing waits then, so no prompt is needed any more."""
        while free:
            last = len(self.running) - 1
            sequence = self.running.pop()
            if last == free[-1]:
                free.pop()
            else:
                gap = free.pop(0)
                self.running[gap] = sequence
                changes.late_copies.append(Copy(last, gap, sequence))


def chunks(prefills: Sequence[Prefill], lengths: Sequence[int], limit: int) -> Iterator[list[Prefill]]:
    """Divide prefills, of ``lengths`` tokens, into runs of at most ``limit`` tokens (or one prefill)."""
    chunk: list[Prefill] = []
    size = 0
    for prefill, length in zip(prefills, lengths, strict=True):
        if chunk and size + length > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(prefill)
        size += length
    if chunk:
        yield chunk
