"""Offloaded optimizer states under every kind of layout: after five steps weights, moments and
step counts are those of a run whose states are resident, bit for bit, on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import RankGrid
from shardwright.numerics import get_local_tensor
from shardwright.offload import OffloadedOptimizer
from shardwright.optim import collect_optimizer_moments, collect_optimizer_values
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, begin_update, update_parameters
from tests import forked
from tests.multiprocess.limited_update import MOMENT_BYTES
from tests.multiprocess.pool import RankPool
from tests.unit.training.finished import ALPHABET

NUM_STEPS = 5
RATE = 1e-2
DENSE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 60, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "norm_topk_prob": True,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "sequence_length": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": NUM_STEPS, "learning_rate": RATE, "weight_decay": 0.1,
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd", "momentum": 0.9},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"layout": {"dp_replicate": 2}},
    "zero1": {"layout": {"dp_shard": 2, "zero_stage": 1}},
    "zero2": {"layout": {"dp_shard": 2, "zero_stage": 2}},
    "zero3": {"layout": {"dp_shard": 2, "zero_stage": 3}},
    "tp2": {"layout": {"tp": 2}},
    "cp2": {"layout": {"cp": 2}},
    "pp2 x zero1": {"layout": {"pp": 2, "dp_shard": 2, "zero_stage": 1}},
    "ep2": {"model": {"config": SPARSE}, "layout": {"dp_shard": 2, "ep": 2, "zero_stage": 1}},
    "adapters": {"adapters": {"rank": 4}, "layout": {"dp_shard": 2, "zero_stage": 3}},
    "adapters on NF4": {"adapters": {"rank": 4, "quantize": "nf4"}, "layout": {"dp_replicate": 2}},
    "frozen": {"model": {"config": DENSE, "freeze": ["*norm.weight"]}, "layout": {"tp": 2}},
}
SHORT = (
    ("tp2", "muon"),
    ("ep2", "adamw_8bit"),
    ("pp2 x zero1", "adafactor"),
    ("adapters on NF4", "sgd"),
)
"""Cells of the short suite; the grid of `verify` has AdamW under every parallelism."""


def build_recipe(folder: Path, sections: dict[str, Any]) -> Recipe:
    (folder / "corpus.txt").write_text(ALPHABET * 40)
    return Recipe.model_validate(
        {
            "model": {"config": DENSE},
            "tokenizer": {"kind": "character"},
            "data": {
                "sources": str(folder / "corpus.txt"),
                "cache_dir": str(folder / "cache"),
            },
            "precision": "fp32",
            "training": TRAINING,
            "run": {"dir": str(folder / "run"), "device": "cpu"},
        }
        | sections
    )


def train_steps(recipe: Recipe, world_size: int) -> tuple[dict[str, Tensor], Any, int]:
    """Return this rank's weights, moments and norms, the optimizer's values, and its buckets.

    Frozen weights in a slower tier are left out. Asserts that moments are written in backward
    passes if nothing needs the norm.
    """
    validated_run = validate_run(recipe, world_size)
    device = find_device(recipe)
    state = build_state(validated_run, device)
    model = state.model
    optimizer = state.optimizer
    plan = validated_run.plan
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    data_rank = RankGrid(plan.layout).data_rank(rank)
    norms = []
    for step in range(NUM_STEPS):
        batches = read_step_micro_batches(
            validated_run.data.train, order, plan.batch, step, data_rank
        )
        if device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        begin_update(optimizer, RATE * (1 + step))
        accumulate_gradients(model, batches, seed=0, step=step)
        if isinstance(optimizer, OffloadedOptimizer):
            written_bytes = optimizer.pop_counts().written_bytes
            assert recipe.training.max_grad_norm is not None or written_bytes > 0
        update = update_parameters(
            model,
            optimizer,
            learning_rate=RATE * (1 + step),
            max_grad_norm=recipe.training.max_grad_norm,
            overlaps_forward=True,
        )
        norms.append(update.gradient_norm)
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.wait_for_update()
    named = dict(model.named_parameters())
    moments = collect_optimizer_moments(optimizer, named.items())
    tensors = {key: get_local_tensor(moment.tensor) for key, moment in moments.items()}
    for name in named:
        local = model.read_parameter(name)
        if local is not None:
            tensors[name] = local
    copies = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
    copies["norms"] = torch.tensor(norms, dtype=torch.float64)
    values = collect_optimizer_values(optimizer)
    num_buckets = 0
    if isinstance(optimizer, OffloadedOptimizer):
        num_buckets = optimizer.num_buckets
        is_updated_on_host = device.type == "cuda" and recipe.offload.update_on == "host"
        assert (optimizer.host_update is not None) == is_updated_on_host
    if recipe.offload.parameters != "none":
        assert state.weight_offload is not None
        assert state.weight_offload.store.counts.read_bytes > 0
    state.close_offloads()
    return copies, values, num_buckets


def find_device(recipe: Recipe) -> torch.device:
    """Return the CPU, or the current CUDA device."""
    if recipe.run.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def find_differences(
    recipe: Recipe, world_size: int, offloads: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Train with each offloading on this rank, by default of states to each tier; list what
    differs from resident states."""
    differences = []
    expected, expected_values, _ = train_steps(recipe, world_size)
    buffer_bytes = 16384 if recipe.adapters is None else 4096
    tiers = ("host", "disk") if recipe.training.max_grad_norm is not None else ("disk",)
    default: list[dict[str, Any]] = [{"optimizer": tier} for tier in tiers]
    for section in offloads or default:
        offload = {"offload": section | {"buffer_bytes": buffer_bytes}}
        offloaded = Recipe.model_validate(recipe.model_dump(mode="json") | offload)
        got, values, num_buckets = train_steps(offloaded, world_size)
        missing = expected.keys() - got.keys()
        may_miss = recipe.adapters is not None and "parameters" in section
        if values != expected_values or (missing and not may_miss):
            differences.append(f"{section}: names or values")
        if num_buckets < 2 and recipe.optimizer.name != "adafactor":
            differences.append(f"{section}: {num_buckets} buckets")
        differences += [
            f"{section}: {key}"
            for key, tensor in got.items()
            if key not in expected or not torch.equal(tensor, expected[key])
        ]
    return differences


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=[] if (name, rule) in SHORT else pytest.mark.long)
        for name in LAYOUTS
        for rule in RULES
    ],
)
def test_five_steps_have_the_bits_of_resident_states(
    ranks: RankPool, tmp_path: Path, name: str, rule: str
) -> None:
    recipe = build_recipe(tmp_path, LAYOUTS[name] | {"optimizer": RULES[rule]})
    world_size = 4 if "pp2" in name else 2
    validate_run(recipe, world_size)  # tokenises once
    assert ranks.run(world_size, find_differences, recipe, world_size) == [[]] * world_size


