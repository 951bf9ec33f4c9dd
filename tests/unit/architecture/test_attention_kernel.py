"""The choice of the attention kernel, and refusals of a kernel that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.architecture.attention_kernel import (
    AttentionRequirements,
    KernelSupport,
    choose_attention_kernel,
)
from shardwright.errors import RecipeError

GPU = KernelSupport()
NO_FLASH = KernelSupport(missing_varlen="flash attention needs 16 bits, not float32")
NO_TRITON = KernelSupport(missing_flex="it needs the package triton")
CPU = KernelSupport("it has no kernel on cpu", "no backward pass on cpu")


@pytest.mark.parametrize(
    ("needs", "support", "kernel"),
    [
        ({}, GPU, "sdpa"),
        ({}, CPU, "sdpa"),
        ({"is_packed": True}, GPU, "varlen"),
        ({"window": 64}, GPU, "varlen"),
        ({"is_packed": True}, NO_FLASH, "flex"),
        ({"window": 64}, CPU, "sdpa"),
        ({"soft_cap": 50.0}, GPU, "flex"),
        ({"has_sinks": True, "window": 64, "is_packed": True}, GPU, "flex"),
        ({"soft_cap": 50.0}, NO_TRITON, "explicit"),
        ({"soft_cap": 50.0}, CPU, "explicit"),
        ({"has_dropout": True}, GPU, "explicit"),
        ({"has_sinks": True, "is_cached": True}, GPU, "explicit"),
        ({"window": 64, "is_cached": True}, GPU, "sdpa"),
    ],
)
def test_the_best_kernel_that_is_available(
    needs: dict[str, Any], support: KernelSupport, kernel: str
) -> None:
    choice = choose_attention_kernel(AttentionRequirements(**needs), support)
    assert choice.kernel == kernel
    if kernel == "explicit" and support.missing_flex is not None:
        assert support.missing_flex in choice.reason
    if kernel == "flex" and support.missing_varlen is not None:
        assert support.missing_varlen in choice.reason


@pytest.mark.parametrize(
    ("requested", "needs", "support", "message"),
    [
        ("sdpa", {"soft_cap": 50.0}, GPU, r"cannot compute a soft cap \(50\)"),
        ("varlen", {"has_sinks": True, "window": 64}, GPU, "a window of 64 tokens, sinks"),
        ("varlen", {"is_packed": True}, NO_FLASH, "16 bits, not float32"),
        ("flex", {}, NO_TRITON, "the package triton"),
        ("flex", {"has_dropout": True}, GPU, "cannot drop weights"),
    ],
)
def test_a_requested_kernel_that_cannot_be_used_is_an_error(
    requested: Any, needs: dict[str, Any], support: KernelSupport, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        choose_attention_kernel(AttentionRequirements(**needs), support, requested)
    assert error.value.field == "model.attention"


@pytest.mark.parametrize("requested", ["sdpa", "varlen", "flex", "explicit"])
def test_a_requested_kernel_is_chosen(requested: Any) -> None:
    assert choose_attention_kernel(AttentionRequirements(), GPU, requested).kernel == requested


def test_generation_ignores_a_requested_kernel_without_a_cache() -> None:
    needs = AttentionRequirements(soft_cap=50.0, is_cached=True)
    assert choose_attention_kernel(needs, GPU, "flex").kernel == "explicit"
