"""Numerical core: loss, precision, recomputation, gradient norm and clipping, matmul ceiling."""

from shardwright.numerics.ceiling import measure_matmul_flops_per_second
from shardwright.numerics.clip import agree_on_norm, clip_, clip_coefficient, global_norm, scale_
from shardwright.numerics.loss import chunked_cross_entropy, token_losses
from shardwright.numerics.precision import Dtypes, LossScaler, dtypes
from shardwright.numerics.preference import PairLosses, PreferenceTerms, preference_loss, response_log_probs
from shardwright.numerics.recompute import recompute_runner
from shardwright.numerics.vocabulary import VocabularyShard

__all__ = [
    "Dtypes",
    "LossScaler",
    "PairLosses",
    "PreferenceTerms",
    "VocabularyShard",
    "agree_on_norm",
    "chunked_cross_entropy",
    "clip_",
    "clip_coefficient",
    "dtypes",
    "global_norm",
    "measure_matmul_flops_per_second",
    "preference_loss",
    "recompute_runner",
    "response_log_probs",
    "scale_",
    "token_losses",
]