BACKWARD = {
    "zero1": {"precision": "bf16", "optimizer": RULES["adamw_8bit"]},
    "zero2": {"recompute": "full", "optimizer": RULES["sgd"]},
    "zero3": {"layout": {"dp_shard": 2, "zero_stage": 3, "wrap_blocks": 2}},
    "ep2": {},
    "adapters": {},
}


@pytest.mark.parametrize("name", BACKWARD)
def test_updates_in_the_backward_pass_have_the_bits_of_resident_states(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    training = TRAINING | {"max_grad_norm": None, "max_skipped_steps": 0}
    recipe = build_recipe(tmp_path, LAYOUTS[name] | {"training": training} | BACKWARD[name])
    validate_run(recipe, 2)  # tokenises once
    assert ranks.run(2, find_differences, recipe, 2) == [[]] * 2


def compute_gradients(recipe: Recipe, world_size: int) -> tuple[dict[str, Tensor], int]:
    """Return this rank's gradients of a step, and the most bytes of saved tensors that had left."""
    validated_run = validate_run(recipe, world_size)
    device = find_device(recipe)
    state = build_state(validated_run, device)
    plan = validated_run.plan
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    data_rank = RankGrid(plan.layout).data_rank(torch.distributed.get_rank())
    batches = read_step_micro_batches(validated_run.data.train, order, plan.batch, 0, data_rank)
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    accumulate_gradients(state.model, batches, seed=0, step=0)
    gradients = {
        name: get_local_tensor(parameter.grad).cpu().clone()
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None
    }
    offload = state.activation_offload
    if offload is None:
        return gradients, 0
    state.model.decoder.to("meta")  # nothing may refer to a saved tensor any more
    assert offload.num_bytes == 0
    offload.close()
    return gradients, offload.peak_bytes


def find_gradient_differences(recipe: Recipe, world_size: int, tier: str = "disk") -> list[str]:
    """List the gradients that differ from those of a run with resident activations."""
    expected, _ = compute_gradients(recipe, world_size)
    offload = {"offload": {"activations": tier, "buffer_bytes": 4096}}
    got, num_bytes = compute_gradients(
        Recipe.model_validate(recipe.model_dump(mode="json") | offload), world_size
    )
    assert expected.keys() == got.keys()
    differences = [name for name in expected if not torch.equal(expected[name], got[name])]
    return differences if num_bytes else [*differences, "nothing left the device"]


ACTIVATION_LAYOUTS = {
    name: LAYOUTS[name] for name in ("zero3", "tp2", "cp2", "ep2", "adapters", "adapters on NF4")
} | {
    "pp2": {"layout": {"pp": 2}},
    "pp2 interleaved": {"layout": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}},
    **{
        f"pp2 {schedule}": {
            "layout": {"pp": 2, "schedule": schedule},
            "training": TRAINING | {"gradient_accumulation_steps": 4},
        }
        for schedule in ("zb_h1", "zbv", "dualpipev")
    },
}

