"""The chunked cross-entropy: equal to the plain one, bounded memory, no silent errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.model.pointwise.operators import differentiate_token_losses
from shardwright.numerics.chunked_loss import ChunkedLoss, expect_loss_gradient
from shardwright.numerics.loss import FusedLosses, chunked_cross_entropy

N = 61
D = 16
V = 37


def make_inputs(
    dtype: torch.dtype = torch.float64, *, masked: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int) -> Tensor:
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    labels_N = torch.randint(0, V, (N,), generator=generator)
    labels_N[::masked] = -100
    return leaf(N, D), leaf(V, D), leaf(V), labels_N


def compute_plain(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    logits_NV = hidden_ND @ weight_VD.T
    if bias_V is not None:
        logits_NV = logits_NV + bias_V
    logits_NV = logits_NV * logit_scale
    if soft_cap is not None:
        logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
    return F.cross_entropy(logits_NV, labels_N, reduction="sum", label_smoothing=label_smoothing)


CASES: list[dict[str, Any]] = [
    {},
    {"logit_scale": 0.125},
    {"soft_cap": 3.0},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.3, "soft_cap": 2.0, "label_smoothing": 0.2},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_every_gradient_equal_the_plain_form(
    options: dict[str, Any], chunk_tokens: int, with_bias: bool
) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs()
    inputs = [hidden_ND, weight_VD] + ([bias_V] if with_bias else [])
    chunked = chunked_cross_entropy(
        hidden_ND,
        weight_VD,
        bias_V if with_bias else None,
        labels_N,
        chunk_tokens=chunk_tokens,
        **options,
    )
    plain = compute_plain(hidden_ND, weight_VD, bias_V if with_bias else None, labels_N, **options)
    torch.testing.assert_close(chunked, plain, rtol=1e-13, atol=0)
    for chunked_gradient, plain_gradient in zip(
        torch.autograd.grad(chunked / 17, inputs),
        torch.autograd.grad(plain / 17, inputs),
        strict=True,
    ):
        torch.testing.assert_close(chunked_gradient, plain_gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_gradient_equals_finite_differences(options: dict[str, Any]) -> None:
    # torch's gradcheck runs several backward passes over one graph, which this function refuses.
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs()

    def loss() -> Tensor:
        return chunked_cross_entropy(
            hidden_ND, weight_VD, bias_V, labels_N, chunk_tokens=8, **options
        )

    gradients = torch.autograd.grad(loss(), [hidden_ND, weight_VD, bias_V])
    generator = torch.Generator().manual_seed(1)
    for tensor, gradient in zip([hidden_ND, weight_VD, bias_V], gradients, strict=True):
        direction = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        with torch.no_grad():
            step = 1e-6
            above = (tensor.add_(direction, alpha=step), loss())[1]
            below = (tensor.add_(direction, alpha=-2 * step), loss())[1]
            tensor.add_(direction, alpha=step)
        torch.testing.assert_close(
            (above - below) / (2 * step), (gradient * direction).sum(), rtol=1e-7, atol=1e-7
        )


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 30),
    chunk_tokens=st.integers(1, 35),
    mask=st.integers(0, 2**30 - 1),
    seed=st.integers(0, 99),
)
def test_any_mask_and_any_chunk_give_the_same_sum(
    num_tokens: int, chunk_tokens: int, mask: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(
        num_tokens, 4, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weight_VD = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels_N = torch.randint(0, 9, (num_tokens,), generator=generator)
    labels_N[torch.tensor([bool(mask >> i & 1) for i in range(num_tokens)])] = -100
    chunked = chunked_cross_entropy(hidden_ND, weight_VD, None, labels_N, chunk_tokens=chunk_tokens)
    plain = compute_plain(hidden_ND, weight_VD, None, labels_N)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(chunked, [hidden_ND, weight_VD]),
        torch.autograd.grad(plain, [hidden_ND, weight_VD]),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_master_weights", [True, False])
def test_low_precision_keeps_softmax_loss_and_sums_in_fp32(
    compute: torch.dtype, has_master_weights: bool
) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs(compute)
    reference = [t.detach().double().requires_grad_() for t in (hidden_ND, weight_VD, bias_V)]
    if has_master_weights:  # the weight is fp32 and is cast for the products
        weight_VD = weight_VD.detach().float().requires_grad_()
    chunked = chunked_cross_entropy(hidden_ND, weight_VD, bias_V, labels_N, chunk_tokens=8)
    plain = compute_plain(reference[0], reference[1], reference[2], labels_N)
    assert chunked.dtype == torch.float32
    eps = torch.finfo(compute).eps
    # A loss in bf16 would be off by up to eps / 2.
    torch.testing.assert_close(chunked.double(), plain, rtol=eps / 4, atol=0)
    for tensor, chunked_gradient, plain_gradient in zip(
        (hidden_ND, weight_VD, bias_V),
        torch.autograd.grad(chunked, [hidden_ND, weight_VD, bias_V]),
        torch.autograd.grad(plain, reference),
        strict=True,
    ):
        assert chunked_gradient.dtype == tensor.dtype
        assert (
            chunked_gradient.double() - plain_gradient
        ).norm() / plain_gradient.norm() < 1.5 * eps


def test_chunks_are_summed_in_fp32() -> None:
    # 4096 one-token chunks of equal gradients: a sum in bf16 would stop at 256 times the first.
    hidden_ND = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_cross_entropy(
        hidden_ND, weight_VD, None, torch.zeros(4096, dtype=torch.long), chunk_tokens=1
    ).backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_no_supervised_token_is_exactly_zero_and_has_zero_gradients() -> None:
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs(torch.float32)
    labels_N[:] = -100
    with torch.no_grad():
        hidden_ND[0] = float("inf")  # a masked token must not enter the sum even then
    loss = chunked_cross_entropy(hidden_ND, weight_VD, bias_V, labels_N, chunk_tokens=8)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, [hidden_ND, weight_VD, bias_V]):
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden and weight", "all"])
def test_frozen_inputs_get_no_gradient_and_do_not_change_the_others(frozen: str) -> None:
    tensors = dict(zip(("hidden", "weight", "bias", "labels"), make_inputs(), strict=True))
    labels_N = tensors.pop("labels")
    trainable = [name for name in tensors if name not in frozen and frozen != "all"]
    expected = (
        torch.autograd.grad(
            compute_plain(*tensors.values(), labels_N), [tensors[name] for name in trainable]
        )
        if trainable
        else ()
    )
    inputs = [tensor if name in trainable else tensor.detach() for name, tensor in tensors.items()]
    loss = chunked_cross_entropy(*inputs, labels_N, chunk_tokens=8)
    assert loss.requires_grad == bool(trainable)
    if trainable:
        torch.testing.assert_close(
            torch.autograd.grad(loss, [tensors[name] for name in trainable]),
            expected,
            rtol=1e-11,
            atol=1e-13,
        )


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_known_number_of_labels_changes_no_bit(is_partial: bool) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs()
    labels_N = labels_N.clamp(min=0)
    if is_partial:
        labels_N[::3] = -100
    inputs = hidden_ND, weight_VD, bias_V

    def differentiate(num_supervised: int | None) -> list[torch.Tensor]:
        loss = chunked_cross_entropy(
            *inputs, labels_N, chunk_tokens=8, num_supervised=num_supervised
        )
        return [loss, *torch.autograd.grad(loss, inputs)]

    known = differentiate(int((labels_N != -100).sum()))
    for got, expected in zip(known, differentiate(None), strict=True):
        assert torch.equal(got, expected)


def test_a_second_backward_raises_instead_of_scaling_twice() -> None:
    hidden_ND, weight_VD, _, labels_N = make_inputs()
    loss = chunked_cross_entropy(hidden_ND, weight_VD, None, labels_N, chunk_tokens=8)
    (loss / 4).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss / 4).backward()


def test_losses_share_no_state() -> None:
    # Two micro-batches before either backward pass, each with its own factor.
    hidden_ND, weight_VD, bias_V, labels_N = make_inputs()
    other_N = labels_N.roll(1)
    chunked = [
        chunked_cross_entropy(hidden_ND, weight_VD, bias_V, labels, chunk_tokens=8)
        for labels in (labels_N, other_N)
    ]
    plain = [compute_plain(hidden_ND, weight_VD, bias_V, labels) for labels in (labels_N, other_N)]
    torch.testing.assert_close(
        torch.autograd.grad(3 * chunked[0] + 5 * chunked[1], [weight_VD]),
        torch.autograd.grad(3 * plain[0] + 5 * plain[1], [weight_VD]),
        rtol=1e-11,
        atol=1e-13,
    )


class _Allocations(TorchDispatchMode):
    """Record operations, and the largest number of elements of a storage that one allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.largest = max(
                    self.largest,
                    tensor.untyped_storage().nbytes() // tensor.element_size(),
                )
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_are_never_allocated(dtype: torch.dtype) -> None:
    tokens = 512
    width = 8
    vocabulary = 256
    chunk_tokens = 16
    hidden_ND = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    labels_N = torch.randint(0, vocabulary, (tokens,))
    saved: list[int] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t.numel()), t)[1], lambda t: t
        ),
        _Allocations() as allocations,
    ):
        chunked_cross_entropy(
            hidden_ND, weight_VD, None, labels_N, chunk_tokens=chunk_tokens, soft_cap=5.0
        ).backward()
    assert allocations.largest == chunk_tokens * vocabulary
    assert sum(saved) == tokens * width + vocabulary * width  # the two gradients and nothing else


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_no_kernel_allocates_a_wide_copy_of_a_narrow_tensor(compute: torch.dtype) -> None:
    """Count allocator events: a dispatch mode does not see allocations inside of kernels."""
    tokens = 48  # sizes that no narrow tensor has
    width = 64
    vocabulary = 512
    hidden_ND = torch.randn(tokens, width).to(compute).requires_grad_()
    weight_VD = torch.randn(vocabulary, width).requires_grad_()
    labels_N = torch.randint(0, vocabulary, (tokens,))
    with profile(
        activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True
    ) as profiler:
        chunked_cross_entropy(hidden_ND, weight_VD, None, labels_N, chunk_tokens=tokens)
    wide_sizes = [tokens * vocabulary * 4, vocabulary * width * 4]
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    allocated = [
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert [allocated.count(size) for size in wide_sizes] == [
        1,
        1,
    ]  # the probabilities and the gradient


def test_evaluation_computes_no_gradient() -> None:
    hidden_ND = torch.randn(8, 4)
    weight_VD = torch.randn(64, 4, requires_grad=True)
    labels_N = torch.arange(8)
    with torch.no_grad(), _Allocations() as allocations:
        loss = chunked_cross_entropy(hidden_ND, weight_VD, None, labels_N, chunk_tokens=2)
    assert not loss.requires_grad
    # One chunk of logits; the weight's gradient would be 64 x 4.
    assert allocations.largest == 2 * 64
    torch.testing.assert_close(loss, compute_plain(hidden_ND, weight_VD, None, labels_N).detach())


@pytest.mark.parametrize("fused_losses", [None, differentiate_token_losses])
def test_label_outside_the_vocabulary_is_an_error_on_cpu(fused_losses: FusedLosses | None) -> None:
    hidden_ND, weight_VD, _, labels_N = make_inputs()
    labels_N[1] = V
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_cross_entropy(
            hidden_ND, weight_VD, None, labels_N, chunk_tokens=8, fused_losses=fused_losses
        )


def differentiate(
    fused_losses: FusedLosses | None, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, ...]:
    """Return loss and gradients; the last chunk of 8 tokens has fewer.

    `gradients` are that of the loss, and the expected one: without it, no gradient is expected.
    """
    gradients = options.pop("gradients", (torch.tensor(1 / 17, dtype=torch.float64), None))
    hidden_ND, weight_VD, _, labels_N = make_inputs(dtype)
    weights_N = torch.linspace(-1, 2, N) if options.pop("is_weighted", False) else None
    loss = chunked_cross_entropy(
        hidden_ND,
        weight_VD,
        None,
        labels_N,
        chunk_tokens=8,
        weights_N=weights_N,
        fused_losses=fused_losses,
        loss_gradient=gradients[1],
        **options,
    )
    inputs = [hidden_ND, weight_VD]
    return loss, *torch.autograd.grad(loss, inputs, gradients[0].to(loss.dtype))


@pytest.mark.parametrize("expected_gradient", [None, "same", "equal", "other"])
@pytest.mark.parametrize("options", [*CASES, {"is_weighted": True}], ids=str)
def test_fused_losses_equal_separate_operations(
    options: dict[str, Any], expected_gradient: str | None
) -> None:
    gradient = torch.tensor(1 / 17, dtype=torch.float64)
    known = {None: None, "same": gradient, "equal": gradient.clone(), "other": gradient * 3}
    gradients = (gradient, known[expected_gradient])
    for found, expected in zip(
        differentiate(differentiate_token_losses, torch.float64, **options, gradients=gradients),
        differentiate(None, torch.float64, **options),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


def test_the_backward_pass_multiplies_nothing_by_a_gradient_that_was_expected() -> None:
    hidden_ND, weight_VD, _, labels_N = make_inputs()
    gradient = torch.tensor(1 / 17, dtype=torch.float64)
    loss = ChunkedLoss(8, differentiate_token_losses)
    with expect_loss_gradient(loss, gradient, torch.float64) as expected:
        value = loss(hidden_ND, weight_VD, None, labels_N)
        with _Allocations() as operations:
            value.backward(expected, retain_graph=True)
    assert operations.names
    assert not any("mul" in name for name in operations.names)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward(expected)


def test_an_fp32_weight_gets_the_sums_of_products_unrounded() -> None:
    hidden_ND, weight_VD, _, labels_N = make_inputs(torch.bfloat16)
    master_VD = weight_VD.detach().float().requires_grad_()
    working_VD = weight_VD.detach() * 2  # used for products, not the cast of the weight
    ChunkedLoss(8)(hidden_ND, master_VD, None, labels_N, working_VD=working_VD).backward()
    doubled_VD = working_VD.float().requires_grad_()
    ChunkedLoss(8)(hidden_ND, doubled_VD, None, labels_N).backward()
    assert master_VD.grad is not None
    assert doubled_VD.grad is not None
    assert torch.equal(master_VD.grad, doubled_VD.grad)
    assert not torch.equal(master_VD.grad, master_VD.grad.bfloat16().float())


def test_fused_losses_in_16_bits_have_a_loss_in_fp32_and_gradients_rounded_once() -> None:
    exact = differentiate(None, torch.float64)
    found = differentiate(differentiate_token_losses, torch.bfloat16)
    separate = differentiate(None, torch.bfloat16)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], separate[0], rtol=1e-6, atol=0)
    for fused_gradient, gradient, exact_gradient in zip(
        found[1:], separate[1:], exact[1:], strict=True
    ):
        error = (fused_gradient.double() - exact_gradient).norm()
        assert error <= 1.02 * (gradient.double() - exact_gradient).norm()


def test_fused_losses_hold_one_chunk_in_the_compute_precision() -> None:
    """The compiled function is called with the operator's own memory: nothing else is recorded."""
    hidden_ND = torch.randn(64, 8, dtype=torch.bfloat16)
    weight_VD = torch.randn(256, 8, dtype=torch.bfloat16, requires_grad=True)
    sizes = []

    def record(logits_CV: Tensor, *arguments: Any) -> Tensor:
        before = logits_CV.data_ptr()
        losses_C1 = differentiate_token_losses(logits_CV, *arguments)
        sizes.append((logits_CV.dtype, logits_CV.shape, logits_CV.data_ptr() - before))
        return losses_C1

    with _Allocations() as allocations:
        chunked_cross_entropy(
            hidden_ND,
            weight_VD,
            None,
            torch.arange(64),
            chunk_tokens=16,
            soft_cap=5.0,
            fused_losses=record,
        )
    assert sizes == [(torch.bfloat16, (16, 256), 0)] * 4
    assert allocations.largest == 16 * 256
