"""The test device computes like a CPU, and refuses and records like CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from shardwright.telemetry.trace_summary import read_trace, summarise_trace
from tests.hostcuda import device


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def read_operations(call: Callable[[], object]) -> dict[str, int]:
    """Return the host synchronisations of a call by operation."""
    with device.log_synchronisations() as log:
        call()
    operations: dict[str, int] = {}
    for (operation, _), number in log.items():
        operations[operation] = operations.get(operation, 0) + number
    return operations


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 50)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT)
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.norm(x_BTD + y)).flatten(0, 1), ids_BT.flatten())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_training_has_the_losses_of_a_cpu(options: dict[str, Any]) -> None:
    on_cpu = Network()
    on_cuda = Network()
    on_cuda.load_state_dict(on_cpu.state_dict())
    on_cuda.to("cuda")
    ids_BT = torch.randint(0, 50, (2, 16))
    losses = []
    for network in (on_cpu, on_cuda):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, **options)
        ids = ids_BT.to(next(network.parameters()).device)
        for _ in range(3):
            loss = network(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_new_memory_is_nan() -> None:
    assert torch.empty(3, device="cuda").isnan().all().item()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: x + torch.ones(3, device="cuda:1"),
        lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x[:, None]),
        lambda x: torch.arange(9)[torch.tensor([1], device="cuda")],
        lambda x: torch.cat([x, torch.ones(3)]),
    ],
)
def test_mixed_devices_are_refused(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"device"):
        mix(draw(3))
    assert (draw(3) + torch.tensor(1.0)).device == torch.device("cuda", 0)  # a scalar is allowed


def test_a_freed_storage_is_not_read() -> None:
    x = draw(3)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x + 1
    x.untyped_storage().resize_(12)
    assert (x.fill_(1.0) + 1).tolist() == [2.0, 2.0, 2.0]


def test_operators_without_a_cuda_kernel_are_refused() -> None:
    q = draw(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match="no CUDA kernel"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        draw(2, 2).long() @ draw(2, 2).long()
    assert device.has_cuda_kernel(torch.ops.aten.mm.default)


def test_synchronisations_are_logged_with_their_operation() -> None:
    x = draw(4, 4)
    index = torch.zeros(2, dtype=torch.int64)
    pinned = torch.ones(4).pin_memory()
    expected: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: x.sum().item(), {"aten::_local_scalar_dense": 1}),
        (lambda: (x > 0).nonzero(), {"aten::nonzero": 1}),
        (lambda: x[x > 0], {"aten::nonzero": 1}),
        (lambda: x.index_put_((x > 0,), x[0, 0]), {"aten::_index_put_impl_ with a mask": 1}),
        (lambda: x[index], {"copy to the device": 1}),
        (lambda: x.tolist(), {"copy to the host": 1}),
        (lambda: torch.tensor(3, device="cuda"), {"copy to the device": 1}),
        (
            lambda: torch.ones(4).to("cuda", non_blocking=True),
            {"copy of pageable memory to the device": 1},
        ),
        (torch.cuda.synchronize, {"synchronize": 1}),
        (lambda: torch.cuda.current_stream().synchronize(), {"stream.synchronize": 1}),
        (lambda: pinned.to("cuda", non_blocking=True), {}),
        (lambda: torch.full((), 3, device="cuda"), {}),
        (lambda: (x @ x).softmax(-1).argsort(), {}),
        (lambda: x[index.to("cuda")], {"copy to the device": 1}),
    ]
    for call, operations in expected:
        assert read_operations(call) == operations


def test_bytes_are_counted() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1024, device="cuda")
    y = x + 1
    assert torch.cuda.memory_allocated() - before == 8192
    del x, y
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 8192


def test_a_copy_to_pinned_memory_arrives_when_the_host_waits() -> None:
    x = torch.ones(4, device="cuda")
    out = torch.zeros(4).pin_memory()
    out.copy_(x, non_blocking=True)
    assert out.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert out.tolist() == [1.0] * 4
    assert x.to("cpu", non_blocking=True)[0] != 1.0
    torch.cuda.synchronize()


def test_a_copy_from_pinned_memory_needs_it_until_the_host_waits() -> None:
    source = torch.ones(4).pin_memory()
    copied = source.to("cuda", non_blocking=True)
    source.zero_()
    torch.cuda.synchronize()
    assert device.list_violations() == [
        "pinned memory has changed before its copy to the device was finished"
    ]
    assert copied.tolist() == [1.0] * 4


class TestStreams:
    """Two streams that use the same memory need an event; freed memory needs record_stream."""

    def test_a_write_on_another_stream_needs_an_event(self) -> None:
        x = torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(RuntimeError, match="missing event"):
            x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        with pytest.raises(RuntimeError, match="missing event"):
            x.zero_()  # the side stream may still read it
        torch.cuda.current_stream().wait_stream(side)
        assert (y + x.zero_()).tolist() == [2.0] * 4

    def test_the_host_orders_streams_too(self) -> None:
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (x + 1).sum().item() == 8.0
        x.zero_()

    def test_freed_memory_needs_record_stream(self) -> None:
        def use(*, is_recorded: bool) -> list[str]:
            x = torch.ones(4, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x + 1
            if is_recorded:
                x.record_stream(side)
            del x
            torch.empty(4, device="cuda")
            return device.list_violations()

        assert use(is_recorded=True) == []
        (violation,) = use(is_recorded=False)
        assert violation.startswith("missing record_stream")


@pytest.mark.parametrize(
    ("dtype", "width", "is_masked", "kernel"),
    [
        (torch.bfloat16, 16, False, "flash"),
        (torch.float16, 16, False, "flash"),
        (torch.bfloat16, 16, True, "efficient"),
        (torch.float32, 16, False, "efficient"),
        (torch.float32, 6, False, "math"),
        (torch.float64, 16, False, "math"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(
    dtype: torch.dtype, width: int, is_masked: bool, kernel: str
) -> None:
    q, k, v = (draw(2, 4, 9, width, dtype=dtype).requires_grad_() for _ in range(3))
    mask = torch.zeros(9, 9, device="cuda", dtype=dtype) if is_masked else None
    with device.count_attention() as kernels:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not is_masked)
    assert kernels == {kernel: 1}
    on_cpu = [part.detach().cpu().requires_grad_() for part in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *on_cpu, None if mask is None else mask.cpu(), is_causal=not is_masked
    )
    d_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, (q, k, v), d_out.to("cuda"))
    tolerance = 1e-5 if dtype.itemsize > 2 else 2e-2
    for got, reference in zip(
        (out, *gradients), (expected, *torch.autograd.grad(expected, on_cpu, d_out)), strict=True
    ):
        torch.testing.assert_close(got.cpu(), reference, atol=tolerance, rtol=tolerance)


def make_kernel_calls() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Build calls of attention whose tensors have tokens before heads, or heads before tokens."""
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for dtype, order in product((torch.bfloat16, torch.float32), ("tokens", "heads")):

        def attend(dtype: torch.dtype = dtype, order: str = order) -> tuple[Tensor, ...]:
            shape = (2, 16, 4, 8) if order == "tokens" else (2, 4, 16, 8)
            leaves = [torch.ones(shape, dtype=dtype, device="cuda") for _ in range(3)]
            parts = [x.transpose(1, 2) if order == "tokens" else x for x in leaves]
            parts = [part.detach().requires_grad_() for part in parts]
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
            return (out, *torch.autograd.grad(out, parts, torch.ones_like(out)))

        calls[f"{dtype}, {order} first"] = attend
    return calls


