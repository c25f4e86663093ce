"""Log-probabilities and entropies of the tokens of a batch, without ever holding all of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.data.objective import TokenScores
from rlayout.errors import DataError
from rlayout.model.attention import PackedAttention
from rlayout.model.head import head_scores
from rlayout.model.micro_batches import split
from rlayout.model.transformer import Transformer
from rlayout.spec.sampling import Sampling


def score(model: Transformer, batch: Batch, *, temperature: float = 1.0, need_gradient: bool) -> TokenScores:
    """Score the tokens under ``batch.tokens["mask"]`` given those before them in their row.

    Args:
        model: the model to ask.
        batch: one micro-batch, with ``tokens`` [T] int64 and ``mask`` [T] bool.
        temperature: the distribution is softmax(logits / temperature), computed in float32.
        need_gradient: whether the log-probabilities carry a gradient to the model's parameters.

    Raises:
        DataError: the mask covers the first token of a row, which has no log-probability.
    """
    mask = batch.tokens["mask"]
    check_mask(batch)
    scored = mask.nonzero().flatten()
    precise = torch.promote_types(model.head_weight.dtype, torch.float32)
    logprobs = torch.zeros(len(mask), dtype=precise, device=mask.device)
    entropy = torch.zeros_like(logprobs)
    if not len(scored):
        return TokenScores(logprobs, entropy)
    tokens = batch.tokens["tokens"]
    with torch.set_grad_enabled(need_gradient):
        attention = PackedAttention(batch.lengths, model.shape)
        hidden = model.forward(tokens, positions(batch), attention)
        found, spread = head_scores(hidden[scored - 1], model.head_weight, tokens[scored], temperature)
        return TokenScores(logprobs.index_copy(0, scored, found), entropy.index_copy(0, scored, spread))


def infer(model: Transformer, batch: Batch, *, sampling: Sampling, micro_batch_tokens: int) -> Tensor:
    """Log-probabilities of the tokens under ``mask`` in the sampling distribution [T], float32, 0 elsewhere.

    Raises:
        DataError: greedy sampling, or top-k or top-p, whose log-probabilities are not computed here.
    """
    if sampling.greedy or sampling.truncated:
        raise DataError(
            f"log-probabilities of given tokens are computed under a temperature above 0 without top-k and "
            f"top-p, got temperature {sampling.temperature}, top_k {sampling.top_k}, top_p {sampling.top_p}"
        )
    rows = list(batch.tokens["mask"].new_zeros(0, dtype=torch.float32).split(0)) * len(batch)
    for part in split(batch.lengths.tolist(), micro_batch_tokens):
        micro = batch.select(part)
        scores = score(model, micro, temperature=sampling.temperature, need_gradient=False)
        for row, values in zip(part, scores.logprobs.split(micro.lengths.tolist()), strict=True):
            rows[row] = values
    return torch.cat(rows) if rows else torch.zeros(0)


def check_mask(batch: Batch) -> None:
    """Refuse a mask that covers the first token of a row.

    Raises:
        DataError: it does; the message names the row.
    """
    starts = batch.offsets[:-1].to(batch.tokens["mask"].device)
    wrong = batch.tokens["mask"][starts[batch.lengths > 0]].nonzero().flatten()
    if len(wrong):
        raise DataError(
            f"row {batch.ids[int(wrong[0])]}: the mask covers the row's first token, which has no "
            "log-probability because nothing stands before it; a mask starts at the second token or later"
        )


def positions(batch: Batch) -> Tensor:
    """Place of each token in its row, from 0 [T], int64."""
    starts = batch.offsets[:-1].repeat_interleave(batch.lengths)
    return (torch.arange(batch.num_tokens) - starts).to(batch.tokens["tokens"].device)
