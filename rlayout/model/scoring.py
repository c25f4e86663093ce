"""Log-probabilities and entropies of the tokens of a batch, without ever holding all of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.data.objective import TokenScores
from rlayout.errors import DataError
from rlayout.model.attention import PackedAttention
from rlayout.model.functional import embedding
from rlayout.model.generation.sampler import restrict
from rlayout.model.head import head_scores
from rlayout.model.micro_batches import split
from rlayout.model.sharing import share, shared_lengths
from rlayout.model.transformer import Transformer
from rlayout.spec.sampling import Sampling

ROWS_OF_LOGITS = 64
"""Rows of logits that exist at once under top-k and top-p."""


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
    precise = torch.promote_types(model.head_weight.dtype, torch.float32)
    logprobs = torch.zeros(len(mask), dtype=precise, device=mask.device)
    entropy = torch.zeros_like(logprobs)
    if not mask.any():
        return TokenScores(logprobs, entropy)
    with torch.set_grad_enabled(need_gradient):
        hidden, scored = _hidden(model, batch)
        targets = batch.tokens["tokens"][scored]
        found, spread = head_scores(hidden, model.head_weight, targets, temperature)
        return TokenScores(logprobs.index_copy(0, scored, found), entropy.index_copy(0, scored, spread))


def infer(model: Transformer, batch: Batch, *, sampling: Sampling, micro_batch_tokens: int) -> Tensor:
    """Log-probabilities of the tokens under ``mask`` in the sampling distribution [T], float32, 0 elsewhere.

    A token that top-k or top-p cuts off has -inf.

    Raises:
        DataError: greedy sampling, which is no distribution, or a mask over the first token of a row.
    """
    if sampling.greedy:
        raise DataError("log-probabilities of given tokens need a temperature above 0, got 0 (greedy)")
    rows = [torch.zeros(0)] * len(batch)
    for part in divide(batch, micro_batch_tokens):
        micro = batch.select(part)
        if sampling.truncated:
            found = _truncated_scores(model, micro, sampling)
        else:
            found = score(model, micro, temperature=sampling.temperature, need_gradient=False).logprobs
        for row, values in zip(part, found.float().split(micro.lengths.tolist()), strict=True):
            rows[row] = values
    return torch.cat(rows) if rows else torch.zeros(0)


@torch.no_grad()
def _truncated_scores(model: Transformer, batch: Batch, sampling: Sampling) -> Tensor:
    """As ``score``, under top-k and top-p, which need whole rows of logits: a few rows at a time."""
    hidden, scored = _hidden(model, batch)
    tokens = batch.tokens["tokens"]
    logprobs = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device)
    for places, states in zip(scored.split(ROWS_OF_LOGITS), hidden.split(ROWS_OF_LOGITS), strict=True):
        weights = restrict(states @ model.head_weight.t(), sampling)
        chosen = weights.gather(-1, tokens[places, None])[:, 0]
        logprobs[places] = (chosen / weights.sum(-1)).log()
    return logprobs


def _hidden(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states that predict the tokens under the mask [N, D], and the places of those tokens [N]."""
    check_mask(batch)
    tokens = batch.tokens["tokens"]
    scored = batch.tokens["mask"].nonzero().flatten()
    sharing = share(batch)
    computed, places = sharing.tokens.to(tokens.device), sharing.places.to(tokens.device)
    attention = PackedAttention(sharing.lengths, model.shape, sharing.parents)
    hidden = model.forward(tokens[computed], positions(batch)[computed], attention)
    return embedding(places[scored - 1], hidden), scored


def divide(batch: Batch, micro_batch_tokens: int) -> list[list[int]]:
    """Rows of each micro-batch in which ``score`` computes at most ``micro_batch_tokens`` tokens."""
    if not len(batch):
        return []
    lengths, shared = batch.lengths.tolist(), shared_lengths(batch)
    return split(lengths, micro_batch_tokens, groups=batch.groups, shared=shared)


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
