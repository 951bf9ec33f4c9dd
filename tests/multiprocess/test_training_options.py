"""Label smoothing, noise on embeddings and preserved zeros: gradients and weights under layouts
against one process.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import read_step_micro_batches
from shardwright.errors import RecipeError
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.model.dropout import Dropout
from shardwright.model.head import compute_full_logits_loss
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.zero_mask import ZeroMask, keep_zeros
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.uneven_data import UnevenDataset
from tests.multiprocess.models import LLAMA, compute_pruned_mask
from tests.multiprocess.pool import RankPool

CONFIG = LLAMA | {"intermediate_size": 28, "hidden_size": 24}
BATCH = BatchPlan(12, 2, 2, 1)
LAYOUTS = [
    Layout(dp_shard=2, zero_stage=3),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=False),
    Layout(pp=2),
    Layout(cp=2),
]


def build_batch(layout: Layout) -> BatchPlan:
    """Return a plan with the same global batch for every number of data ranks."""
    return BatchPlan(12, 2 // layout.data_ranks, 2, layout.data_ranks)


def build(layout: Layout, *, pruned: bool = False) -> ParallelModel:
    """Build a float64 model; `pruned` zeroes every third element of the whole matrices."""
    shape = read_config(CONFIG)
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=partial(chunked_cross_entropy, chunk_tokens=5),
            compute_dtype=torch.float64,
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}

    def fill(name: str, bounds: Any) -> Tensor:
        value = initialise_parameter(specs[name], 3, dtype=torch.float64, narrow=bounds)
        if pruned and len(bounds) == 2:
            value[compute_pruned_mask(bounds)] = 0.0
        return value

    plan = build_plan(decoder.shape, layout, build_batch(layout), PrecisionSection(kind="fp64"))
    return apply_layout(
        decoder, plan, build_mesh(layout, "cpu"), torch.device("cpu"), read_slice=fill
    )


def differentiate(model: ParallelModel) -> float:
    """Compute the gradients of one step and return its loss."""
    dataset = UnevenDataset(61, BATCH, 3, 5, True)
    rank = 0 if model.mesh is None else model.mesh.rank
    batches = read_step_micro_batches(
        dataset, dataset.order, build_batch(model.layout), 1, RankGrid(model.layout).data_rank(rank)
    )
    return accumulate_gradients(model, batches, seed=11, step=4).mean()


def compute_noise_size(alpha: float) -> float:
    """Return NEFTune's noise size for full rows."""
    return alpha / math.sqrt(BATCH.sequence_length * CONFIG["hidden_size"])


def compute_gradients(
    layout: Layout, smoothing: float, alpha: float
) -> tuple[float, dict[str, Tensor | None]]:
    model = build(layout)
    model.decoder.label_smoothing = smoothing
    model.decoder.noise_size = compute_noise_size(alpha)
    loss = differentiate(model)
    return loss, {name: model.gather_gradient(name) for name in model.layouts}


def compute_worst_error(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, Any]]:
    """Compute with torch's smoothed cross-entropy over all logits on one process, noise
    included.
    """
    with mock.patch(
        "tests.multiprocess.test_training_options.chunked_cross_entropy", _compute_plain_loss
    ):
        return compute_gradients(Layout(), 0.2, 5.0)


def _compute_plain_loss(*arguments: Any, chunk_tokens: int, **options: Any) -> Tensor:
    return compute_full_logits_loss(*arguments, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_smoothed_targets_and_noise_when_sharded(
    ranks: RankPool, layout: Layout, reference: tuple[float, dict[str, Any]]
) -> None:
    for loss, got in ranks.run(2, compute_gradients, layout, 0.2, 5.0):
        assert abs(loss - reference[0]) < 1e-12
        assert compute_worst_error(reference[1], got) < 1e-11


def test_each_option_changes_the_gradients(reference: tuple[float, dict[str, Any]]) -> None:
    for smoothing, alpha in ((0.0, 5.0), (0.2, 0.0)):
        assert (
            compute_worst_error(reference[1], compute_gradients(Layout(), smoothing, alpha)[1])
            > 1e-3
        )


def test_neither_option_changes_evaluation() -> None:
    model = build(Layout())
    losses = []
    for smoothing, alpha in ((0.0, 0.0), (0.2, 5.0)):
        model.decoder.label_smoothing = smoothing
        model.decoder.noise_size = compute_noise_size(alpha)
        model.decoder.eval()
        losses.append(differentiate(model))
    assert losses[0] == losses[1]


def test_noise_is_uniform_and_of_its_size() -> None:
    noise = Dropout(torch.arange(4096, dtype=torch.int32).view(4, 1024)).add_noise(
        torch.zeros(4, 1024, 32), 0.25
    )
    assert 0.2499 < float(noise.abs().max()) <= 0.25
    assert abs(float(noise.mean())) < 1e-3
    assert abs(float(noise.std()) - 0.25 / 3**0.5) < 1e-3


def train_pruned_weights(layout: Layout, rule: str) -> dict[str, Tensor]:
    model = build(layout, pruned=True)
    section = OptimizerSection(name=rule)  # type: ignore[arg-type]
    optimizer = build_optimizer(
        model.named_parameters(), section, learning_rate=0.1, weight_decay=0.1, model=model
    )
    keep_zeros(model, optimizer)
    for _ in range(2):
        differentiate(model)
        update_parameters(model, optimizer, learning_rate=0.02, max_grad_norm=1.0)
    return {name: model.gather_parameter(name).detach().clone() for name in model.layouts}


@pytest.mark.parametrize(("layout", "rule"), [(LAYOUTS[0], "muon"), (LAYOUTS[1], "adamw")], ids=str)
def test_pruned_weights_stay_pruned_when_sharded(
    ranks: RankPool, layout: Layout, rule: str
) -> None:
    expected = train_pruned_weights(Layout(), rule)
    matrices = [tensor for tensor in expected.values() if tensor.ndim == 2]
    for tensor in matrices:
        pruned = compute_pruned_mask([(0, size) for size in tensor.shape])
        assert bool((tensor[pruned] == 0.0).all())
        assert float((tensor[~pruned] == 0.0).double().mean()) < 0.05
    for got in ranks.run(2, train_pruned_weights, layout, rule):
        assert compute_worst_error(expected, got) < 1e-9


def test_keeping_zeros_without_zeros_is_refused() -> None:
    model = build(Layout())
    for _, parameter in model.named_parameters():
        parameter.data.add_(1.0)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    with pytest.raises(RecipeError, match="contain no zeros"):
        keep_zeros(model, optimizer)


def test_muon_alone_would_fill_the_zeros() -> None:
    with mock.patch.object(ZeroMask, "restore_zeros"):
        weights = train_pruned_weights(Layout(), "muon")
    assert bool((weights["model.layers.0.mlp.up_proj.weight"][0, ::3] != 0.0).any())
