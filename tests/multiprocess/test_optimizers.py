"""Optimizers that use whole matrices, rows or blocks: a step under any layout equals the step
of one process.

Every rank gets its part of the same gradients, so only the optimizer can differ, and some
results are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwright.architecture import ModelShape, read_config, read_recipe_shape
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import get_local_tensor
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_moments,
    collect_optimizer_values,
    load_optimizer_values,
    quantised_update,
    set_learning_rate,
)
from shardwright.optim.adafactor import Adafactor
from shardwright.parallel import ParallelModel, apply_layout, build_mesh, matrix_exchange
from shardwright.parallel.gradient_reduction import narrow_to_box
from shardwright.plans import BatchPlan, build_plan
from shardwright.verification.cases import VerificationCase
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import verify
from tests.multiprocess.models import GPT2, LLAMA, QWEN3, build_recipe
from tests.multiprocess.pool import RankPool

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "norm_topk_prob": True,
}  # fmt: skip
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 70}
EVEN = LLAMA | {"intermediate_size": 28, "num_key_value_heads": 1}
VERIFIED = {
    "adamw_8bit": WIDE
    | {"hidden_size": 72, "head_dim": 18, "intermediate_size": 130, "vocab_size": 71}
}
"""Matrices large enough for 8 bits, whose rows are no multiples of a block."""

RULES: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "adamw in bf16": {"name": "adamw"},
    "adamw_8bit in bf16": {"name": "adamw_8bit", "block_size": 32},
    "sgd in bf16": {"name": "sgd", "momentum": 0.9},
}
"""Rules `in bf16` update weights that are stored in bf16."""
ROUNDING = dict.fromkeys(RULES, 0.0) | {"muon": 2e-7, "adafactor": 3e-7}
"""Muon's matrices are bit-equal; torch's fused AdamW updates the other parameters and rounds
the last elements of a tensor differently. Adafactor sums in another order; sums are rounded
from fp64, the update from fp32.
"""

TIED = QWEN3 | {"tie_word_embeddings": True}
ALL_RULES = tuple(RULES)
MATRIX_RULES = ("muon", "adafactor")
MANY_RULES = (*MATRIX_RULES, "adamw in bf16")
BLOCK_RULES = ("adamw_8bit", "adamw_8bit in bf16")
LAYOUTS: list[tuple[str, dict[str, Any], Layout, tuple[str, ...]]] = [
    ("zero0", LLAMA, Layout(dp_replicate=2), ("adamw in bf16",)),
    ("zero3", LLAMA, Layout(dp_shard=2, zero_stage=3), MANY_RULES),
    ("cp2 x zero2", LLAMA, Layout(dp_shard=1, cp=2, zero_stage=2), ("adamw in bf16",)),
    ("tp2, key-value heads shared", EVEN, Layout(tp=2, sequence_parallel=False), MANY_RULES),
    ("tp2 of [in, out] matrices", GPT2, Layout(tp=2), MANY_RULES),
    ("pp2, tied embeddings", TIED, Layout(pp=2), MATRIX_RULES),
    ("pp2 x zero1", TIED, Layout(dp_shard=2, pp=2, zero_stage=1), ("adamw in bf16",)),
    ("zero3", WIDE, Layout(dp_shard=2, zero_stage=3), BLOCK_RULES),
    ("tp2", WIDE, Layout(tp=2), BLOCK_RULES),
    ("ep2", MOE, Layout(dp_shard=2, ep=2, zero_stage=1), ALL_RULES),
    ("tp2 x zero3, experts", MOE, Layout(dp_shard=2, tp=2, zero_stage=3), ALL_RULES),
]
CASES = [
    pytest.param(config, layout, rule, id=f"{rule}, {label}")
    for label, config, layout, rules in LAYOUTS
    for rule in rules
]


def build(
    shape: ModelShape, layout: Layout, rule: str
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    with torch.device("meta"):
        decoder = Decoder(shape)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    precision = PrecisionSection(kind="fp32")
    if rule.endswith(" in bf16"):
        precision = PrecisionSection(kind="bf16", master_weights="bf16")
    model = apply_layout(
        decoder,
        build_plan(shape, layout, BatchPlan(8, 2, 2, layout.data_ranks), precision),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, bounds: initialise_parameter(
            specs[name], 3, dtype=torch.float32, narrow=bounds
        ),
    )
    section = OptimizerSection(**RULES[rule])
    return model, build_optimizer(
        model.named_parameters(), section, learning_rate=1.0, weight_decay=0.1, model=model
    )


def run_steps(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Run steps with gradients that depend on name and step, of sizes that differ by row and
    column.
    """
    for step in steps:
        for number, (name, layout_of_parameter) in enumerate(model.layouts.items()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            whole = torch.randn(layout_of_parameter.shape, generator=generator) * torch.rand(
                layout_of_parameter.shape[-1:], generator=generator
            )
            parameter = dict(model.named_parameters()).get(name)
            if parameter is not None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                for box in model.local_boxes(name):
                    narrow_to_box(get_local_tensor(parameter.grad), box.local_bounds).copy_(
                        narrow_to_box(whole, box.global_bounds)
                    )
        set_learning_rate(optimizer, (0.02, 0.05, 0.01, 0.03)[step])
        optimizer.step()


def collect_state(
    model: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor | ParameterShard]:
    """Return the tensors of a checkpoint, as the trainer does."""
    state: dict[str, Tensor | ParameterShard] = {
        f"model.{name}": ParameterShard(
            parameter.detach(), model.layouts[name].shape, model.local_boxes(name)
        )
        for name, parameter in model.named_parameters()
    }
    for key, moment in collect_optimizer_moments(optimizer, model.named_parameters()).items():
        shape = model.layouts[moment.parameter].shape if moment.shape is None else moment.shape
        state[key] = ParameterShard(
            moment.tensor,
            shape,
            model.local_boxes(moment.parameter) if moment.boxes is None else moment.boxes,
        )
    return state


def train_weights(
    config: dict[str, Any], layout: Layout, rule: str, bug: Callable[[], Any] = nullcontext
) -> dict[str, Tensor]:
    """Return whole weights after three steps; runs on every rank of the layout."""
    shape = read_config(config)
    with bug():
        model, optimizer = build(shape, layout, rule)
        run_steps(model, optimizer, range(3))
    return {name: model.gather_parameter(name).detach().clone() for name in model.layouts}


def compute_worst_error(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one)


@pytest.mark.parametrize(("config", "layout", "rule"), CASES)
def test_a_step_equals_that_of_one_process(
    ranks: RankPool, config: dict[str, Any], layout: Layout, rule: str
) -> None:
    expected = train_weights(config, Layout(), rule)
    for got in ranks.run(layout.world_size, train_weights, config, layout, rule):
        assert compute_worst_error(expected, got) <= ROUNDING[rule]


@contextmanager
def orthogonalise_own_shard() -> Iterator[None]:
    """Orthogonalise each rank's shard alone, as an elementwise update would."""

    def apply(
        _self: Any, function: Callable[[Tensor], Tensor], tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        results = {}
        for name, tensor in tensors.items():
            matrix = tensor if tensor.ndim == 2 else tensor.flatten(0, 1)
            results[name] = function(matrix).view_as(tensor) if tensor.numel() else tensor
        return results

    with mock.patch.object(matrix_exchange.DistributedMatrixExchange, "apply", apply):
        yield


def skip_sum_over_ranks() -> AbstractContextManager[Any]:
    return mock.patch.object(Adafactor, "_sum_over_ranks", return_value=None)


@pytest.mark.parametrize(
    ("rule", "bug"), [("muon", orthogonalise_own_shard), ("adafactor", skip_sum_over_ranks)]
)
def test_updates_from_own_shards_only_are_detected(
    ranks: RankPool, rule: str, bug: Callable[[], Any]
) -> None:
    layout = Layout(dp_shard=2, zero_stage=3)
    got = ranks.run(2, train_weights, LLAMA, layout, rule, bug)[0]
    assert compute_worst_error(train_weights(LLAMA, Layout(), rule), got) > 1e-3


@contextmanager
def form_blocks_in_own_shard() -> Iterator[None]:
    """Form blocks over the rows of a rank's shard, as torchao does."""
    encode = quantised_update._encode
    decode = quantised_update._decode

    def flatten(block_size: int, *tensors: Tensor) -> tuple[int, list[Tensor]]:
        """Return the whole blocks' end and the tensors as one long row each; a remainder keeps
        its old scales.
        """
        return tensors[0].numel() // block_size * block_size, [
            tensor.view(1, -1) for tensor in tensors
        ]

    def encode_flat(
        values: Tensor,
        codes: Tensor,
        scales: Tensor,
        table: Tensor,
        block_size: int,
        is_skipped: Tensor | None,
    ) -> None:
        end, (values_1N, codes_1N, scales_1K) = flatten(block_size, values, codes, scales)
        encode(
            values_1N[:, :end],
            codes_1N[:, :end],
            scales_1K[:, : end // block_size],
            table,
            block_size,
            is_skipped,
        )

    def decode_flat(codes: Tensor, scales: Tensor, table: Tensor, block_size: int) -> Tensor:
        end, (codes_1N, scales_1K) = flatten(block_size, codes, scales)
        decoded = decode(codes_1N[:, :end], scales_1K[:, : end // block_size], table, block_size)
        return torch.cat([decoded, decoded.new_zeros(1, codes.numel() - end)], dim=1).view(
            codes.shape
        )

    with mock.patch.multiple(quantised_update, _encode=encode_flat, _decode=decode_flat):
        yield


def list_failed_comparisons(
    ranks: RankPool,
    rule: str,
    mutation: MutationContext | None,
    config: dict[str, Any] | None = None,
) -> set[str]:
    """Return the comparisons that `verify` fails for a recipe with this rule."""
    recipe = build_recipe(config or VERIFIED.get(rule, LLAMA), optimizer=RULES[rule])
    layouts = [Layout(dp_shard=2, zero_stage=3)]
    options: dict[str, Any] = {"sequence_length": 12, "pool": ranks, "mutation": mutation}
    (cell,) = verify(
        recipe, read_recipe_shape(recipe), layouts, [VerificationCase(2)], ["float64"], **options
    ).cells
    assert cell.failure is None
    assert f"weights after {rule}" in {finding.quantity for finding in cell.findings}
    return {finding.quantity for finding in cell.findings if not finding.passed}


@pytest.mark.parametrize(
    ("rule", "bug"), [("muon", orthogonalise_own_shard), ("adamw_8bit", form_blocks_in_own_shard)]
)
def test_verify_detects_a_wrong_update_of_the_recipes_rule(
    ranks: RankPool, rule: str, bug: MutationContext
) -> None:
    assert list_failed_comparisons(ranks, rule, bug) == {f"weights after {rule}"}


def test_verify_gives_adafactor_equal_gradients(ranks: RankPool) -> None:
    """The gradient of the keys' part of GPT-2's fused bias is zero but for rounding."""
    assert not list_failed_comparisons(ranks, "adafactor", None, GPT2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "bug"),
    [
        ("muon", orthogonalise_own_shard),
        ("adafactor", skip_sum_over_ranks),
        ("adamw_8bit", form_blocks_in_own_shard),
    ],
)
def test_verify_compares_the_recipes_rule_with_one_process(
    ranks: RankPool, rule: str, bug: MutationContext
) -> None:
    assert not list_failed_comparisons(ranks, rule, None)
    assert list_failed_comparisons(ranks, rule, bug) == {f"weights after {rule}"}


def save_after_two_steps(config: dict[str, Any], layout: Layout, rule: str, root: str) -> str:
    model, optimizer = build(read_config(config), layout, rule)
    run_steps(model, optimizer, range(2))
    saved = save_checkpoint(
        root,
        2,
        collect_state(model, optimizer),
        {},
        merged_values={"optimizer": collect_optimizer_values(optimizer)},
    )
    return str(saved.path)


def resume_for_one_step(
    config: dict[str, Any], layout: Layout, rule: str, path: str
) -> dict[str, Tensor]:
    model, optimizer = build(read_config(config), layout, rule)
    values = load_checkpoint(path, collect_state(model, optimizer))
    load_optimizer_values(optimizer, values["optimizer"], trainable=model.trainable)
    run_steps(model, optimizer, range(2, 3))
    return {name: model.gather_parameter(name).detach().clone() for name in model.layouts}


@pytest.mark.parametrize("rule", RULES)
def test_state_loads_under_another_layout(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    # Saved under expert parallelism; loaded under tensor parallelism and by one process.
    path = ranks.run(
        2, save_after_two_steps, MOE, Layout(dp_shard=2, ep=2, zero_stage=1), rule, str(tmp_path)
    )[0]
    expected = train_weights(MOE, Layout(), rule)
    assert (
        compute_worst_error(expected, resume_for_one_step(MOE, Layout(), rule, path))
        <= ROUNDING[rule]
    )
    for got in ranks.run(2, resume_for_one_step, MOE, Layout(tp=2), rule, path):
        assert compute_worst_error(expected, got) <= ROUNDING[rule]
