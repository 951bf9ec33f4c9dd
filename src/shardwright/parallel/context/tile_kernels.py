"""Choice of the attention kernel for part of the keys, and cuDNN's kernel.

PyTorch prefers cuDNN on Hopper and later. Its operators are private, and their log-sum-exp is
documented nowhere, so a process compares it once with flash attention before it is used: the
output, the log-sum-exp, and the gradients of a part of a longer row.

Legend: B sequences, H query heads, K key/value heads, L queries, S keys, E head_dim, V value width.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from shardwright.parallel.context.attention_kernels import (
    AttentionGradients,
    AttentionKernel,
    CpuFlashKernel,
    CudaEfficientKernel,
    CudaFlashKernel,
    PartialAttention,
    ScoreSettings,
    TileInputs,
    TileVisibility,
)
from shardwright.parallel.context.explicit_kernel import ExplicitKernel

logger = logging.getLogger(__name__)

_aten = torch.ops.aten
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3}
"""Distances of two kernels that each round to the dtype."""
_CHECKED_TOKENS = 128


class CudnnKernel:
    """cuDNN's attention, in half precision and without masks.

    Query heads may share key/value heads (grouped-query attention).
    """

    name = "cuDNN's attention"

    def forward(self, tile: TileInputs) -> PartialAttention:
        assert tile.visibility.visible_BLS is None
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            tile.q_BHLE,
            tile.k_BKSE,
            tile.v_BKSV,
            None,
            True,  # compute the log-sum-exp
            0.0,
            tile.visibility.is_causal,
            scale=tile.scores.scale,
        )
        return PartialAttention(out, lse.reshape(tile.q_BHLE.shape[:3]))

    def backward(
        self, d_out_BHLV: Tensor, tile: TileInputs, row_output: PartialAttention
    ) -> AttentionGradients:
        # Without dropout the random state is never read, but the kernel requires tensors for it.
        unread = torch.zeros((), dtype=torch.int64, device=tile.q_BHLE.device)
        return AttentionGradients(
            *_aten._scaled_dot_product_cudnn_attention_backward(
                d_out_BHLV.contiguous(),
                tile.q_BHLE,
                tile.k_BKSE,
                tile.v_BKSV,
                row_output.out_BHLV.to(tile.q_BHLE.dtype).contiguous(),
                row_output.lse_BHL.unsqueeze(-1).contiguous(),
                unread,
                unread,
                None,
                None,
                None,
                tile.q_BHLE.shape[2],
                tile.k_BKSE.shape[2],
                0.0,
                tile.visibility.is_causal,
                scale=tile.scores.scale,
            )
        )


def choose_kernel(tile: TileInputs, *, is_explicit: bool) -> AttentionKernel:
    """Choose the fused kernel that computes exactly this, or else eager attention.

    The first tile of each kind logs the choice and its reason.
    """
    kernel, reason = _choose(tile, is_explicit)
    if not isinstance(tile.q_BHLE, FakeTensor):
        _log_choice(kernel.name, reason)
    return kernel


def _choose(tile: TileInputs, is_explicit: bool) -> tuple[AttentionKernel, str]:
    q_BHLE = tile.q_BHLE
    missing = _find_missing_fused(tile)
    if is_explicit:
        missing = "the recipe's model.attention is explicit"
    if missing is not None:
        return ExplicitKernel(), missing
    if q_BHLE.device.type == "cpu":
        return CpuFlashKernel(), "on a CPU"
    if tile.visibility.visible_BLS is not None:
        return CudaEfficientKernel(), "tiles with a mask on CUDA"
    if q_BHLE.dtype == torch.float32:
        return CudaEfficientKernel(), "float32 on CUDA"
    kernel = _choose_half_precision_kernel(q_BHLE, tile.k_BKSE, tile.scores)
    return kernel, "16 bits without masks on CUDA"


def _find_missing_fused(tile: TileInputs) -> str | None:
    """Return why no fused kernel computes this; None if one does."""
    q_BHLE = tile.q_BHLE
    scores = tile.scores
    width = q_BHLE.shape[-1]
    value_width = tile.v_BKSV.shape[-1]
    if scores.soft_cap is not None:
        return "soft caps have no fused kernel over parts of the keys"
    if scores.dropout is not None:
        return "dropout of attention has no fused kernel"
    if value_width != width:
        return f"values are {value_width} wide and keys {width}"
    if q_BHLE.device.type == "cpu":
        return None
    if not q_BHLE.is_cuda:
        return f"there is no fused kernel on {q_BHLE.device.type}"
    if width % 8 or width > 256:
        return f"fused kernels take heads of a multiple of 8 up to 256, not {width}"
    if q_BHLE.dtype not in (*_TOLERANCE, torch.float32):
        return f"fused kernels have no {str(q_BHLE.dtype).removeprefix('torch.')} on CUDA"
    return None


@lru_cache
def _log_choice(name: str, reason: str) -> None:
    """Log the kernel of tiles, once per process and reason."""
    logger.info("attention over parts of the keys: %s (%s)", name, reason)


def _choose_half_precision_kernel(
    q_BHLE: Tensor, k_BKSE: Tensor, scores: ScoreSettings
) -> AttentionKernel:
    """Choose the kernel of tiles without a mask: cuDNN's if plain attention takes it, or flash
    attention. Tensors of a rehearsal have no kernel; both save the same."""
    if isinstance(q_BHLE, FakeTensor) or not _takes_cudnn(q_BHLE, k_BKSE, scores):
        return CudaFlashKernel()
    is_grouped = q_BHLE.shape[1] != k_BKSE.shape[1]
    is_equal = agrees_with_flash(q_BHLE.device, q_BHLE.dtype, q_BHLE.shape[-1], is_grouped)
    return CudnnKernel() if is_equal else CudaFlashKernel()


def _takes_cudnn(q_BHLE: Tensor, k_BKSE: Tensor, scores: ScoreSettings) -> bool:
    """Return True if PyTorch's scaled dot product would take cuDNN's kernel."""
    choice: int = torch._fused_sdp_choice(
        q_BHLE,
        k_BKSE,
        k_BKSE,  # values have the shape of keys
        None,
        0.0,
        q_BHLE.shape[2] == k_BKSE.shape[2],
        scale=scores.scale,
        enable_gqa=q_BHLE.shape[1] != k_BKSE.shape[1],
    )
    return choice == SDPBackend.CUDNN_ATTENTION.value


@lru_cache
@torch.no_grad()
def agrees_with_flash(
    device: torch.device, dtype: torch.dtype, width: int, is_grouped: bool
) -> bool:
    """Compare cuDNN's kernel with flash attention, and log the result; once per process.

    The host waits for the device.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        shape = (1, num_heads, _CHECKED_TOKENS, width)
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_groups = 2 if is_grouped else 4
    operands = (draw(4), draw(num_groups), draw(num_groups))
    d_out = draw(4)
    scores = ScoreSettings(scale=width**-0.5)
    distances = []
    try:
        for is_causal in (True, False):
            visibility = TileVisibility(
                is_causal, None, slice(0, _CHECKED_TOKENS), torch.arange(_CHECKED_TOKENS)
            )
            tile = TileInputs(*operands, visibility, scores)
            expected = CudaFlashKernel().forward(tile)
            # As a part of a longer row, whose log-sum-exp is larger and whose output differs.
            row = PartialAttention(expected.out_BHLV * 0.7, expected.lse_BHL + 0.5)
            results = [
                (
                    *kernel.forward(tile),
                    *kernel.backward(d_out, tile, row),
                )
                for kernel in (CudnnKernel(), CudaFlashKernel())
            ]
            distances += [_measure_distance(*pair) for pair in zip(*results, strict=True)]
        distance = max(distances)
    except RuntimeError as error:
        logger.info("context parallelism: tiles take flash attention; cuDNN's fails: %s", error)
        return False
    if not distance <= _TOLERANCE[dtype]:
        logger.warning(
            "context parallelism: tiles take flash attention; cuDNN's differs from it by %.1e of "
            "the norm",
            distance,
        )
        return False
    logger.info("context parallelism: tiles without a mask take cuDNN's attention")
    return True


def _measure_distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected numbers."""
    exact = expected.double()
    return float((found.double() - exact).norm() / exact.norm())
