"""Generation with continuous batching: a sequence that ends makes room at once for one that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlayout.data.batch import Batch
from rlayout.errors import ConfigError, DataError
from rlayout.model.attention import PackedAttention
from rlayout.model.generation.answers import Answers
from rlayout.model.generation.cache import Cache, DecodeAttention, PrefillAttention, token_bytes
from rlayout.model.generation.packed import for_decoding
from rlayout.model.generation.randomness import uniforms
from rlayout.model.generation.sampler import draw, draws_per_token
from rlayout.model.generation.scheduler import Changes, Copy, Prefill, Scheduler, chunks
from rlayout.model.transformer import Transformer
from rlayout.spec.sampling import Sampling

Progress = Callable[[int, int], None]
"""Called with the number of answers that ended, and of all."""


class Generator:
    """Samples answers with a model. Holds no memory between calls."""

    def __init__(self, model: Transformer, *, max_cache_bytes: int, prefill_tokens: int = 1024) -> None:
        """Prepare nothing yet: the weights may change until ``generate``.

        Args:
            model: its weights at the time of the call are used.
            max_cache_bytes: memory for keys and values; it decides how many sequences run at once.
            prefill_tokens: prompt tokens computed at once, so that they fit into the processor's cache; a
                longer prompt is computed alone.
        """
        self._model = model
        self._max_cache_bytes = max_cache_bytes
        self._prefill_tokens = prefill_tokens

    def generate(
        self,
        prompts: Batch,
        *,
        sampling: Sampling,
        samples_per_prompt: int,
        seed: int,
        step: int,
        on_progress: Progress | None = None,
    ) -> Batch:
        """Sample answers.

        Args:
            prompts: rows with per-token key ``prompt_tokens``; a row's id is its prompt's id.
            sampling: how tokens are drawn, and when an answer ends.
            samples_per_prompt: answers per prompt.
            seed: seed of the run.
            step: training step. With the seed, a row's id and a token's position it decides each draw.
            on_progress: called with (ended, total) whenever answers end.

        Returns:
            Row ``j`` of prompt ``p`` has id ``p * samples_per_prompt + j`` and group ``p``, in the order
            of ``prompts``, then ``j``. Per token: ``tokens`` (prompt, then answer; int64),
            ``sampled_logprobs`` (float32, under the distribution that the token was drawn from; 0 on the
            prompt), ``mask`` (true on the answer, its stop token included). Per row: ``finished`` (bool:
            ended by a stop token, not by its length).

        Raises:
            DataError: a prompt is empty, or longer with its answer than the model's positions.
            ConfigError: the cache cannot hold the longest sequence.
            ModelError: the model computes no finite logits.
        """
        self._check_lengths(prompts, sampling)
        answers = Answers(prompts, sampling, samples_per_prompt, self._model.head_weight.device)
        if len(prompts) == 0:
            return answers.batch()
        with torch.inference_mode():
            cache = self._make_cache(prompts, sampling, len(answers.ids))
            run = _Run(
                self._model,
                cache,
                answers,
                sampling=sampling,
                prefill_tokens=self._prefill_tokens,
                seed=seed,
                step=step,
            )
            schedule = Scheduler(
                num_prompts=len(prompts), samples_per_prompt=samples_per_prompt, num_slots=cache.num_slots
            )
            run.apply(schedule.advance())
            while schedule.running:
                ended = run.decode(schedule.running)
                run.apply(schedule.advance(ended))
                if ended and on_progress:
                    on_progress(schedule.num_ended, len(answers.ids))
        return answers.batch()

    def _check_lengths(self, prompts: Batch, sampling: Sampling) -> None:
        limit = self._model.shape.max_positions
        for row, length in zip(prompts.ids, prompts.lengths.tolist(), strict=True):
            if length == 0:
                raise DataError(f"prompt {row} has no tokens; generation needs at least one to start from")
            if length + sampling.max_new_tokens > limit:
                raise DataError(
                    f"prompt {row} has {length} tokens; with max_new_tokens {sampling.max_new_tokens} it may "
                    f"reach {length + sampling.max_new_tokens}, but the model has {limit} positions. "
                    f"max_new_tokens {max(0, limit - length)} would fit"
                )

    def _make_cache(self, prompts: Batch, sampling: Sampling, num_sequences: int) -> Cache:
        """As many slots for the longest sequence as the memory holds, at most one per sequence."""
        shape, weight = self._model.shape, self._model.head_weight
        longest = int(prompts.lengths.argmax())
        prompt_length = int(prompts.lengths[longest])
        capacity = prompt_length + sampling.max_new_tokens
        slot_bytes = capacity * token_bytes(shape, weight.dtype)
        num_slots = min(num_sequences, self._max_cache_bytes // slot_bytes)
        if num_slots == 0:
            raise ConfigError(
                f"the generation cache of {self._max_cache_bytes} bytes cannot hold prompt "
                f"{prompts.ids[longest]}: {prompt_length} tokens + max_new_tokens {sampling.max_new_tokens} "
                f"= {capacity} tokens, times {token_bytes(shape, weight.dtype)} bytes (keys and values, "
                f"{shape.num_layers} layers x {shape.num_kv_heads} kv heads x {shape.head_dim} x "
                f"{weight.dtype.itemsize} bytes) = {slot_bytes} bytes"
            )
        return Cache(shape, num_slots=num_slots, capacity=capacity, dtype=weight.dtype, device=weight.device)


class _Run:
    """The tensors of one generate call, and the two things done with them: apply changes, decode a token."""

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        answers: Answers,
        *,
        sampling: Sampling,
        prefill_tokens: int,
        seed: int,
        step: int,
    ) -> None:
        self._forward, self._head = for_decoding(model, cache.num_slots)
        self._cache = cache
        self._answers = answers
        self._sampling = sampling
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._step = step

    def apply(self, changes: Changes) -> None:
        """Bring the cache into the state that the scheduler wants."""
        self._copy(changes.early_copies)
        lengths = [self._num_cached(prefill.sequence) for prefill in changes.prefills]
        for chunk in chunks(changes.prefills, lengths, self._prefill_tokens):
            self._prefill(chunk)
        self._copy(changes.late_copies)

    def _copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._cache.copy(copy.source, copy.target, self._num_cached(copy.sequence))

    def _num_cached(self, sequence: int) -> int:
        """Tokens of a sequence in the cache: all but its newest, which the next decode step computes."""
        return self._answers.length(sequence) - 1

    def _prefill(self, prefills: Sequence[Prefill]) -> None:
        """Compute the prompts of the sequences, all but their last tokens, into their slots."""
        device = self._answers.ids.device
        tokens = [self._answers.prompt(p.sequence)[:-1] for p in prefills]
        lengths = torch.tensor([len(t) for t in tokens])
        if lengths.sum() == 0:
            return
        positions = torch.cat([torch.arange(len(t)) for t in tokens]).to(device)
        slots = torch.tensor([p.target for p in prefills]).repeat_interleave(lengths).to(device)
        attention = PrefillAttention(
            self._cache, slots * self._cache.capacity + positions, PackedAttention(lengths, self._cache.shape)
        )
        self._forward(torch.cat(tokens).to(device), positions, attention)

    def decode(self, running: Sequence[int]) -> list[int]:
        """Draw the next token of the sequences in the slots; return the slots whose answer ended."""
        answers, device = self._answers, self._answers.ids.device
        rows = torch.tensor(running, device=device)
        tokens, positions = answers.last(rows)
        attention = DecodeAttention(self._cache, positions)
        logits = self._head(self._forward(tokens, positions, attention))
        count = draws_per_token(logits.shape[-1])
        numbers = uniforms(self._seed, self._step, answers.ids[rows], positions + 1, count)
        ended = answers.append(rows, *draw(logits, self._sampling, numbers))
        return ended.nonzero()[:, 0].tolist()
