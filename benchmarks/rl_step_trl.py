"""TRL's side of rl_step.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rl_step_common import LEARNING_RATE, SOURCE, Order, make_prompts, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from rlayout.model.huggingface import load_model, load_tokenizer, save_model

SECONDS: dict[str, list[float]] = {"generate": [], "step": [], "processor": []}


class Timed(GRPOTrainer):
    def _generate(self, *arguments: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        found = super()._generate(*arguments, **settings)
        SECONDS["generate"].append(time.perf_counter() - start)
        return found


class Clock(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._start_processor = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        SECONDS["step"].append(time.perf_counter() - self._start)
        SECONDS["processor"].append(time.process_time() - self._start_processor)
        took = f"{SECONDS['step'][-1]:.1f} s ({SECONDS['processor'][-1]:.1f} s of processor)"
        print(f"trl step {len(SECONDS['step']) - 1}: {took}", flush=True)


def main() -> None:
    order = Order.read()
    torch.set_num_threads(order.threads)
    folder = Path(order.result).parent
    texts = _write_model(order, folder / "model")
    rewards: Any = _rewards
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=order.torch_dtype),
        args=_config(order, folder / "out"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        reward_funcs=rewards,
        callbacks=[Clock()],
    )
    trainer.train()
    Path(order.result).write_text(json.dumps(SECONDS))


def _write_model(order: Order, folder: Path) -> list[str]:
    """Write the weights as a transformers folder; return the prompts as text of the same tokens."""
    model = load_model(SOURCE, dtype=order.torch_dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_model(folder, model.shape, weights, load_tokenizer(SOURCE))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [
        tokens.tolist() for tokens in make_prompts(order, model.shape.max_positions).per_row("prompt_tokens")
    ]
    texts = [tokenizer.decode(tokens) for tokens in rows]
    assert [tokenizer(text)["input_ids"] for text in texts] == rows
    return texts


def _config(order: Order, folder: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,  # the weights have their dtype already; autocast would only add casts
        per_device_train_batch_size=8,
        gradient_accumulation_steps=order.prompts * order.samples // 8,
        num_generations=order.samples,
        max_completion_length=order.new_tokens,
        generation_kwargs={"min_new_tokens": order.new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        gradient_checkpointing=False,
        max_steps=order.runs + 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward(answer) for answer in completion_ids]


if __name__ == "__main__":
    main()
