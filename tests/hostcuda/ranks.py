"""One rank's training steps with real numbers: on the test device over gloo, or on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.config.recipe import RecomputeKind
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, RankGrid
from shardwright.model.decoder import Decoder
from shardwright.model.routing import resolve_expert_rules
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.numerics.precision import resolve_dtypes
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.offloaded_weights import BlockWeightStore, TrainedWeightStore
from shardwright.plans import BatchPlan, Plan, build_plan
from shardwright.training.step import (
    accumulate_gradients,
    compute_mean_loss,
    update_parameters,
)

TOKENS = 64
ROWS = 2
NUM_STEPS = 3
"""The last one is measured: DDP rebuilds its buckets in the second."""
LEARNING_RATE = 1e-2
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "deep_llama": {"model_type": "llama", **_SIZES, "num_hidden_layers": 12},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


@dataclass(frozen=True)
class Case:
    """Steps to run: a model under a layout, with `NUM_MICRO_BATCHES` micro-batches a step."""

    layout: Layout
    model: str = "llama"
    kind: str = "fp32"
    recompute: RecomputeKind = "none"
    has_documents: bool = False
    is_partly_supervised: bool = True
    is_compiled: bool = False
    """Compile the blocks on the test device; their graphs run operation by operation."""
    sections: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    """Micro-batches per pipeline rank."""

    @property
    def num_micro_batches(self) -> int:
        return max(2, self.rounds * self.layout.pp)

    def make_recipe(self) -> Recipe:
        return validate_recipe(
            {
                "model": {"config": MODELS[self.model], "loss_chunk_tokens": 32},
                "data": {"sources": ["nowhere"]},
                "precision": {"kind": self.kind},
                "training": {
                    "sequence_length": TOKENS,
                    "micro_batch_size": ROWS,
                    "learning_rate": LEARNING_RATE,
                    "max_steps": 1,
                },
                **self.sections,
            }
        )


def build_case_plan(
    case: Case, recipe: Recipe, layout: Layout, *, offloads_trained_weights: bool = False
) -> Plan:
    batch = BatchPlan(TOKENS, ROWS, case.num_micro_batches, layout.data_ranks)
    return build_plan(
        read_recipe_shape(recipe),
        layout,
        batch,
        recipe.precision,
        case.recompute,
        offloads_trained_weights=offloads_trained_weights,
    )


def build_model(
    case: Case,
    recipe: Recipe,
    layout: Layout,
    device: torch.device,
    offload: BlockWeightStore | None = None,
) -> ParallelModel:
    shape = read_recipe_shape(recipe)
    precision = resolve_dtypes(recipe.precision)
    is_offloaded = isinstance(offload, TrainedWeightStore)
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=ChunkedLoss(recipe.model.loss_chunk_tokens),
            compute_dtype=precision.compute,
            expert_rules=resolve_expert_rules(recipe.moe, shape),
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        decoder,
        build_case_plan(case, recipe, layout, offloads_trained_weights=is_offloaded),
        build_mesh(layout, device.type),
        device,
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=precision.param, narrow=narrow
        ),
        offload=offload,
    )


def draw_micro_batches(case: Case, data_rank: int) -> list[MicroBatch]:
    """Draw the micro-batches of a data rank, in which some tokens are not supervised."""
    generator = torch.Generator().manual_seed(data_rank)
    batches = []
    for number in range(case.num_micro_batches):
        ids_BT = torch.randint(0, _SIZES["vocab_size"], (ROWS, TOKENS), generator=generator)
        labels_BT = ids_BT.roll(-1, 1)
        if case.is_partly_supervised:
            labels_BT[:, : 5 * (1 + number)] = -100
        positions_BT = torch.arange(TOKENS).expand(ROWS, -1)
        documents_BT = None
        if case.has_documents:
            documents_BT = (positions_BT >= 24).long()
            positions_BT = torch.where(documents_BT > 0, positions_BT - 24, positions_BT)
        num_supervised = int((labels_BT != -100).sum())
        samples_B = torch.arange(ROWS) + ROWS * number
        batches.append(
            MicroBatch(ids_BT, labels_BT, positions_BT, documents_BT, samples_B, num_supervised)
        )
    return batches


def run_steps(
    case: Case,
    layout: Layout,
    device: torch.device,
    data_ranks: Sequence[int],
    measure: Callable[[Callable[[], None]], None],
) -> list[float]:
    """Train a few steps on these data ranks' batches; return the losses.

    `measure` runs the last step.
    """
    recipe = case.make_recipe()
    model = build_model(case, recipe, layout, device)
    if case.is_compiled and device.type == "cuda":
        torch._dynamo.reset()  # graphs of an earlier case in this process
        counters.clear()
        # Of sparse blocks `fullgraph` would allow what a run must allow itself (`compile_forward`).
        model.decoder.compile_blocks(backend="aot_eager", fullgraph=case.model == "llama")
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        model=model,
    )
    losses: list[float] = []

    def run_step() -> None:
        batches = [batch for rank in data_ranks for batch in draw_micro_batches(case, rank)]
        if device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        loss = accumulate_gradients(model, batches, seed=0, step=len(losses))
        update = update_parameters(
            model,
            optimizer,
            learning_rate=LEARNING_RATE,
            max_grad_norm=0.5,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
            read_along=[loss.loss_sum, loss.count],
        )
        assert update.rows_beyond_limit == 0
        (loss_sum,), (count,) = update.read_values
        losses.append(compute_mean_loss(loss_sum, count))

    for _ in range(NUM_STEPS - 1):
        run_step()
    measure(run_step)
    if case.is_compiled and device.type == "cuda":
        assert counters["stats"]["unique_graphs"] > 0
        assert not counters["graph_break"], counters["graph_break"]
    return losses


def compute_reference(case: Case) -> list[float]:
    """Return the losses of one process on the CPU that reads every data rank's batches."""
    return run_steps(
        case, Layout(), torch.device("cpu"), range(case.layout.data_ranks), lambda step: step()
    )


def run_on_device(case: Case) -> tuple[list[float], dict[tuple[str, str], int]]:
    """Run this rank's steps on the test device; return losses and synchronisations of the last."""
    from tests.hostcuda import device as test_device

    rank = dist.get_rank() if dist.is_initialized() else 0
    counts: dict[tuple[str, str], int] = {}

    def measure(step: Callable[[], None]) -> None:
        with test_device.log_synchronisations() as log:
            step()
        counts.update(log)

    data_rank = RankGrid(case.layout).data_rank(rank)
    device = torch.device("cuda", rank)
    with torch.cuda.device(device):  # other tests of this process expect the first one
        losses = run_steps(case, case.layout, device, [data_rank], measure)
    violations = test_device.list_violations()
    assert not violations, violations
    return losses, counts
