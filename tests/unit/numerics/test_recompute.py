"""Recomputation changes the saved tensors and no bit of a gradient."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from shardwright.config.recipe import RecomputeKind
from shardwright.numerics.recompute import build_recompute_runner

B = 2
T = 128
D = 32
H = 4


class TinyBlock(nn.Module):
    """Norm, attention and gated products, as in a decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(D) + 0.5)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D)
        self.gate = nn.Linear(D, 4 * D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BTD: Tensor, scale: float) -> Tensor:
        normed = F.rms_norm(x_BTD, (D,)) * self.norm
        q, k, v = self.qkv(normed).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        )
        x_BTD = x_BTD + self.out(attended) * scale
        return x_BTD + self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def run_blocks(
    kind: RecomputeKind, dtype: torch.dtype, num_blocks: int = 3
) -> tuple[Tensor, list[Tensor], int]:
    """Return the loss, the gradients, and the bytes that are saved for the backward pass."""
    torch.manual_seed(0)
    blocks = [TinyBlock().to(dtype) for _ in range(num_blocks)]
    x_BTD = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    runner = build_recompute_runner(kind)
    parameters = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    saved_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # Nothing is freed before the backward pass, so no address occurs twice.
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = x_BTD
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in blocks:
            hidden = block(hidden, 0.5) if runner is None else runner(block, hidden, 0.5)
    num_bytes = sum(saved_bytes.values())
    saved_bytes.clear()
    loss = hidden.square().sum()
    loss.backward()
    gradients = [p.grad for block in blocks for p in block.parameters()] + [x_BTD.grad]
    return loss.detach(), [g for g in gradients if g is not None], num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_loss_and_gradients_are_equal_bit_by_bit(kind: RecomputeKind, dtype: torch.dtype) -> None:
    loss, gradients, _ = run_blocks("none", dtype)
    loss_again, gradients_again, _ = run_blocks(kind, dtype)
    assert torch.equal(loss, loss_again)
    assert len(gradients) == len(gradients_again) == 3 * 10 + 1
    assert all(
        torch.equal(plain, recomputed)
        for plain, recomputed in zip(gradients, gradients_again, strict=True)
    )


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.products += name.startswith(("aten.mm", "aten.addmm"))
        self.attentions += name.startswith("aten._scaled_dot_product") and "backward" not in name
        self.norms += (
            name.startswith(("aten.rsqrt", "aten._fused_rms_norm.")) and "backward" not in name
        )
        return func(*args, **(kwargs or {}))


def count_operations(kind: RecomputeKind) -> tuple[int, int, int]:
    with _Calls() as calls:
        run_blocks(kind, torch.float32)
    return calls.products, calls.attentions, calls.norms


def test_selective_repeats_neither_products_nor_attention() -> None:
    products, attentions, norms = count_operations("none")
    assert count_operations("selective") == (products, attentions, 2 * norms)
    full_products, full_attentions, full_norms = count_operations("full")
    assert (full_attentions, full_norms) == (2 * attentions, 2 * norms)
    assert full_products > products


class _LiveBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Track the bytes of live memory that operations allocated, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def test_peak_memory_decreases_from_none_to_selective_to_full() -> None:
    peaks = {}
    kinds: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    for kind in kinds:
        gc.collect()
        with _LiveBytes() as bytes_:
            run_blocks(kind, torch.float32, num_blocks=8)
        peaks[kind] = bytes_.peak
    assert peaks["full"] < 0.6 * peaks["selective"]
    assert peaks["selective"] < 0.8 * peaks["none"]


def test_full_saves_only_inputs() -> None:
    *_, all_bytes = run_blocks("none", torch.float32)
    *_, input_bytes = run_blocks("full", torch.float32)
    assert input_bytes <= 3 * B * T * D * 4 + 64
    assert input_bytes < all_bytes / 10


def test_none_runs_the_function_itself() -> None:
    assert build_recompute_runner("none") is None


def test_evaluation_saves_nothing() -> None:
    runner = build_recompute_runner("selective")
    assert runner is not None
    with torch.no_grad():
        assert not runner(TinyBlock(), torch.randn(B, T, D), 0.5).requires_grad


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_an_error_leaves_no_mode_and_no_hook_behind(kind: RecomputeKind) -> None:
    runner = build_recompute_runner(kind)
    assert runner is not None
    x_BTD = torch.randn(B, T, D, requires_grad=True)

    def fail(x_BTD: Tensor) -> Tensor:
        raise MemoryError("no memory for the product")

    with pytest.raises(MemoryError, match="no memory") as raised:
        runner(fail, x_BTD)
    assert _len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert (
        raised.traceback[-1].name == "fail"
    )  # the error, and with it torch's frames, still exists


@pytest.mark.long
def test_compiled_attention_runs_once_under_selective_and_twice_under_full() -> None:
    torch.manual_seed(0)
    block = TinyBlock()
    x_BTD = torch.randn(B, T, D, requires_grad=True)
    counts = {}
    kinds: tuple[RecomputeKind, ...] = ("selective", "full")
    for kind in kinds:
        runner = build_recompute_runner(kind)
        assert runner is not None

        @torch.compile
        def compiled(x_BTD: Tensor, run: Any = runner) -> Any:
            return run(block, x_BTD, 0.5)

        compiled(x_BTD).sum().backward()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as profile:
            compiled(x_BTD).sum().backward()
        counts[kind] = {event.key: event.count for event in profile.key_averages()}[
            "aten::_scaled_dot_product_flash_attention_for_cpu"
        ]
    assert counts == {"selective": 1, "full": 2}
