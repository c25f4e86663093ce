"""Generation on tiny models: what comes out, that it does not depend on the batch, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.errors import ConfigError, DataError, ModelError
from rlayout.model.attention import PackedAttention
from rlayout.model.generation import Generator, cache
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.sampling import Sampling

LLAMA = ModelShape(
    family="llama",
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)
SHAPES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(
        LLAMA, family="qwen2", qkv_bias=True, tie_embeddings=True, sliding_window=6, sliding_layers=(1, 2)
    ),
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, head_dim=12),
    "mistral": dataclasses.replace(LLAMA, family="mistral", sliding_window=4, sliding_layers=(0, 1, 2)),
}
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # of LLAMA in float32
SAMPLING = Sampling(max_new_tokens=20, temperature=0.9, stop_token_ids=(5, 6, 7))
PLENTY = 1 << 30


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    model = Transformer(SHAPES[family], dtype=dtype)
    model.init_weights(seed, std=0.3)
    return model


def some_prompts(lengths: tuple[int, ...] = (5, 1, 17, 9, 12), first_id: int = 3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(range(first_id, first_id + len(lengths)))
    tokens = torch.randint(10, 101, (sum(lengths),), generator=generator)
    return Batch(
        ids=ids, groups=ids, lengths=torch.tensor(lengths, dtype=torch.int64), tokens={"prompt_tokens": tokens}
    )


def generate(model: Transformer, prompts: Batch, sampling: Sampling = SAMPLING, **changes: Any) -> Batch:
    settings: dict[str, Any] = {"samples_per_prompt": 3, "seed": 1, "step": 2} | changes
    memory = settings.pop("max_cache_bytes", PLENTY)
    prefill = settings.pop("prefill_tokens", 4096)
    generator = Generator(model, max_cache_bytes=memory, prefill_tokens=prefill)
    return generator.generate(prompts, sampling=sampling, **settings)


def answers_by_id(batch: Batch) -> dict[int, list[int]]:
    return {row: tokens.tolist() for row, tokens in zip(batch.ids, batch.per_row("tokens"), strict=True)}


def recomputed_logprobs(model: Transformer, batch: Batch, temperature: float) -> Tensor:
    """Log-probability of each token given those before it, by one forward pass [T]; 0 for first tokens."""
    positions = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
    tokens = batch.tokens["tokens"]
    hidden = model(tokens, positions, PackedAttention(batch.lengths, model.shape))
    logprobs = (hidden @ model.head_weight.T / temperature).log_softmax(-1)
    found = torch.zeros(len(tokens))
    found[1:] = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
    return found


def test_rows_and_keys():
    prompts = some_prompts()
    batch = generate(tiny_model(), prompts)
    assert batch.ids == tuple(p * 3 + j for p in prompts.ids for j in range(3))
    assert batch.groups == tuple(p for p in prompts.ids for _ in range(3))
    assert {k: v.dtype for k, v in batch.tokens.items()} == {
        "tokens": torch.int64,
        "sampled_logprobs": torch.float32,
        "mask": torch.bool,
    }
    starts = [p.tolist() for p in prompts.per_row("prompt_tokens") for _ in range(3)]
    rows = zip(
        starts,
        batch.per_row("tokens"),
        batch.per_row("mask"),
        batch.per_row("sampled_logprobs"),
        batch.rows["finished"],
        strict=True,
    )
    for start, tokens, mask, logprobs, finished in rows:
        answer = tokens[len(start) :].tolist()
        assert tokens[: len(start)].tolist() == start
        assert mask.tolist() == [False] * len(start) + [True] * len(answer)
        assert (logprobs[: len(start)] == 0).all()
        assert (logprobs[len(start) :] < 0).all()
        assert not {5, 6, 7} & set(answer[:-1])
        assert bool(finished) == (answer[-1] in (5, 6, 7))
        assert finished or len(answer) == 20
    assert 0 < sum(batch.rows["finished"]) < 15  # both endings were seen


@pytest.mark.parametrize("family", SHAPES)
def test_tokens_do_not_depend_on_who_runs_together(family):
    model, prompts = tiny_model(family), some_prompts()
    expected = answers_by_id(generate(model, prompts))
    token_bytes = cache.token_bytes(model.shape, torch.float32)
    for slots in (1, 2, 4, 7):
        few = generate(model, prompts, max_cache_bytes=slots * 37 * token_bytes, prefill_tokens=slots * 5)
        assert answers_by_id(few) == expected
    for order in ((4, 2, 0, 1, 3), (3,), (1, 2)):
        some = answers_by_id(generate(model, prompts.select(order)))
        assert some == {row: expected[row] for row in some}


def test_many_draws_do_not_depend_on_the_batch():
    model = tiny_model()
    prompts = some_prompts((6,) * 40)
    sampling = Sampling(max_new_tokens=50, temperature=1.3)
    together = answers_by_id(generate(model, prompts, sampling))
    slots = generate(model, prompts, sampling, max_cache_bytes=11 * 56 * TOKEN_BYTES)
    assert answers_by_id(slots) == together  # 6000 draws


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 3}])
def test_seed_and_step_change_the_draws(change):
    model, prompts = tiny_model(), some_prompts()
    assert answers_by_id(generate(model, prompts)) != answers_by_id(generate(model, prompts, **change))


def test_samples_of_a_prompt_differ():
    answers = answers_by_id(generate(tiny_model(), some_prompts((4,)), samples_per_prompt=8))
    assert len({tuple(tokens) for tokens in answers.values()}) == 8


@pytest.mark.parametrize("family", SHAPES)
def test_logprobs_agree_with_a_forward_pass(family):
    model = tiny_model(family)
    batch = generate(model, some_prompts())
    expected = recomputed_logprobs(model, batch, SAMPLING.temperature)
    mask = batch.tokens["mask"]
    # Float32 sums of a few dozen terms in another order, through three layers.
    assert (batch.tokens["sampled_logprobs"] - expected)[mask].abs().max() < 1e-4


def test_packed_matrices_compute_the_same_in_bfloat16():
    prompts = some_prompts((20, 30))
    sampling = Sampling(max_new_tokens=30, temperature=1.0)
    batch = generate(tiny_model("qwen2", torch.bfloat16), prompts, sampling)
    exact = tiny_model("qwen2", torch.bfloat16).float()
    mask = batch.tokens["mask"]
    error = (batch.tokens["sampled_logprobs"] - recomputed_logprobs(exact, batch, 1.0))[mask].abs()
    plain = tiny_model("qwen2", torch.bfloat16)
    rounding = (recomputed_logprobs(plain, batch, 1.0) - recomputed_logprobs(exact, batch, 1.0))[mask].abs()
    # As far from float32 as the model's own bfloat16 forward pass.
    assert error.mean() < 1.3 * rounding.mean()


def test_a_prompt_is_computed_once_for_all_its_samples():
    model, prompts = tiny_model(), some_prompts()
    computed: list[int] = []
    model.embedding.register_forward_hook(lambda _module, inputs, _output: computed.append(len(inputs[0])))
    sampling = Sampling(max_new_tokens=10)
    for slots in (15, 4):
        computed.clear()
        generate(model, prompts, sampling, max_cache_bytes=slots * 27 * TOKEN_BYTES)
        # Prompts but for their last tokens, and 10 decode steps of each of 15 sequences.
        assert sum(computed) == prompts.num_tokens - len(prompts) + 10 * 15


def test_a_free_slot_is_taken_at_once():
    model = tiny_model()
    widths: list[int] = []
    model.embedding.register_forward_hook(lambda _module, inputs, _output: widths.append(len(inputs[0])))
    batch = generate(model, some_prompts((1,) * 12), samples_per_prompt=1, max_cache_bytes=4 * 21 * TOKEN_BYTES)
    answer_tokens = int(batch.tokens["mask"].sum())
    assert sum(widths) == answer_tokens
    full = [w == 4 for w in widths]
    assert full == sorted(full, reverse=True)  # all slots work until nothing waits


def test_greedy_takes_the_best_token():
    model, prompts = tiny_model(), some_prompts()
    batch = generate(model, prompts, SAMPLING.as_greedy(), samples_per_prompt=2)
    answers = batch.per_row("tokens")
    assert all(torch.equal(a, b) for a, b in zip(answers[::2], answers[1::2], strict=True))
    assert (batch.tokens["sampled_logprobs"] == 0).all()


def test_without_stop_tokens_every_answer_is_full():
    batch = generate(tiny_model(), some_prompts(), Sampling(max_new_tokens=7))
    assert batch.tokens["mask"].sum() == 15 * 7
    assert not batch.rows["finished"].any()  # pyright: ignore[reportAttributeAccessIssue]


def test_progress_is_told():
    calls: list[tuple[int, int]] = []
    generate(tiny_model(), some_prompts(), on_progress=lambda ended, total: calls.append((ended, total)))
    assert calls == sorted(set(calls))
    assert calls[-1] == (15, 15)


def test_results_can_be_used_in_training():
    batch = generate(tiny_model(), some_prompts())
    weight = torch.ones(1, requires_grad=True)
    (weight * batch.tokens["sampled_logprobs"]).sum().backward()
    assert weight.grad is not None


def test_no_prompts_no_answers():
    batch = generate(tiny_model(), some_prompts(()))
    assert len(batch) == 0
    assert set(batch.keys) == {"tokens", "sampled_logprobs", "mask", "finished"}


def test_the_cache_is_freed(monkeypatch):
    made: list[weakref.ref[Tensor]] = []
    init = cache.Cache.__init__

    def remember(self: cache.Cache, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(weakref.ref(self.keys[0]))

    monkeypatch.setattr(cache.Cache, "__init__", remember)
    gc.disable()  # freed at once, not when the collector comes around
    try:
        generator = Generator(tiny_model(), max_cache_bytes=PLENTY)
        generator.generate(some_prompts(), sampling=SAMPLING, samples_per_prompt=1, seed=0, step=0)
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()


def test_too_long_for_the_model():
    sampling = Sampling(max_new_tokens=112)
    with pytest.raises(DataError, match="prompt 5 has 17 tokens; with max_new_tokens 112 it may reach 129"):
        generate(tiny_model(), some_prompts(), sampling)
    generate(tiny_model(), some_prompts((16,)), sampling, samples_per_prompt=1)


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="prompt 4 has no tokens"):
        generate(tiny_model(), some_prompts((2, 0)))


def test_a_cache_too_small_for_one_sequence_says_the_arithmetic():
    needed = 37 * TOKEN_BYTES
    generate(tiny_model(), some_prompts(), max_cache_bytes=needed)
    with pytest.raises(
        ConfigError, match=rf"prompt 5: 17 tokens .* = 37 tokens, times 384 .* = {needed} bytes"
    ):
        generate(tiny_model(), some_prompts(), max_cache_bytes=needed - 1)


@torch.no_grad()
def test_broken_weights_are_refused():
    model = tiny_model()
    model.norm.weight[3] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        generate(model, some_prompts())
