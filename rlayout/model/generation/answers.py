"""What was sampled so far, and the batch that comes out of it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.spec.sampling import Sampling


class Answers:
    """Growing answers of all sequences of a call, in the order of the result's rows.

    Attributes:
        ids: ids of the rows [N], int64.
        counts: tokens sampled so far [N], int64.
        finished: whether a stop token ended the answer [N], bool.
    """

    def __init__(
        self, prompts: Batch, sampling: Sampling, samples_per_prompt: int, device: torch.device
    ) -> None:
        prompt_ids = torch.tensor(prompts.ids, dtype=torch.int64, device=device)
        sample = torch.arange(samples_per_prompt, device=device)
        self.ids = (prompt_ids[:, None] * samples_per_prompt + sample).flatten()
        self.counts = torch.zeros_like(self.ids)
        self.finished = torch.zeros_like(self.ids, dtype=torch.bool)
        self._prompts = prompts.only(["prompt_tokens"])
        self._prompt_tokens = prompts.per_row("prompt_tokens")
        self._samples_per_prompt = samples_per_prompt
        self._max_new_tokens = sampling.max_new_tokens
        self._stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._prompt_lengths = prompts.lengths.to(device).repeat_interleave(samples_per_prompt)
        # Column 0 is the prompt's last token, column i the answer's i-th.
        size = (len(self.ids), 1 + sampling.max_new_tokens)
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(size, dtype=torch.float32, device=device)
        last = [int(prompt[-1]) for prompt in self._prompt_tokens]
        self._tokens[:, 0] = torch.tensor(last, device=device).repeat_interleave(samples_per_prompt)

    def prompt(self, row: int) -> Tensor:
        """Tokens of the row's prompt [L], on CPU."""
        return self._prompt_tokens[row // self._samples_per_prompt]

    def length(self, row: int) -> int:
        """Tokens of a row, prompt and answer so far."""
        return len(self.prompt(row)) + int(self.counts[row])

    def last(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The newest token of each row, the prompt's last at first, and its position: two [B] int64."""
        counts = self.counts[rows]
        return self._tokens[rows, counts], self._prompt_lengths[rows] + counts - 1

    def append(self, rows: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Add a token to each of ``rows`` [B]; return which answers ended with it [B], bool."""
        counts = self.counts[rows] + 1
        self.counts[rows] = counts
        self._tokens[rows, counts] = tokens
        self._logprobs[rows, counts] = logprobs
        stopped = torch.isin(tokens, self._stop)
        self.finished[rows] = stopped
        return stopped | (counts == self._max_new_tokens)

    def batch(self) -> Batch:
        """The result: prompts followed by answers, on CPU."""
        samples = self._samples_per_prompt
        repeated = self._prompts.select([p for p in range(len(self._prompts)) for _ in range(samples)])
        counts = self.counts.cpu()
        lengths = repeated.lengths + counts
        starts = lengths.cumsum(0) - lengths
        place = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        mask = place >= repeated.lengths.repeat_interleave(lengths)
        tokens = torch.empty(len(mask), dtype=torch.int64)
        logprobs = torch.zeros(len(mask))
        answered = torch.arange(1, self._tokens.shape[1]) <= counts[:, None]
        tokens[~mask] = repeated.tokens["prompt_tokens"]
        tokens[mask] = self._tokens[:, 1:].cpu()[answered]
        logprobs[mask] = self._logprobs[:, 1:].cpu()[answered]
        return Batch(
            ids=tuple(self.ids.tolist()),
            groups=repeated.ids,
            lengths=lengths,
            tokens={"tokens": tokens, "sampled_logprobs": logprobs, "mask": mask},
            rows={"finished": self.finished.cpu().clone()},
        )
