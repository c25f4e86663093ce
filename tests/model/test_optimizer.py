"""The flat space and AdamW of one rank against torch.optim.AdamW."""

import pytest
import torch
from torch import nn

from rlayout.errors import TrainingError
from rlayout.model import native
from rlayout.model.flat import FlatTable
from rlayout.model.optimizer import ShardedAdamW
from rlayout.spec.optimization import Optimization
from tests.model.tiny import tiny_model


def gradients(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def test_table_names_every_element_once() -> None:
    model = tiny_model()
    table = FlatTable(model.named_parameters())
    assert table.numel == sum(p.numel() for p in model.parameters())
    for num_slices in (1, 2, 3, 7):
        size = table.padded(num_slices) // num_slices
        pieces = [p for i in range(num_slices) for p in table.pieces(i * size, (i + 1) * size)]
        assert sum(p.stop - p.start for p in pieces) == table.numel
        assert all(table.at(p.start) == table.at(p.stop - 1) == p.entry for p in pieces)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_adopted_parameters_keep_their_values_and_share_the_buffer(num_slices: int) -> None:
    model, before = tiny_model(), tiny_model()
    table = FlatTable(model.named_parameters())
    flat = table.adopt(model, num_slices)
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)
    flat.zero_()
    assert all((p == 0).all() for p in model.parameters())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.5])
def test_equals_torch_adamw(compiled: bool, max_grad_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no C compiler")
    settings = Optimization(
        learning_rate=1e-2,
        schedule="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        betas=(0.8, 0.95),
        max_grad_norm=max_grad_norm,
    )
    ours, theirs = tiny_model(), tiny_model()
    optimizer = ShardedAdamW(ours, settings, total_steps=5, group=None)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for step in range(5):
        drawn = gradients(ours, step)
        flat = optimizer.new_gradient()
        for entry in optimizer.table.entries:
            optimizer.table.view(flat, entry).copy_(drawn[entry.name])
        update = optimizer.step(flat)
        for name, parameter in theirs.named_parameters():
            parameter.grad = drawn[name].clone()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
        for group in reference.param_groups:
            group["lr"] = settings.rate(step, 5)
        reference.step()
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert update.learning_rate == settings.rate(step, 5)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_weights_follow_float32_masters() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    # Rates far below bfloat16's resolution: without masters nothing would ever move.
    optimizer = ShardedAdamW(model, Optimization(learning_rate=1e-5), total_steps=1, group=None)
    before = optimizer.master.clone()
    for _ in range(100):
        optimizer.step(torch.ones_like(optimizer.new_gradient()))
    torch.testing.assert_close(before - optimizer.master, torch.full_like(before, 1e-3), rtol=0, atol=1e-5)
    assert torch.equal(optimizer.weights, optimizer.master.bfloat16())
    for entry, parameter in zip(optimizer.table.entries, model.parameters(), strict=True):
        assert torch.equal(optimizer.table.view(optimizer.master, entry).bfloat16(), parameter)


def test_float32_weights_are_their_own_masters() -> None:
    optimizer = ShardedAdamW(tiny_model(), Optimization(), total_steps=1, group=None)
    assert optimizer.master.data_ptr() == optimizer.weights.data_ptr()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_refuses_a_gradient_that_is_not_finite(bad: float) -> None:
    model = tiny_model()
    optimizer = ShardedAdamW(model, Optimization(learning_rate=1.0), total_steps=1, group=None)
    before = optimizer.weights.clone()
    flat = optimizer.new_gradient()
    entry = optimizer.table.entries[4]
    flat[entry.offset + 1] = bad
    with pytest.raises(TrainingError, match=entry.name.replace(".", r"\.")):
        optimizer.step(flat)
    assert torch.equal(optimizer.weights, before)
    assert optimizer.num_updates == 0
    assert (optimizer.first_moment == 0).all()


def test_a_norm_beyond_float32_is_clipped_not_refused() -> None:
    optimizer = ShardedAdamW(tiny_model(), Optimization(), total_steps=1, group=None)
    update = optimizer.step(torch.full_like(optimizer.new_gradient(), 1e30))
    assert update.grad_norm > 1e31
    assert optimizer.weights.isfinite().all()
