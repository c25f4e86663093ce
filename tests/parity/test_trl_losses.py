"""Our GRPO against TRL's own code on the same tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlayout.algorithms import Grpo
from rlayout.algorithms.advantages import group_advantages
from rlayout.data.batch import Batch
from rlayout.data.objective import LossOutput, TokenScores
from rlayout.spec.sampling import Sampling
from tests.algorithms.cases import random_batch, totals_of

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

# TRL's name of each aggregation; "dapo" divides by the tokens of the whole generation batch.
LOSS_TYPES = [("grpo", "sequence_mean"), ("bnpo", "token_mean"), ("dapo", "token_mean")]


def answers_only() -> Batch:
    """Rows whose mask is true, then false (the padding of a short answer), as TRL packs answers."""
    batch = random_batch([7, 3, 5, 1, 6, 4], seed=11)
    answered = [4, 3, 5, 1, 2, 3]
    mask = torch.cat([torch.arange(n) < a for n, a in zip(batch.lengths.tolist(), answered, strict=True)])
    return batch.with_values(tokens={"mask": mask})


def trl_loss(batch: Batch, config: Grpo, loss_type: str) -> tuple[float, Tensor, dict[str, float]]:
    """TRL's loss, its gradient by the packed log-probabilities, and its metrics.

    Its method runs on a stand-in for the trainer, and the model's forward is replaced by the log-probabilities.
    """
    padded = {key: pad_sequence(batch.per_row(key), batch_first=True) for key in batch.tokens}
    logprobs = padded["logprobs"].requires_grad_()
    mask = padded["mask"].long()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        beta=config.kl_coef,
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
        loss_type=loss_type,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, padded["entropy"], None),
        _metrics=_Lists(),
    )
    inputs: dict[str, Any] = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch.rows["advantages"],
        "old_per_token_logps": padded["sampled_logprobs"],
        "ref_per_token_logps": padded["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    packed = torch.cat([row[:n] for row, n in zip(logprobs.grad, batch.lengths.tolist(), strict=True)])
    return loss.item(), packed, {name: values[0] for name, values in trainer._metrics["train"].items()}


class _Lists(dict):
    """Dictionaries of lists made on first use."""

    def __missing__(self, key: str) -> Any:
        self[key] = _Lists() if key in ("train", "eval") else []
        return self[key]


def our_loss(batch: Batch, config: Grpo) -> tuple[LossOutput, Tensor]:
    loss = config.build(Sampling()).losses["train"]
    logprobs = batch.tokens["logprobs"].clone().requires_grad_()
    output = loss(TokenScores(logprobs, batch.tokens["entropy"]), batch, totals_of(batch))
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


@pytest.mark.parametrize(("loss_type", "aggregation"), LOSS_TYPES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.2, 0.2), (0.1, 0.28)])
def test_loss_gradient_and_figures(loss_type, aggregation, kl_coef, clip_low, clip_high):
    batch = answers_only()
    config = Grpo(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, aggregation=aggregation)
    output, gradient = our_loss(batch, config)
    expected, expected_gradient, metrics = trl_loss(batch, config, loss_type)

    # float64 on both sides, but dapo's divisor and TRL's counts pass through float32
    assert output.loss.item() == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    names = {
        "entropy": "entropy",
        "clip_low": "clip_ratio/low_mean",
        "clip_high": "clip_ratio/high_mean",
        **({"kl_ref": "kl"} if kl_coef else {}),
    }
    for ours, theirs in names.items():
        assert output.statistics[ours].figure == pytest.approx(metrics[theirs], rel=1e-6), ours
    assert output.statistics["clip_low"].value > 0
    assert output.statistics["clip_high"].value > 0


@pytest.fixture(scope="module")
def tiny_trainer(tmp_path_factory):
    """TRL's own trainer over a random model of one small layer, whose rewards are set by the test."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    rewards: list[float] = []
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: list(rewards),
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=2,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tokenizer,
    )
    return trainer, rewards


@pytest.mark.parametrize(("scale_rewards", "normalise_std"), [("group", True), ("none", False)])
@pytest.mark.parametrize(
    "values", [[1, 0, 0, 1, 0.5, 2, -3, 0.25], [1, 1, 1, 1, 0, 0, 0, 1], [0.0] * 8, [0.1] * 4 + [1, 2, 3, 4]]
)
def test_advantages(tiny_trainer, scale_rewards, normalise_std, values):
    trainer, rewards = tiny_trainer
    rewards[:] = values
    trainer.scale_rewards = scale_rewards
    prompts = [{"prompt": p} for p in "aaaabbbb"]
    expected = trainer._generate_and_score_completions(prompts)["advantages"]
    found = group_advantages(
        torch.tensor(values, dtype=torch.float32),
        (0,) * 4 + (1,) * 4,
        normalise_std=normalise_std,
        std_floor=Grpo().std_floor,
    )
    # TRL computes in float32: a few roundings of 6e-8 of values of about 1.
    torch.testing.assert_close(found, expected.to(torch.float32), rtol=1e-6, atol=1e-6)