@pytest.mark.parametrize("name", make_kernel_calls())
def test_kernels_return_the_strides_that_a_compiler_assumes(name: str) -> None:
    call = make_kernel_calls()[name]
    with FakeTensorMode():
        expected = [tensor.stride() for tensor in call()]
    assert [tensor.stride() for tensor in call()] == expected


def test_devices_have_generators_of_their_own() -> None:
    torch.manual_seed(5)
    drawn = [torch.rand(8, device=f"cuda:{index}") for index in (0, 1)]
    assert torch.equal(drawn[0].cpu(), drawn[1].cpu())
    state = torch.cuda.get_rng_state("cuda:1")
    second = torch.rand(8, device="cuda:1")
    torch.rand(8)  # draws nothing from the device's generator
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.equal(torch.rand(8, device="cuda:1"), second)
    assert not torch.equal(second, drawn[1])
    generator = torch.Generator("cuda").manual_seed(5)
    assert torch.equal(torch.rand(8, device="cuda", generator=generator), drawn[0])
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(8, device="cuda", generator=torch.Generator())


def test_a_state_of_a_generator_is_shared_and_a_copy_is_not() -> None:
    generator = torch.cuda.default_generators[2].manual_seed(1)
    shared = generator.graphsafe_get_state()
    copy = generator.clone_state()
    assert shared.device == copy.device == torch.device("cuda", 2)
    first = torch.rand(4, device="cuda:2")
    assert torch.equal(torch.rand(4, device="cuda:2", generator=copy), first)
    other = torch.Generator("cuda:2")
    other.graphsafe_set_state(shared)
    assert torch.equal(other.get_state(), generator.get_state())
    torch.rand(4, device="cuda:2", generator=other)
    assert torch.equal(other.get_state(), generator.get_state())


@pytest.mark.parametrize("has_host", [True, False])
def test_a_profile_has_the_kernels_of_the_device(tmp_path: Path, has_host: bool) -> None:
    x = draw(16, 16).bfloat16()
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if has_host else [])]
    with profile(activities=activities, acc_events=True) as recorded:
        torch.mm(x, x, out_dtype=torch.float32).cpu()
    kernels = {
        event.key: event.self_device_time_total
        for event in recorded.key_averages()
        if str(event.device_type).endswith("CUDA")
    }
    assert kernels["aten::mm"] > 0
    assert len(recorded.key_averages()) > len(kernels) or not has_host
    recorded.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    summary = summarise_trace(read_trace(tmp_path / "trace.json.gz"))
    assert summary.has_device
    assert {kind.name: kind.calls for kind in summary.kinds} == {"products": 1, "copies": 1}
