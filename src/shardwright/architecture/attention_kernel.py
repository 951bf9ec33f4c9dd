"""Choice of the kernel that computes a layer's attention. No torch.

The decoder and the planner share this choice, so a plan predicts the kernel that a run takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.architecture.model_shape import ModelShape
from shardwright.config.model import AttentionSetting
from shardwright.errors import RecipeError

AttentionKernelName = Literal["sdpa", "varlen", "flex", "explicit"]

MAX_SCORE_BYTES = 128 * 2**20
"""Largest tensor of scores that eager attention over parts of the keys computes at once. Queries
whose scores are more are divided into blocks."""


@dataclass(frozen=True)
class AttentionRequirements:
    """Requirements of one kind of layer's attention in one forward pass.

    Attributes:
        window: tokens that a token attends to, itself included; None if no token of the row is
            outside it.
        is_packed: rows have several documents.
        is_cached: keys and values of preceding tokens come from a cache.
    """

    window: int | None = None
    is_packed: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    has_dropout: bool = False
    is_cached: bool = False

    @property
    def has_changed_scores(self) -> bool:
        """True if scores are more than scaled products with a mask."""
        return self.soft_cap is not None or self.has_sinks

    def describe(self) -> str:
        """Describe the needs in a few words."""
        needs = []
        if self.is_packed:
            needs.append("packed documents")
        if self.window is not None:
            needs.append(f"a window of {self.window} tokens")
        if self.soft_cap is not None:
            needs.append(f"a soft cap ({self.soft_cap:g})")
        if self.has_sinks:
            needs.append("sinks")
        if self.has_dropout:
            needs.append("dropout")
        if self.is_cached:
            needs.append("cached keys")
        return ", ".join(needs) or "causal order"


@dataclass(frozen=True)
class KernelSupport:
    """Reasons why a device has no `varlen` or `flex` kernel; None if it has the kernel."""

    missing_varlen: str | None = None
    missing_flex: str | None = None


def get_attended_value_dim(shape: ModelShape) -> int:
    """Return the features of a value head in attention: those of latent attention are
    padded to the width of keys, which fused kernels need."""
    return shape.head_dim if shape.latent is None else max(shape.head_dim, shape.latent.value_dim)


_MAX_FLASH_WIDTH = 256


def find_flash_limit(dtype: str, head_dim: int, value_dim: int) -> str | None:
    """Return why flash attention on CUDA cannot compute this; None if it can.

    >>> find_flash_limit("bfloat16", 64, 64), find_flash_limit("float32", 64, 64)
    (None, 'flash attention needs 16 bits, not float32')
    >>> find_flash_limit("bfloat16", 64, 128)
    'flash attention needs values as wide as keys, not 128 and 64 features'
    """
    if dtype not in ("float16", "bfloat16"):
        return f"flash attention needs 16 bits, not {dtype}"
    if head_dim % 8 or head_dim > _MAX_FLASH_WIDTH:
        return f"flash attention needs a head_dim of 8, 16 ... {_MAX_FLASH_WIDTH}, not {head_dim}"
    if value_dim != head_dim:
        return (
            f"flash attention needs values as wide as keys, not {value_dim} and {head_dim} features"
        )
    return None


class AttentionKernelChoice(NamedTuple):
    """The kernel of one kind of layer, and the reason for it."""

    kernel: AttentionKernelName
    reason: str


def choose_attention_kernel(
    needs: AttentionRequirements, support: KernelSupport, requested: AttentionSetting = "auto"
) -> AttentionKernelChoice:
    """Choose the kernel for a layer's needs on a device.

    `sdpa` is PyTorch's scaled dot product, which takes a dense mask where causal order is not
    enough. `varlen` is flash attention over documents of different lengths, with windows. `flex`
    is FlexAttention: block masks, soft caps and sinks. `explicit` stores all scores. With a cache
    of keys, `requested` applies only if it is `explicit`.

    Args:
        requested: `model.attention` of the recipe.

    Raises:
        RecipeError: the requested kernel is missing here or cannot compute what is needed.

    >>> choose_attention_kernel(AttentionRequirements(), KernelSupport()).kernel
    'sdpa'
    >>> choose_attention_kernel(AttentionRequirements(is_packed=True), KernelSupport()).kernel
    'varlen'
    >>> choose_attention_kernel(AttentionRequirements(soft_cap=50.0), KernelSupport()).kernel
    'flex'
    """
    if requested == "explicit":
        return AttentionKernelChoice("explicit", "as configured (model.attention: explicit)")
    if requested != "auto" and not needs.is_cached:
        _check_request(needs, support, requested)
        return AttentionKernelChoice(requested, f"as configured (model.attention: {requested})")
    text = needs.describe()
    if needs.has_dropout:
        return AttentionKernelChoice("explicit", f"{text}; no kernel has our dropout by token")
    if needs.has_changed_scores:
        if support.missing_flex is None and not needs.is_cached:
            return AttentionKernelChoice("flex", text)
        missing = "has no cache" if needs.is_cached else support.missing_flex
        return AttentionKernelChoice("explicit", f"{text}; flex: {missing}")
    if needs.is_cached or not (needs.is_packed or needs.window is not None):
        return AttentionKernelChoice("sdpa", text)
    if support.missing_varlen is None:
        return AttentionKernelChoice("varlen", text)
    text = f"{text}; varlen: {support.missing_varlen}"
    if support.missing_flex is None:
        return AttentionKernelChoice("flex", text)
    return AttentionKernelChoice("sdpa", f"{text}; flex: {support.missing_flex}; a dense mask")


def _check_request(
    needs: AttentionRequirements, support: KernelSupport, requested: AttentionKernelName
) -> None:
    """Raise if a kernel is missing or cannot compute what is needed."""
    problem = None
    if needs.has_dropout:
        problem = "cannot drop weights of attention by token, as the model's config.json asks"
    elif requested != "flex" and needs.has_changed_scores:
        problem = f"cannot compute {needs.describe()}"
    elif requested == "varlen" and support.missing_varlen is not None:
        problem = f"is not available: {support.missing_varlen}"
    elif requested == "flex" and support.missing_flex is not None:
        problem = f"is not available: {support.missing_flex}"
    if problem is not None:
        raise RecipeError(
            f"the attention kernel {problem}",
            field="model.attention",
            got=requested,
            remedy="Use auto, which takes the best kernel that is available",
        )
