"""Label smoothing, noise on embeddings and kept zeros: gradients and weights under cuts against one
process.
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
from shardwright.plan import BatchPlan, Plan
from shardwright.train.step import accumulate_gradients, update_parameters
from shardwright.verify.uneven_data import UnevenDataset
from tests.multiprocess.models import LLAMA
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


def batch_of(layout: Layout) -> BatchPlan:
    """The same global batch for every number of data ranks."""
    return BatchPlan(12, 2 // layout.data_ranks, 2, layout.data_ranks)


def build(layout: Layout, *, pruned: bool = False) -> ParallelModel:
    """A model in float64; `pruned` zeroes every third element of the matrices, by their place in
    the whole.
    """
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
            rows, columns = (torch.arange(start, start + length) for start, length in bounds)
            value[(rows[:, None] + columns) % 3 == 0] = 0.0
        return value

    plan = Plan(layout, batch_of(layout), PrecisionSection(kind="fp64"))
    return apply_layout(
        decoder, plan, build_mesh(layout, "cpu"), torch.device("cpu"), read_slice=fill
    )


def differentiate(model: ParallelModel) -> float:
    """Gradients of one step; its loss."""
    dataset = UnevenDataset(61, BATCH, 3, 5, True)
    rank = 0 if model.mesh is None else model.mesh.rank
    batches = read_step_micro_batches(
        dataset, dataset.order, batch_of(model.layout), 1, RankGrid(model.layout).data_rank(rank)
    )
    return accumulate_gradients(model, batches, seed=11, step=4).mean()


def noise_size(alpha: float) -> float:
    """NEFTune's, of full rows."""
    return alpha / math.sqrt(BATCH.sequence_length * CONFIG["hidden_size"])


def gradients(
    layout: Layout, smoothing: float, alpha: float
) -> tuple[float, dict[str, Tensor | None]]:
    model = build(layout)
    model.decoder.label_smoothing, model.decoder.noise_size = smoothing, noise_size(alpha)
    loss = differentiate(model)
    return loss, {name: model.gather_gradient(name) for name in model.layouts}


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, Any]]:
    """One process and torch's own smoothed cross-entropy over all logits, noise included."""
    with mock.patch("tests.multiprocess.test_training_options.chunked_cross_entropy", _plain_loss):
        return gradients(Layout(), 0.2, 5.0)


def _plain_loss(*arguments: Any, chunk_tokens: int, **options: Any) -> Tensor:
    return compute_full_logits_loss(*arguments, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_smoothed_targets_and_noise_under_a_cut(
    ranks: RankPool, layout: Layout, reference: tuple[float, dict[str, Any]]
) -> None:
    for loss, got in ranks.run(2, gradients, layout, 0.2, 5.0):
        assert abs(loss - reference[0]) < 1e-12
        assert worst(reference[1], got) < 1e-11


def test_each_of_them_changes_what_is_learned(reference: tuple[float, dict[str, Any]]) -> None:
    for smoothing, alpha in ((0.0, 5.0), (0.2, 0.0)):
        assert worst(reference[1], gradients(Layout(), smoothing, alpha)[1]) > 1e-3


def test_neither_acts_outside_of_training() -> None:
    model = build(Layout())
    losses = []
    for smoothing, alpha in ((0.0, 0.0), (0.2, 5.0)):
        model.decoder.label_smoothing, model.decoder.noise_size = smoothing, noise_size(alpha)
        model.decoder.eval()
        losses.append(differentiate(model))
    assert losses[0] == losses[1]


def test_noise_is_even_and_of_its_size() -> None:
    noise = Dropout(torch.arange(4096, dtype=torch.int32).view(4, 1024)).add_noise(
        torch.zeros(4, 1024, 32), 0.25
    )
    assert 0.2499 < float(noise.abs().max()) <= 0.25
    assert abs(float(noise.mean())) < 1e-3
    assert abs(float(noise.std()) - 0.25 / 3**0.5) < 1e-3


def pruned_after_steps(layout: Layout, rule: str) -> dict[str, Tensor]:
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
def test_pruned_weights_stay_pruned_under_a_cut(ranks: RankPool, layout: Layout, rule: str) -> None:
    expected = pruned_after_steps(Layout(), rule)
    matrices = [tensor for tensor in expected.values() if tensor.ndim == 2]
    for tensor in matrices:
        rows, columns = (torch.arange(size) for size in tensor.shape)
        pruned = (rows[:, None] + columns) % 3 == 0
        assert bool((tensor[pruned] == 0.0).all())
        assert float((tensor[~pruned] == 0.0).double().mean()) < 0.05
    for got in ranks.run(2, pruned_after_steps, layout, rule):
        assert worst(expected, got) < 1e-9


def test_without_any_zero_it_is_refused() -> None:
    model = build(Layout())
    for _, parameter in model.named_parameters():
        parameter.data.add_(1.0)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=0.1, weight_decay=0.0
    )
    with pytest.raises(RecipeError, match="no zeros to keep"):
        keep_zeros(model, optimizer)


def test_muon_alone_would_fill_the_zeros() -> None:
    with mock.patch.object(ZeroMask, "restore_zeros"):
        weights = pruned_after_steps(Layout(), "muon")
    assert bool((weights["model.layers.0.mlp.up_proj.weight"][0, ::3] != 0.0).any())
