"""Numerical core: loss, precision, recomputation, gradient norm and clipping, matmul ceiling."""

from shardwright.numerics.chunked_loss import ChunkedLoss, expect_loss_gradient
from shardwright.numerics.gradient_clip import (
    GradientSquares,
    compute_clip_coefficient,
    compute_clip_coefficient_on_device,
    compute_global_norm,
    scale_,
    sum_gradient_squares,
    synchronise_norm,
)
from shardwright.numerics.local_tensor import get_local_tensor
from shardwright.numerics.loss import chunked_cross_entropy, compute_token_losses
from shardwright.numerics.peak_flops import measure_matmul_flops_per_second
from shardwright.numerics.precision import LossScaler, PrecisionDtypes, resolve_dtypes
from shardwright.numerics.preference_loss import (
    PairLosses,
    PreferenceLossSettings,
    compute_preference_loss,
    compute_response_log_probs,
)
from shardwright.numerics.recompute import build_recompute_runner, build_saved_results_runner
from shardwright.numerics.vocabulary_shard import VocabularyShard
