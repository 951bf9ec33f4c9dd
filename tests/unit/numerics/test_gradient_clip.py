"""The global gradient norm over simulated ranks; known mistakes in descriptors must change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwright.layout import Layout, ParameterLayout, RankGrid, Shard
from shardwright.numerics.gradient_clip import (
    compute_clip_coefficient,
    compute_clip_coefficient_on_device,
    compute_global_norm,
    scale_,
)

GradientList = list[tuple[Tensor | None, ParameterLayout]]


class SimulatedRanks:
    """Ranks as threads; all of them take part in every collective, in the same order."""

    def __init__(self, layout: Layout) -> None:
        self.grid = RankGrid(layout)
        self.size = layout.world_size
        self.barrier = threading.Barrier(self.size, timeout=250)
        self.table: dict[int, Tensor] = {}
        self.calls: list[tuple[str, ...]] = []

    def sum_over(self, rank: int) -> Callable[[Tensor, tuple[str, ...]], Tensor]:
        def reduce(tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
            self.table[rank] = tensor.clone()
            self.barrier.wait()
            total = torch.stack(
                [self.table[other] for other in self.grid.group_of(rank, axes)]
            ).sum(0)
            if rank == 0:
                self.calls.append(axes)
            self.barrier.wait()
            return total

        return reduce

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """Return the results of `work(rank)` for all ranks."""
        results: dict[int, Tensor] = {}

        def run_rank(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(self.size)]


def shard_tensor(tensor: Tensor, layout: ParameterLayout, grid: RankGrid, rank: int) -> Tensor:
    """Return the shard of a rank; the last shards may be short or empty."""
    coordinates = grid.coordinates(rank)
    for shard in layout.shards:
        size = -(-tensor.shape[shard.dim] // grid.layout.degree(shard.axis))
        start = min(size * coordinates[shard.axis], tensor.shape[shard.dim])
        tensor = tensor.narrow(shard.dim, start, min(size, tensor.shape[shard.dim] - start))
    return tensor


def make_gradients(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, ParameterLayout]]:
    """Return gradients sharded over one axis, two or none; one has fewer rows than ranks."""
    generator = torch.Generator().manual_seed(3)

    def make_parameter(
        name: str, shape: tuple[int, ...], *shards: Shard
    ) -> tuple[Tensor, ParameterLayout]:
        gradient = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return gradient, ParameterLayout(name, shape, shards)

    return [
        make_parameter("rows", (7, 5), Shard("fsdp", 0)),
        make_parameter("few_rows", (1, 3), Shard("fsdp", 0)),
        make_parameter("both", (6, 4), Shard("tp", 1), Shard("fsdp", 0)),
        make_parameter("columns", (3, 6), Shard("tp", 1)),
        make_parameter("whole", (11,)),
    ]


def compute_whole_norm(gradients: Sequence[tuple[Tensor, ParameterLayout]]) -> Tensor:
    return torch.cat([gradient.double().flatten() for gradient, _ in gradients]).norm()


LAYOUT = Layout(dp_replicate=2, dp_shard=2, tp=2, zero_stage=3)


def compute_norms(
    change_layout: Callable[[ParameterLayout], ParameterLayout] = lambda layout: layout,
) -> list[Tensor]:
    ranks = SimulatedRanks(LAYOUT)
    gradients = make_gradients()

    def work(rank: int) -> Tensor:
        shards = [
            (shard_tensor(gradient, layout, ranks.grid, rank), change_layout(layout))
            for gradient, layout in gradients
        ]
        return compute_global_norm(iter(shards), ranks.sum_over(rank))

    return ranks.run(work)


def test_every_rank_has_the_norm_of_the_whole_model() -> None:
    norms = compute_norms()
    for norm in norms:
        torch.testing.assert_close(norm, compute_whole_norm(make_gradients()), rtol=1e-14, atol=0)


def test_parameters_with_equal_sharding_share_one_collective() -> None:
    ranks = SimulatedRanks(LAYOUT)
    gradients = make_gradients()
    ranks.run(
        lambda rank: compute_global_norm(
            [(shard_tensor(g, layout, ranks.grid, rank), layout) for g, layout in gradients],
            ranks.sum_over(rank),
        )
    )
    assert sorted(ranks.calls) == [("fsdp",), ("tp",), ("tp", "fsdp")]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "parameters sharded over tp counted as replicated",
            lambda p: replace(p, shards=tuple(s for s in p.shards if s.axis != "tp")),
        ),
        (
            "copies counted once per replica",
            lambda p: replace(p, shards=(*p.shards, Shard("dp_replicate", 0))),
        ),
        ("a norm local to the sharding group", lambda p: replace(p, shards=())),
        (
            "replicated parameters counted once per tp rank",
            lambda p: p if p.shards else replace(p, shards=(Shard("tp", 0),)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_descriptor_changes_the_norm(
    name: str, change: Callable[[ParameterLayout], ParameterLayout]
) -> None:
    expected = compute_whole_norm(make_gradients())
    norms = compute_norms(change)
    assert any(abs(norm - expected) > 1e-3 * expected for norm in norms), name


def test_pipeline_stages_share_one_norm() -> None:
    # Each stage has its own parameters; a norm per stage would clip each by a different factor.
    ranks = SimulatedRanks(Layout(pp=2, dp_shard=2, zero_stage=3))
    gradients = make_gradients()
    gradients = [(g, layout) for g, layout in gradients if "tp" not in layout.shard_axes]

    def work(rank: int) -> Tensor:
        stage = ranks.grid.coordinates(rank)["pp"]
        own = [pair for index, pair in enumerate(gradients) if index % 2 == stage]
        # Both stages list both kinds of sharding, as stages of a decoder do (a sharded matrix, a
        # replicated norm).
        list_gradients: GradientList = [
            (shard_tensor(g, layout, ranks.grid, rank), layout) for g, layout in own
        ]
        list_gradients += [(None, layout) for _, layout in gradients]
        return compute_global_norm(list_gradients, ranks.sum_over(rank), stage_axes=("pp",))

    for norm in ranks.run(work):
        torch.testing.assert_close(norm, compute_whole_norm(gradients), rtol=1e-14, atol=0)


def test_a_rank_without_gradients_enters_every_collective() -> None:
    # For example an expert without tokens: skipping the collective would hang the other ranks.
    ranks = SimulatedRanks(Layout(dp_shard=2, zero_stage=3))
    layout = ParameterLayout("w", (2, 3), (Shard("fsdp", 0),))

    def work(rank: int) -> Tensor:
        return compute_global_norm(
            [(torch.ones(1, 3) if rank == 1 else None, layout)], ranks.sum_over(rank)
        )

    assert [norm.item() for norm in ranks.run(work)] == pytest.approx([3**0.5, 3**0.5])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_element_on_one_rank_affects_every_rank(bad: float) -> None:
    ranks = SimulatedRanks(Layout(dp_shard=4, zero_stage=3))
    layout = ParameterLayout("w", (4, 3), (Shard("fsdp", 0),))

    def work(rank: int) -> Tensor:
        gradient = torch.ones(1, 3)
        if rank == 2:
            gradient[0, 1] = bad
        return compute_global_norm([(gradient, layout)], ranks.sum_over(rank))

    assert not any(norm.isfinite() for norm in ranks.run(work))


def raise_on_reduce(tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
    raise AssertionError(f"nothing is sharded, so nothing is summed over {axes}")


def list_gradients(*tensors: Tensor) -> GradientList:
    return [
        (tensor, ParameterLayout(str(index), tuple(tensor.shape)))
        for index, tensor in enumerate(tensors)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norm_is_exact_for_large_and_small_tensors(dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(3_000_017).to(dtype),
        torch.randn(7, 5).to(dtype).T,
        torch.randn(4096).to(dtype),
        torch.empty(0, dtype=dtype),
    ]
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    norm = compute_global_norm(list_gradients(*tensors), raise_on_reduce)
    assert norm.dtype == torch.float64
    # A single fp32 reduction over the large tensor, not by rows, is off by 6e-5.
    torch.testing.assert_close(
        norm, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0
    )


def test_norm_does_not_depend_on_the_sharding_of_a_parameter() -> None:
    gradient = torch.randn(1000, 1000)
    whole = compute_global_norm(list_gradients(gradient), raise_on_reduce)
    for pieces in (2, 3, 7):
        torch.testing.assert_close(
            compute_global_norm(list_gradients(*gradient.chunk(pieces)), raise_on_reduce),
            whole,
            rtol=1e-7,
            atol=0,
        )


def clip(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients as a step does."""
    scale_(gradients, compute_clip_coefficient(float(norm), max_norm))


