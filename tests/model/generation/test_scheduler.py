"""Any order in which sequences end: every slot holds what its sequence needs, each prompt computed once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.model.generation.scheduler import Changes, Copy, Prefill, Scheduler, chunks


class FakeCache:
    """Slot -> (prompt, sequences whose tokens are in it), changed as the engine changes the real one."""

    def __init__(self, num_slots: int, samples_per_prompt: int) -> None:
        self.slots: list[tuple[int, int | None] | None] = [None] * num_slots
        self.samples_per_prompt = samples_per_prompt
        self.prefilled: list[int] = []
        self.started: set[int] = set()

    def apply(self, changes: Changes) -> None:
        self._copy(changes.early_copies)
        for prefill in changes.prefills:
            prompt = prefill.sequence // self.samples_per_prompt
            self.prefilled.append(prompt)
            self.slots[prefill.target] = (prompt, None)
        self._copy(changes.late_copies)

    def _copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            assert copy.source != copy.target
            self.slots[copy.target] = self.slots[copy.source]

    def decode(self, running: list[int]) -> None:
        for slot, sequence in enumerate(running):
            held = self.slots[slot]
            assert held is not None
            prompt, owner = held
            assert prompt == sequence // self.samples_per_prompt
            if sequence in self.started:
                assert owner == sequence
            self.started.add(sequence)
            self.slots[slot] = (prompt, sequence)


@given(
    num_prompts=st.integers(1, 6),
    samples_per_prompt=st.integers(1, 5),
    num_slots=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_every_sequence_runs_once_on_its_own_tokens(num_prompts, samples_per_prompt, num_slots, seed):
    total = num_prompts * samples_per_prompt
    chance = random.Random(seed)
    left = [chance.randint(1, 5) for _ in range(total)]
    scheduler = Scheduler(num_prompts=num_prompts, samples_per_prompt=samples_per_prompt, num_slots=num_slots)
    cache = FakeCache(num_slots, samples_per_prompt)
    cache.apply(scheduler.advance())
    while scheduler.running:
        assert len(scheduler.running) == min(num_slots, sum(n > 0 for n in left))  # no slot idles
        cache.decode(scheduler.running)
        for sequence in scheduler.running:
            left[sequence] -= 1
        cache.apply(
            scheduler.advance([s for s, sequence in enumerate(scheduler.running) if not left[sequence]])
        )
    assert left == [0] * total
    assert scheduler.num_ended == total
    assert cache.prefilled == list(range(num_prompts))


def test_samples_of_a_prompt_copy_it():
    scheduler = Scheduler(num_prompts=2, samples_per_prompt=3, num_slots=4)
    first = scheduler.advance()
    assert first.prefills == [Prefill(0, 0), Prefill(3, 3)]
    assert first.late_copies == [Copy(0, 1, 1), Copy(0, 2, 2)]
    assert scheduler.running == [0, 1, 2, 3]
    second = scheduler.advance([3])  # the slot that held prompt 1 holds it still
    assert second == Changes()
    assert scheduler.running == [0, 1, 2, 4]
    third = scheduler.advance([0])
    assert third.early_copies == [Copy(3, 0, 5)]
    assert scheduler.advance([1]).late_copies == [Copy(3, 1, 4)]
    assert scheduler.running == [5, 4, 2]


@pytest.mark.parametrize(
    ("lengths", "limit", "sizes"),
    [
        ([], 10, []),
        ([3, 3, 3], 10, [3]),
        ([5, 5, 1], 10, [2, 1]),
        ([20, 1], 10, [1, 1]),
        ([1, 20, 1], 10, [1, 1, 1]),
        ([0, 0], 10, [2]),
    ],
)
def test_chunks(lengths, limit, sizes):
    prefills = [Prefill(i, i) for i in range(len(lengths))]
    made = list(chunks(prefills, lengths, limit))
    assert [len(chunk) for chunk in made] == sizes
    assert [p for chunk in made for p in chunk] == prefills