SHORT_ACTIVATIONS = (("adapters", "selective"), ("pp2 interleaved", "full"))
"""Cells of the short suite that the grid of `verify` does not have."""


def build_activation_sections(name: str, recompute: str) -> dict[str, Any]:
    """Return a recipe's sections with two blocks per stage."""
    sections = {"model": {"config": DENSE}} | ACTIVATION_LAYOUTS[name]
    num_layers = 8 if "training" in sections else 4
    config = sections["model"]["config"] | {"num_hidden_layers": num_layers}
    return sections | {"model": {"config": config}, "recompute": recompute}


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(
            name,
            recompute,
            marks=[] if (name, recompute) in SHORT_ACTIVATIONS else pytest.mark.long,
        )
        for name in ACTIVATION_LAYOUTS
        for recompute in ("none", "selective", "full")
    ],
)
def test_gradients_have_the_bits_of_resident_activations(
    ranks: RankPool, tmp_path: Path, name: str, recompute: str
) -> None:
    recipe = build_recipe(tmp_path, build_activation_sections(name, recompute))
    validate_run(recipe, 2)  # tokenises once
    assert ranks.run(2, find_gradient_differences, recipe, 2) == [[], []]


def update_within_limit(tier: str, folder: Path, limit_bytes: int) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tests.multiprocess.limited_update"]
    done = forked.run(
        [*command, tier, str(folder), str(limit_bytes)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_states_on_disk_train_within_a_memory_limit_that_resident_ones_exceed(
    tmp_path: Path,
) -> None:
    limit_bytes = MOMENT_BYTES // 2
    status, expected, _ = update_within_limit("none", tmp_path, 0)
    assert status == 0
    status, _, error = update_within_limit("none", tmp_path, limit_bytes)
    assert status != 0
    assert "can't allocate memory" in error
    assert update_within_limit("disk", tmp_path, limit_bytes)[:2] == (0, expected)