def test_dtypes_may_be_mixed() -> None:
    tensors = [
        torch.full((3,), 2.0, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    torch.testing.assert_close(
        compute_global_norm(list_gradients(*tensors), raise_on_reduce),
        torch.tensor(6.0, dtype=torch.float64),
    )
    clip(tensors, torch.tensor(6.0, dtype=torch.float64), 3.0)
    for tensor in tensors:
        torch.testing.assert_close(
            tensor.double(), torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_clip_equals_torchs(max_norm: float, scale: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(4))]
    for make_parameter in parameters:
        make_parameter.grad = torch.randn_like(make_parameter) * scale
    gradients = [
        make_parameter.grad.clone()
        for make_parameter in parameters
        if make_parameter.grad is not None
    ]
    torch_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = compute_global_norm(list_gradients(*gradients), raise_on_reduce)
    clip(iter(gradients), norm, max_norm)
    torch.testing.assert_close(norm.float(), torch_norm)
    for own, make_parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(own, make_parameter.grad)


def test_a_norm_below_the_limit_changes_no_bit() -> None:
    gradient = torch.randn(100)
    before = gradient.clone()
    clip([gradient], compute_global_norm(list_gradients(gradient), raise_on_reduce), 1e6)
    assert torch.equal(gradient, before)


def test_coefficient_has_torchs_margin() -> None:
    assert compute_clip_coefficient(1e-6, 1e-6) == pytest.approx(0.5)


def test_coefficients_on_host_and_device_have_the_bits_of_torchs() -> None:
    for norm in torch.rand(1000, dtype=torch.float64) * 10:
        expected = (0.7 / (norm + 1e-6)).clamp(max=1.0)
        assert compute_clip_coefficient(norm.item(), 0.7) == expected.item()
        assert torch.equal(compute_clip_coefficient_on_device(norm, 0.7), expected)


def test_zero_norm_stays_zero() -> None:
    gradient = torch.zeros(5)
    norm = compute_global_norm(list_gradients(gradient), raise_on_reduce)
    clip([gradient], norm, 1.0)
    assert norm.item() == 0.0
    assert torch.equal(gradient, torch.zeros(5))


def test_gradients_may_come_from_a_generator() -> None:
    # A generator that the norm consumed is empty when the clip starts: the clip would silently do
    # nothing.
    tensors = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    norm = compute_global_norm((pair for pair in list_gradients(*tensors)), raise_on_reduce)
    assert norm.item() == 10.0
    clip((tensor for tensor in tensors), norm, 1.0)
    torch.testing.assert_close(
        compute_global_norm(list_gradients(*tensors), raise_on_reduce).float(), torch.tensor(1.0)
    )


def test_scaling_by_exactly_one_changes_no_bit() -> None:
    gradient = torch.randn(100).bfloat16()
    before = gradient.clone()
    scale_([gradient], torch.ones((), dtype=torch.float64))
    assert torch.equal(gradient, before)


def test_a_rank_with_no_parameters_has_norm_zero() -> None:
    assert compute_global_norm([], raise_on_reduce).item() == 0.0


def test_a_factor_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    gradient = torch.randn(512, generator=torch.Generator().manual_seed(0)).bfloat16()
    scaled = gradient.clone()
    scale_([scaled], 0.37)
    assert torch.equal(scaled, (gradient.double() * torch.tensor(0.37)).bfloat16())
