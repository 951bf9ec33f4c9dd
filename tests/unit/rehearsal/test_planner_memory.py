"""The planner's bytes agree with the rehearsal's over models and layouts: weights, states and the
rest within 3%, some cases within 5%; with offloaded weights each tier within 2%.

The rehearsal is the reference: it runs the real step without its memory and equals real runs
(tests/multiprocess/test_rehearse.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
from tests.unit.planner import models
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.config.recipe import RecomputeKind, RecomputeMode
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.layout.saved_results import LayerResults, RecomputeChoice, describe_results
from shardwright.placement.compilation import PointwiseChoice
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.parameter_memory import compute_persistent_memory
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import remove_kernels
from shardwright.planner.problem import build_template, get_recipe_facts
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import rehearse_rank

TOKENS = 512
ROWS = 4
NO_OVERHEAD = Efficiency(
    reserve_share=0.0, reserve_bytes=0.0, context_bytes=0.0, communicator_bytes=0.0
)


SCALED_RECIPES: tuple[LowPrecisionRecipe, ...] = (
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "mxfp8",
    "nvfp4",
)
"""Recipes that multiply the models' matrices; `blockwise` takes multiples of 128."""


@dataclass(frozen=True)
class Case:
    """A step to rehearse and predict; `sections` are further sections of the recipe."""

    model: str
    layout: Layout
    steps: int = 1
    recompute: RecomputeMode = "none"
    kind: str = "bf16"
    sections: dict[str, Any] = field(default_factory=dict)
    saved: tuple[LayerResults, ...] | None = None
    """Saved results of each layer, with `mixed` recomputation."""
    rank: int = 0
    """Rank of the pipeline, or without one of the world."""
    tolerance: float = 0.03
    """Relative error of the peak besides weights and states; `LESS_EXACT` takes precedence."""

    def make_recipe(self) -> Recipe:
        """Build a recipe with `ROWS` rows of `TOKENS` per micro-batch."""
        return validate_recipe(
            {
                "data": {"sources": ["nowhere"]},
                "precision": {"kind": self.kind},
                "training": {
                    "sequence_length": TOKENS,
                    "micro_batch_size": ROWS,
                    "learning_rate": 1e-3,
                    "max_steps": 1,
                },
                **self.sections,
                "model": {
                    "config": models.CONFIGS[self.model],
                    "loss_chunk_tokens": 128,
                    **self.sections.get("model", {}),
                },
            }
        )

    def build_choice(self) -> RecomputeChoice | None:
        """Build the plan's choice; its figures are not used."""
        if self.saved is None:
            return None
        return RecomputeChoice(self.saved, "test", "none", 0.0, 0.0, 0.0, 0.0)

    def __str__(self) -> str:
        parts = (self.model, self.layout, self.steps, self.recompute, *self.sections)
        if "master_weights" in self.sections.get("precision", ()):
            parts += ("bf16 weights",)
        parts += tuple(
            f"frozen {names}" for names in self.sections.get("model", {}).get("freeze", ())
        )
        if self.rank:
            parts += (f"rank {self.rank}",)
        if self.kind != "bf16":
            options = self.sections.get("precision", {}).get(self.kind, {})
            parts += (self.kind, *(options[key] for key in ("recipe", "compute") if key in options))
        adapters = self.sections.get("adapters", {})
        parts += tuple(key for key in ("targets", "dropout") if key in adapters)
        if adapters.get("kind") == "dora":
            parts += ("dora",)
        results = [] if self.saved is None else map(describe_results, dict.fromkeys(self.saved))
        return "-".join(map(str, (*parts, *results)))


LORA = {"adapters": {"rank": 8}}
QLORA = {"adapters": {"rank": 8, "quantize": "nf4"}}
LORA_OF_ATTENTION = {"adapters": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
LORA_OF_OUTPUT = {"adapters": {"rank": 8, "targets": ["o_proj"]}}
LORA_OF_GATES = {"adapters": {"rank": 8, "targets": ["gate_proj", "up_proj"]}}
LORA_WITH_DROPOUT = {"adapters": {"rank": 8, "dropout": 0.1}}
DORA = {"adapters": {"rank": 8, "kind": "dora"}}
DORA_WITH_DROPOUT = {"adapters": {"rank": 8, "kind": "dora", "dropout": 0.1}}
QDORA = {"adapters": {"rank": 8, "kind": "dora", "quantize": "nf4"}}
PREFERENCES = {"preference": {"kind": "dpo"}}
OFFLOAD = {"offload": {"optimizer": "host", "activations": "host", "buffer_bytes": 2**20}}
DEEP_OFFLOAD = OFFLOAD | {"model": {"config": models.CONFIGS["llama"] | {"num_hidden_layers": 12}}}
PAIRS_OFFLOAD = OFFLOAD | {"model": {"config": models.CONFIGS["llama"] | {"num_hidden_layers": 8}}}
"""Two layers in each stage of a schedule with two stages per rank."""
MANY_HEADS = {
    "model": {
        "config": models.CONFIGS["llama"] | {"num_hidden_layers": 12, "num_key_value_heads": 4}
    }
}
LARGE_VOCABULARY = {"model": {"config": models.CONFIGS["llama"] | {"vocab_size": 16_000}}}
FROZEN_ON_HOST = LORA | {"offload": {"parameters": "host"}}
FROZEN_ON_DISK = {
    "adapters": {"rank": 8, "quantize": "nf4"},
    "offload": {"parameters": "disk", "optimizer": "host"},
}
TRAINED_ON_DISK = {"offload": {"parameters": "disk", "optimizer": "disk", "buffer_bytes": 2**20}}
WORKING = {"precision": {"kind": "bf16", "working_weights": True}}
WORKING_ON_DISK = TRAINED_ON_DISK | WORKING
WORKING_ON_HOST = WORKING | {
    "offload": {
        "parameters": "host",
        "optimizer": "host",
        "update_on": "host",
        "buffer_bytes": 2**20,
    }
}
WORKING_FROM_DISK = WORKING | {"offload": TRAINED_ON_DISK["offload"] | {"update_on": "host"}}
UPDATED_FROM_DISK = {"offload": WORKING_FROM_DISK["offload"]}
WEIGHT_SECTIONS = (
    WORKING_FROM_DISK,
    UPDATED_FROM_DISK,
    FROZEN_ON_HOST,
    FROZEN_ON_DISK,
    TRAINED_ON_DISK,
    WORKING_ON_DISK,
    WORKING_ON_HOST,
)
FUSED = {"model": {"fused_pointwise": "compiled"}}
WHOLE_LOGITS = {
    "model": {
        "config": models.CONFIGS["gemma2"] | {"vocab_size": 16_000},
        "fused_pointwise": "compiled",
        "loss_chunk_tokens": ROWS * TOKENS,
    }
}
EMBEDDING = {"model": {"freeze": ["model.embed_tokens.weight"]}}
HEAD = {"model": {"freeze": ["lm_head.weight"]}}
LOWER_HALF = {"model": {"freeze": ["model.embed_tokens.weight", "model.layers.[01].*"]}}
LOWER_QUARTER = {"model": {"freeze": ["model.embed_tokens.weight", "model.layers.0.*"]}}
ALL_BUT_LAST = {"model": {"freeze": ["model.embed_tokens.weight", "model.layers.[012].*"]}}
ALL_BUT_NORMS = {"model": {"freeze": ["*_proj*", "*embed*", "lm_head.weight"]}}
ALL_BUT_HEAD = {"model": {"freeze": ["model.*"]}}
EXPERTS = {"model": {"freeze": ["*experts*"]}}
FEED_FORWARD = {"model": {"freeze": ["*mlp*"]}}
ATTENTION = {"model": {"freeze": ["*self_attn*"]}}
ALL_BUT_DOWN = {
    "model": {
        "freeze": [
            *("*embed*", "*norm*", "lm_head.weight", "*self_attn*"),
            *("*gate_proj*", "*up_proj*"),
        ]
    }
}
ALL_BUT_LAST_DOWN = {
    "model": {"freeze": [*ALL_BUT_DOWN["model"]["freeze"], "model.layers.[012].*"]}
}
BF16 = {"precision": {"kind": "bf16", "master_weights": "bf16"}}
BF16_BLOCKS = BF16 | {"optimizer": {"name": "adamw_8bit"}}
MUON = {"optimizer": {"name": "muon"}}
ADAFACTOR = {"optimizer": {"name": "adafactor"}}
SMALL_BLOCKS = {"optimizer": {"name": "adamw_8bit", "block_size": 32}}
MUON_OFFLOAD = MUON | {"offload": {"optimizer": "disk", "buffer_bytes": 2**20}}
NOTHING: LayerResults = frozenset()
MIDDLE: LayerResults = frozenset(["attention", "projections"])
PRODUCTS: LayerResults = frozenset(["attention", "projections", "attention_out", "gate_up"])
SUMS: LayerResults = frozenset(["gathered", "attention_out"])
GATHERED: LayerResults = frozenset(["gathered", "attention", "projections", "gate_up"])
ENDS: LayerResults = frozenset(["attention_out", "down"])
SPARSE: LayerResults = frozenset(["attention", "experts"])
EXPERT_PARALLEL = Layout(dp_shard=2, ep=2, zero_stage=3)
ONCE = Layout(dp_shard=2, ep=2, zero_stage=3, expert_dispatch="once_per_rank")
PADDED = Layout(dp_shard=2, ep=2, zero_stage=3, expert_dispatch="padded", expert_row_limit=1.5)


def make_scaled_case(
    recipe: LowPrecisionRecipe,
    compute: str,
    model: str = "llama",
    recompute: RecomputeMode = "none",
) -> Case:
    """Build a case of 8-bit or 4-bit products that are emulated in a precision."""
    if recipe == "nvfp4":
        options = {"experimental": True, "compute": compute}
        precision = {"kind": "nvfp4", "nvfp4": options}
    else:
        precision = {"kind": "fp8", "fp8": {"recipe": recipe, "compute": compute}}
    kind = str(precision["kind"])
    return Case(model, Layout(), 1, recompute, kind, {"precision": precision})


CASES = [
    Case(
        "llama",
        Layout(dp_shard=2, zero_stage=3),
        recompute="mixed",
        saved=(NOTHING, NOTHING, NOTHING, MIDDLE),
    ),
    Case("llama", Layout(), recompute="mixed", saved=(NOTHING, MIDDLE, PRODUCTS, PRODUCTS)),
    Case("llama", Layout(), sections=BF16),
    Case("llama", Layout(), steps=2, recompute="full", sections=BF16_BLOCKS),
    Case("llama", Layout(dp_replicate=2), steps=2, sections=BF16),
    Case("llama", Layout(), kind="fp64", sections={"optimizer": {"name": "adamw_8bit"}}),
    Case("llama", Layout(), sections=MUON),
    Case("llama", Layout(), sections=MUON | LARGE_VOCABULARY),
    Case("llama", Layout(), sections=MUON | DORA),
    Case("llama", Layout(), sections=MUON | EMBEDDING),
    Case("llama", Layout(pp=2), steps=4, sections=MUON, rank=1),
    Case("gemma2", Layout(dp_shard=4, zero_stage=3), sections=MUON),
    Case("llama", Layout(tp=2), sections=MUON_OFFLOAD),
    Case("qwen3_moe", Layout(dp_shard=2, ep=2, zero_stage=1), steps=2, sections=MUON),
    Case("llama", Layout(dp_shard=4, zero_stage=1), steps=2, sections=BF16),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=BF16),
    Case("llama", Layout(tp=2), sections=BF16),
    Case("llama", Layout(dp_replicate=2), steps=2),
    Case("llama", Layout(dp_shard=4, zero_stage=1), steps=2),
    Case("llama", Layout(dp_shard=4, zero_stage=2), steps=2, recompute="selective"),
    Case("llama", Layout(dp_shard=4, zero_stage=3), recompute="full"),
    Case("llama", Layout(tp=2)),
    Case("llama", Layout(pp=2), steps=4),
    Case("llama", Layout(cp=2, cp_method="ring", zero_stage=1)),
    Case("llama", Layout(cp=2, cp_method="ulysses"), steps=2),
    Case("llama", Layout(cp=2, cp_method="ring"), recompute="full"),
    Case("llama", Layout(dp_replicate=2, cp=2, cp_method="ulysses"), steps=2),
    Case("llama", Layout(cp=4, cp_method="all_gather", zero_stage=3), sections=MANY_HEADS),
    # Tiles of shared rows save no scores, and soft caps have no fused kernel.
    Case("gemma2", Layout(cp=2, cp_method="ring", zero_stage=3), tolerance=0.1),
    Case("gemma2", Layout(cp=2, cp_method="all_gather", zero_stage=1), steps=2, tolerance=0.1),
    Case("gemma2", Layout(cp=2, cp_method="ulysses", zero_stage=3), tolerance=0.1),
    Case("deepseek_v3", Layout()),
    Case("deepseek_v3", Layout(), recompute="full"),
    Case("deepseek_v3", Layout(cp=2, cp_method="all_gather"), tolerance=0.04),
    Case("deepseek_v3", Layout(tp=2)),
    Case("gemma2", Layout(cp=4, cp_method="ring", zero_stage=1), recompute="full", tolerance=0.1),
    Case("gemma2", Layout(cp=2, cp_method="ulysses"), recompute="selective", tolerance=0.1),
    Case("qwen3_moe", Layout(dp_shard=2, ep=2, zero_stage=3)),
    Case(
        "qwen3_moe",
        Layout(dp_shard=2, ep=2, zero_stage=3, expert_dispatch="halves"),
        recompute="selective",
        tolerance=0.01,
    ),
    Case("qwen3_moe", PADDED, recompute="full", tolerance=0.01),
    Case("qwen3_moe", replace(PADDED, expert_row_limit=1.25), tolerance=0.01),
    Case("qwen3_moe", ONCE, recompute="selective", tolerance=0.01),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=LORA),
    Case("llama", Layout(dp_shard=2, zero_stage=3), sections=LORA_OF_ATTENTION),
    Case("llama", Layout(), sections=DORA_WITH_DROPOUT),
    Case("llama", Layout(pp=2), 4, sections=LORA_OF_ATTENTION, rank=1),
    Case("llama", Layout(), sections=QLORA),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=PREFERENCES),
    Case("qwen3_moe", Layout(dp_shard=2, zero_stage=3), recompute="full"),
    Case("olmo2", Layout(tp=2), tolerance=0.01),
    Case("llama", Layout(tp=2, sequence_parallel=False)),
    Case("llama", Layout(dp_shard=2, zero_stage=3), recompute="selective", sections=OFFLOAD),
    Case("qwen3_moe", Layout(), sections=OFFLOAD, tolerance=0.015),
    Case("llama", Layout(), sections=OFFLOAD | LORA),  # the moments fill one buffer and a part
    Case("llama", Layout(), recompute="full", sections=WORKING),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=FROZEN_ON_HOST),
    Case("llama", Layout(pp=2), steps=4, sections=FROZEN_ON_DISK),
    Case("llama", Layout(dp_replicate=2), steps=2, sections=TRAINED_ON_DISK),
    Case("llama", Layout(tp=2), recompute="selective", sections=TRAINED_ON_DISK),
    Case("llama", Layout(tp=4), recompute="selective"),
    Case("llama", Layout(tp=2), recompute="mixed", saved=(NOTHING, SUMS, SUMS, GATHERED)),
    Case("llama", Layout(), recompute="full", sections=FUSED),
    Case("gemma2", Layout(), sections=FUSED),
    Case("gemma2", Layout(), recompute="full", sections=WHOLE_LOGITS),
    Case("qwen3_moe", Layout(), sections=FUSED),
    # Kinds that were predicted less exactly before the backward pass was followed by operation.
    Case("llama", Layout(dp_replicate=2), recompute="full", tolerance=0.005),
    Case("qwen3_moe", Layout(), steps=2, recompute="full", tolerance=0.01),
    Case("qwen3_moe", Layout(dp_shard=2, ep=2, zero_stage=3), recompute="full", tolerance=0.015),
    Case(
        "llama",
        Layout(pp=2, schedule="interleaved_1f1b"),
        steps=4,
        recompute="full",
        rank=1,
        tolerance=0.015,
    ),
    Case(
        "llama",
        Layout(pp=2, schedule="zb_h1"),
        steps=4,
        recompute="full",
        rank=1,
        tolerance=0.005,
    ),
    Case(
        "llama",
        Layout(pp=2, schedule="zb_h1"),
        steps=4,
        recompute="full",
        rank=1,
        sections=DEEP_OFFLOAD,
        tolerance=0.005,
    ),
    Case("llama", Layout(pp=2), steps=4, rank=1, sections=PAIRS_OFFLOAD, tolerance=0.005),
    Case("llama", Layout(pp=2, schedule="zbv"), steps=4, sections=PAIRS_OFFLOAD, tolerance=0.015),
    Case(
        "llama",
        Layout(pp=2, schedule="gpipe"),
        steps=4,
        rank=1,
        sections=LARGE_VOCABULARY,
        tolerance=0.02,
    ),
    Case(
        "llama",
        Layout(pp=2),
        steps=4,
        recompute="full",
        sections=LARGE_VOCABULARY,
        tolerance=0.005,
    ),
    Case("llama", Layout(), sections=LARGE_VOCABULARY, tolerance=0.005),
    Case("llama", Layout(), recompute="selective", sections=LORA, tolerance=0.005),
    Case("gemma2", Layout(), recompute="full", kind="fp32", tolerance=0.015),
    Case(
        "llama",
        Layout(dp_shard=2, zero_stage=2),
        steps=2,
        recompute="selective",
        sections=TRAINED_ON_DISK,
    ),
    Case("llama", Layout(dp_shard=2, zero_stage=3), sections=TRAINED_ON_DISK),
    Case("llama", Layout(dp_shard=4, zero_stage=3), 2, "full", sections=WORKING_ON_HOST),
    Case("llama", Layout(dp_shard=2, zero_stage=1), sections=WORKING_ON_DISK),
    Case("llama", Layout(dp_shard=2, zero_stage=3), sections=WORKING_FROM_DISK),
    Case("llama", Layout(), sections=UPDATED_FROM_DISK),
    Case("llama", Layout(), sections=EMBEDDING, tolerance=0.005),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=HEAD, tolerance=0.005),
    Case("llama", Layout(dp_replicate=2), recompute="full", sections=LOWER_HALF, tolerance=0.005),
    Case("llama", Layout(dp_shard=4, zero_stage=1), 2, sections=ALL_BUT_LAST, tolerance=0.005),
    Case("llama", Layout(dp_shard=4, zero_stage=3), sections=ALL_BUT_HEAD, tolerance=0.005),
    Case("llama", Layout(dp_shard=4, zero_stage=2), sections=ALL_BUT_NORMS, tolerance=0.005),
    Case("llama", Layout(tp=2), recompute="selective", sections=LOWER_HALF, tolerance=0.005),
    Case("llama", Layout(pp=2), 4, sections=ALL_BUT_LAST, tolerance=0.005),
    Case("llama", Layout(pp=2), 4, sections=ALL_BUT_LAST, rank=1, tolerance=0.005),
    Case("qwen3_moe", Layout(), sections=EXPERTS, tolerance=0.01),
    Case("llama", Layout(), sections=TRAINED_ON_DISK | ATTENTION),
    make_scaled_case("rowwise_with_gw_hp", "fp64"),
    make_scaled_case("nvfp4", "fp64", "qwen3_moe"),
    make_scaled_case("tensorwise", "fp32", recompute="full"),
    make_scaled_case("rowwise", "bf16", recompute="selective"),
    make_scaled_case("mxfp8", "bf16", "qwen3_moe", "selective"),
    Case("llama", Layout(), sections=QDORA, tolerance=0.01),
    Case("llama", Layout(tp=2), recompute="selective", sections=DORA),
    Case("llama", Layout(pp=2, schedule="zb_h1"), 4, sections=ALL_BUT_NORMS, rank=1),
    Case("llama", Layout(pp=2, schedule="interleaved_1f1b"), 4, sections=LOWER_HALF),
    Case("llama", Layout(pp=2, schedule="zbv"), 4, "full", sections=LOWER_HALF),
    Case("llama", Layout(pp=2, schedule="gpipe"), 4, "full", sections=LOWER_HALF, rank=1),
    Case("qwen3_moe", Layout(tp=2), sections=ALL_BUT_HEAD),
    Case("olmo2", Layout(tp=2), sections=ATTENTION, tolerance=0.01),
    # What earlier versions predicted wrongly in randomly drawn recipes.
    Case(
        "llama",
        Layout(cp=4, cp_method="all_gather", zero_stage=2),
        recompute="full",
        sections=FEED_FORWARD,
        tolerance=0.005,
    ),
    Case("gpt_neox", Layout(cp=2, cp_method="all_gather"), tolerance=0.005),
    Case("gpt_neox", Layout(cp=2, cp_method="ulysses"), tolerance=0.005),
    Case("gpt_neox", Layout(cp=2, cp_method="ring"), sections=LORA, tolerance=0.005),
    Case("llama", Layout(cp=8, cp_method="ulysses", zero_stage=2), sections=FEED_FORWARD),
    *(
        Case("llama", layout, recompute="selective", rank=layout.cp - 1, tolerance=0.005)
        for layout in (
            Layout(cp=2, cp_method="ring"),
            Layout(cp=4, cp_method="all_gather"),
        )
    ),
    Case("llama", Layout(cp=2, cp_method="ring"), sections=LORA_WITH_DROPOUT, tolerance=0.01),
    *(
        Case("llama", Layout(), recompute=recompute, sections=LORA_WITH_DROPOUT, tolerance=0.005)
        for recompute in ("selective", "full")
    ),
    Case("llama", Layout(), sections=LORA_OF_GATES, tolerance=0.005),
    Case("llama", Layout(), sections=ALL_BUT_DOWN, tolerance=0.005),
    Case("llama", Layout(), sections=ALL_BUT_LAST_DOWN, tolerance=0.015),
    Case("llama", Layout(dp_shard=2, zero_stage=1), 1, "full", sections=QLORA, tolerance=0.005),
    Case("llama", Layout(dp_shard=2, zero_stage=3), 1, "full", sections=QLORA, tolerance=0.005),
    *(
        Case("llama", Layout(pp=2, schedule="zb_h1"), 4, sections=sections, rank=rank)
        for sections in (LORA_OF_ATTENTION, LORA_OF_OUTPUT)
        for rank in range(2)
    ),
    Case("llama", Layout(pp=2, schedule="zb_h1"), 4, "full", tolerance=0.005),
    Case("llama", Layout(pp=2, schedule="zb_h1"), 4, "full", sections=LORA_WITH_DROPOUT),
    Case("llama", Layout(pp=2, schedule="zbv"), 4, "full", sections=LORA_WITH_DROPOUT, rank=1),
    Case("llama", Layout(pp=2, schedule="dualpipev"), 4, sections=LORA_OF_GATES, rank=1),
    Case("qwen3_moe", Layout(dp_shard=2, ep=2, zero_stage=2), sections=ADAFACTOR, tolerance=0.01),
    Case("llama", Layout(tp=2, dp_shard=2, zero_stage=2), sections=ADAFACTOR | DORA),
    Case("tied", Layout(pp=2), 4, sections=ADAFACTOR, rank=1),
    Case("llama", Layout(), sections=SMALL_BLOCKS, tolerance=0.005),
    Case("qwen3_moe", EXPERT_PARALLEL, recompute="selective", tolerance=0.02),
    Case("qwen3_moe", replace(EXPERT_PARALLEL, tp=2), recompute="full", tolerance=0.01),
    Case("qwen3_moe", EXPERT_PARALLEL, sections=LORA, tolerance=0.01),
    Case("qwen3_moe", Layout(dp_shard=2, zero_stage=3), 2, sections=TRAINED_ON_DISK),
    Case("llama", Layout(dp_shard=2, zero_stage=1), 2, "full", tolerance=0.005),
    Case("llama", Layout(pp=2, dp_shard=2, zero_stage=1), 4, "full", tolerance=0.005),
    Case(
        "llama",
        Layout(pp=2, dp_shard=2, zero_stage=1, schedule="zb_h1"),
        4,
        "full",
        tolerance=0.01,
    ),
    Case("llama", Layout(pp=2), 4, sections=TRAINED_ON_DISK | FEED_FORWARD, tolerance=0.005),
    Case("llama", Layout(pp=2), 4, sections=TRAINED_ON_DISK | LOWER_QUARTER, tolerance=0.005),
]
LONG_CASES = [
    *(
        Case(
            "llama",
            Layout(pp=2, schedule=schedule),
            4,
            recompute,
            sections=sections,
            rank=rank,
            # Adapters of queries and values count as if keys had one.
            tolerance=0.05 if sections is LORA_OF_ATTENTION else 0.03,
        )
        for schedule in ("zb_h1", "zbv", "dualpipev")
        for sections in (LORA_OF_ATTENTION, LORA_OF_OUTPUT, LORA_OF_GATES, LORA_WITH_DROPOUT)
        for recompute in ("none", "full")
        for rank in range(2)
    ),
    *(
        Case("gpt_neox", Layout(cp=cp, cp_method=method), recompute=recompute, rank=cp - 1)
        for cp in (2, 4)
        for method in ("all_gather", "ring", "ulysses")
        for recompute in get_args(RecomputeKind)
    ),
    *(
        Case("llama", Layout(), recompute=recompute, sections=sections)
        for sections in (LORA_OF_OUTPUT, LORA_OF_GATES, ALL_BUT_DOWN)
        for recompute in get_args(RecomputeKind)
    ),
    Case("llama", Layout(), recompute="selective", sections=DORA_WITH_DROPOUT),
    *(
        make_scaled_case(recipe, compute, model, recompute)
        for recipe in SCALED_RECIPES
        for compute, recomputes in (
            ("fp32", ("none",)),
            ("bf16", get_args(RecomputeKind)),
            ("fp64", get_args(RecomputeKind)),
        )
        for model in ("llama", "qwen3_moe")
        if recipe != "tensorwise" or model == "llama"
        for recompute in recomputes
    ),
    *(
        Case("llama", layout, steps, recompute, sections=sections)
        for layout, steps, sections in (
            (Layout(), 1, DORA),
            (Layout(), 2, QDORA),
            (Layout(tp=2), 1, DORA),
            (Layout(dp_shard=2, zero_stage=3), 1, DORA),
        )
        for recompute in get_args(RecomputeKind)
    ),
    *(
        Case("llama", Layout(pp=2, schedule=schedule), 4, recompute, rank=rank, sections=sections)
        for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
        for recompute, sections in (
            ("none", ALL_BUT_NORMS),
            ("none", FEED_FORWARD),
            ("full", LOWER_HALF),
            ("full", ATTENTION),
        )
        for rank in range(2)
    ),
    *(
        Case(model, layout, recompute=recompute, sections=ALL_BUT_HEAD)
        for model in ("qwen3_moe", "olmo2")
        for layout in (Layout(), Layout(tp=2))
        for recompute in get_args(RecomputeKind)
    ),
    *(
        Case("llama", layout, steps, recompute, sections=sections)
        for layout, steps, recompute in (
            (Layout(), 1, "none"),
            (Layout(), 1, "full"),
            (Layout(), 2, "selective"),
            (Layout(dp_replicate=2), 2, "none"),
            (Layout(dp_shard=4, zero_stage=1), 2, "none"),
            (Layout(dp_shard=4, zero_stage=2), 1, "selective"),
            (Layout(dp_shard=4, zero_stage=3), 1, "full"),
            (Layout(tp=2), 1, "none"),
            (Layout(pp=2), 4, "full"),
        )
        for sections in (EMBEDDING, HEAD, LOWER_HALF, ALL_BUT_NORMS, ALL_BUT_HEAD, FEED_FORWARD)
    ),
    *(
        Case("llama", Layout(pp=2), 4, sections=sections, rank=1)
        for sections in (HEAD, LOWER_HALF, ALL_BUT_NORMS, ALL_BUT_HEAD)
    ),
    *(
        Case("qwen3_moe", layout, recompute=recompute, sections=sections)
        for layout, recompute, sections in (
            (Layout(), "full", EXPERTS),
            (Layout(tp=2), "none", EXPERTS),
            (Layout(dp_shard=2, ep=2, zero_stage=3), "none", LOWER_HALF),
        )
    ),
    *(
        Case("llama", Layout(), sections=WORKING | sections, recompute="full")
        for sections in (LOWER_HALF, ALL_BUT_NORMS, ALL_BUT_HEAD)
    ),
    Case("llama", Layout(), sections=OFFLOAD | LOWER_HALF),
    Case("llama", Layout(dp_shard=2, zero_stage=3), sections=TRAINED_ON_DISK | LOWER_HALF),
    Case("llama", Layout(), sections=BF16 | ATTENTION),
    Case("tied", Layout(dp_shard=2, zero_stage=3), sections=EMBEDDING),
    Case("olmo2", Layout(tp=2), sections=LOWER_HALF),
    Case("gemma2", Layout(), sections=FEED_FORWARD),
    Case(
        "llama",
        Layout(),
        recompute="mixed",
        saved=(NOTHING, MIDDLE, PRODUCTS, PRODUCTS),
        sections=LOWER_HALF,
    ),
    Case("llama", Layout(cp=2, cp_method="ring", zero_stage=1), sections=LOWER_HALF),
    Case("qwen3_moe", replace(PADDED, dp_shard=4, ep=4), recompute="selective", tolerance=0.01),
    Case("qwen3_moe", replace(PADDED, tp=2, expert_row_limit=2.0)),
    Case("llama", Layout(pp=2), steps=4, sections=OFFLOAD),
    Case("gpt2", Layout(dp_shard=2, zero_stage=1)),
    Case("olmo2", Layout(tp=2), recompute="selective"),
    Case("qwen3_moe", Layout(), recompute="full", sections=OFFLOAD),
    Case("llama", Layout(tp=2, sequence_parallel=False), recompute="selective"),
    Case("gemma2", Layout(tp=2), recompute="selective"),
    Case("gpt2", Layout(tp=2), recompute="selective", sections=OFFLOAD),
    Case("llama", Layout(tp=2), sections=FUSED),
    Case("llama", Layout(dp_shard=2, zero_stage=3), recompute="selective", sections=FUSED),
    Case("gpt2", Layout(), sections=FUSED),
    Case("gemma2", Layout(), recompute="selective", sections=FUSED),
    Case("qwen3_moe", Layout(), recompute="full", sections=FUSED),
    *(
        Case("llama", Layout(pp=2, schedule=schedule), 4, recompute, rank=rank)
        for schedule, recomputes in (
            ("1f1b", ("none", "full")),
            ("interleaved_1f1b", ("none", "selective")),
            ("zb_h1", ("none", "selective")),
            ("zbv", ("selective", "full")),
            ("dualpipev", ("full",)),
        )
        for recompute in recomputes
        for rank in range(2)
    ),
    *(
        Case(
            "llama", Layout(pp=2, schedule=schedule), 8, recompute, rank=rank, sections=DEEP_OFFLOAD
        )
        for schedule, recompute in (
            ("zb_h1", "none"),
            ("zb_h1", "selective"),
            ("zbv", "none"),
            ("zbv", "full"),
            ("dualpipev", "none"),
            ("dualpipev", "full"),
        )
        for rank in range(2)
    ),
    *(
        Case(
            "llama",
            Layout(pp=2, schedule=schedule),
            4,
            recompute,
            rank=rank,
            sections=PAIRS_OFFLOAD,
        )
        for schedule, recomputes in (
            ("1f1b", ("full",)),
            ("gpipe", ("none",)),
            ("interleaved_1f1b", ("none",)),
            ("zbv", ("selective", "full")),
        )
        for recompute in recomputes
        for rank in range(2)
    ),
    *(
        Case("llama", layout, steps, "full", sections=LARGE_VOCABULARY)
        for layout in (Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3))
        for steps in (1, 2)
    ),
    Case(
        "llama",
        Layout(pp=2, schedule="gpipe"),
        steps=4,
        recompute="full",
        sections=LARGE_VOCABULARY,
        tolerance=0.02,
    ),
    Case("llama", Layout(pp=2, dp_replicate=2), steps=4, tolerance=0.01),
    *(
        Case("qwen3_moe", layout, recompute=recompute)
        for layout in (Layout(tp=2), Layout(dp_shard=4, ep=4, zero_stage=3), Layout(dp_replicate=2))
        for recompute in ("selective", "full")
    ),
    *(
        Case("qwen3_moe", replace(ONCE, **degrees), recompute=recompute, tolerance=0.02)
        for degrees, recompute in (
            ({}, "none"),
            ({"dp_shard": 4, "ep": 4}, "none"),
            ({"dp_shard": 4, "ep": 4}, "selective"),
            ({"tp": 2}, "selective"),
        )
    ),
    Case("qwen3_moe", ONCE, recompute="full"),
    Case("qwen3_moe", replace(ONCE, dp_shard=4, ep=4), recompute="full"),
    *(
        Case(model, layout, recompute=recompute, sections=LORA)
        for model in ("gpt2", "qwen3_moe")
        for layout in (Layout(), Layout(dp_shard=2, zero_stage=3))
        for recompute in get_args(RecomputeKind)
    ),
    *(
        Case("llama", Layout(), recompute="selective", sections=sections)
        for sections in (QLORA, LORA | OFFLOAD, FROZEN_ON_HOST)
    ),
    *(
        Case("llama", layout, recompute="selective", sections=LORA)
        for layout in (Layout(tp=2), Layout(tp=2, async_tensor_parallel="chunked"))
    ),
    Case("gemma2", Layout(), recompute="selective", kind="fp32"),
    Case("tied", Layout(dp_replicate=2), recompute="full"),
    Case("llama", Layout(tp=2), recompute="mixed", saved=(NOTHING, MIDDLE, PRODUCTS, PRODUCTS)),
    Case(
        "llama",
        Layout(pp=2),
        steps=4,
        recompute="mixed",
        saved=(NOTHING, PRODUCTS, NOTHING, PRODUCTS),
    ),
    Case(
        "qwen3_moe",
        Layout(dp_shard=2, zero_stage=3),
        recompute="mixed",
        saved=(MIDDLE, NOTHING, SPARSE, SPARSE),
    ),
    Case("llama", Layout(), recompute="mixed", saved=(PRODUCTS,) * 4, sections=LORA),
    Case(
        "llama",
        Layout(dp_shard=2, zero_stage=3),
        recompute="mixed",
        saved=(MIDDLE,) * 4,
        sections=OFFLOAD,
    ),
    Case("llama", Layout(), recompute="mixed", saved=(PRODUCTS, PRODUCTS, None, None)),
    Case("gemma2", Layout(), recompute="mixed", saved=(NOTHING, ENDS) * 2),
    Case("llama", Layout(dp_replicate=2), sections=PREFERENCES, steps=2),
    Case("llama", Layout(), sections=LORA | PREFERENCES),
    Case("llama", Layout(pp=2), sections=PREFERENCES, steps=4),
    Case("tied", Layout(dp_shard=2, zero_stage=3)),
    Case("gemma2", Layout(), kind="fp32"),
    Case("gpt2", Layout(tp=2, dp_replicate=2), kind="fp32"),
    Case("llama", Layout(tp=4, dp_shard=2, zero_stage=3), recompute="full"),
    Case("llama", Layout(pp=2, dp_shard=2, zero_stage=2, schedule="zbv"), steps=4),
    Case("llama", Layout(cp=2, cp_method="all_gather", zero_stage=3)),
    Case("llama", Layout(cp=2, cp_method="ulysses", zero_stage=3)),
    Case("llama", Layout(), sections=LORA),
    Case("llama", Layout(dp_shard=4, zero_stage=1), sections=LORA),
    Case("qwen3_moe", Layout()),
    Case("qwen3_moe", Layout(tp=2)),
    Case("tied", Layout(dp_replicate=2), steps=2),
    Case("tied", Layout(dp_shard=2, zero_stage=1), steps=2),
    Case("gemma2", Layout(dp_shard=2, zero_stage=3)),
    Case("llama", Layout(dp_replicate=2, dp_shard=2, zero_stage=3)),
    Case("llama", Layout(pp=2, dp_shard=2, zero_stage=1, schedule="interleaved_1f1b"), steps=4),
    Case("llama", Layout(pp=2), steps=4, recompute="full"),
    Case("llama", Layout(), kind="fp32", recompute="selective"),
    Case("gpt2", Layout(dp_shard=2, zero_stage=2), steps=2),
    Case("gpt2", Layout(dp_replicate=2)),
    Case("gpt2", Layout(), recompute="full"),
    Case("gpt2", Layout(dp_shard=2, zero_stage=3), recompute="selective"),
    Case("llama", Layout(tp=2, sequence_parallel=False), recompute="full"),
    Case("llama", Layout(tp=2, dp_shard=2, zero_stage=3, sequence_parallel=False)),
    Case("qwen3_moe", Layout(dp_shard=2, zero_stage=1)),
    Case("qwen3_moe", Layout(dp_shard=2, zero_stage=2), steps=2, recompute="selective"),
    Case("llama", Layout(), recompute="full"),
    Case("llama", Layout(), recompute="selective"),
    Case("llama", Layout(dp_shard=2, zero_stage=3), recompute="full"),
    Case("gemma2", Layout(), recompute="full"),
    *(
        Case(model, layout, recompute=recompute, sections=OFFLOAD)
        for model, layout in (
            ("llama", Layout()),
            ("llama", Layout(tp=2)),
            ("llama", Layout(cp=2, cp_method="ring", zero_stage=1)),
            ("gpt2", Layout(dp_shard=2, zero_stage=2)),
        )
        for recompute in get_args(RecomputeKind)
    ),
    Case("llama", Layout(dp_replicate=2), sections=OFFLOAD),
    Case("qwen3_moe", Layout(dp_shard=2, ep=2, zero_stage=3), recompute="full", sections=OFFLOAD),
    Case("gpt2", Layout(), recompute="selective", sections=WORKING),
    Case("qwen3_moe", Layout(), sections=WORKING),
    Case("tied", Layout(pp=2), steps=4, sections=WORKING),
    Case("llama", Layout(), steps=2, recompute="full", sections=LORA),
    Case("llama", Layout(), sections=FROZEN_ON_HOST),
    Case("llama", Layout(dp_shard=2, zero_stage=1), recompute="full", sections=FROZEN_ON_HOST),
    Case("llama", Layout(cp=2, cp_method="ring"), sections=FROZEN_ON_DISK),
    Case("llama", Layout(), sections=TRAINED_ON_DISK),
    Case("llama", Layout(pp=2), steps=4, sections=TRAINED_ON_DISK),
    Case("llama", Layout(pp=2), steps=4, recompute="full", sections=TRAINED_ON_DISK),
    Case("llama", Layout(dp_shard=2, zero_stage=1), sections=TRAINED_ON_DISK),
    Case("llama", Layout(dp_shard=2, zero_stage=1), steps=2, sections=TRAINED_ON_DISK),
    Case(
        "tied",
        Layout(dp_shard=2, zero_stage=2),
        steps=2,
        recompute="full",
        sections=TRAINED_ON_DISK,
    ),
    Case("llama", Layout(pp=2, dp_shard=2, zero_stage=3), steps=4, sections=TRAINED_ON_DISK),
    Case("llama", Layout(pp=2, schedule="zb_h1"), steps=4, sections=TRAINED_ON_DISK),
    Case("gpt2", Layout(dp_shard=2, zero_stage=3), kind="fp32", sections=TRAINED_ON_DISK),
    *(
        Case(model, layout, steps, recompute, sections=sections)
        for sections in (WORKING_ON_HOST, WORKING_ON_DISK)
        for model, layout, steps, recomputes in (
            ("llama", Layout(dp_shard=2, zero_stage=1), 2, get_args(RecomputeKind)),
            ("llama", Layout(pp=2, dp_shard=2, zero_stage=1), 4, get_args(RecomputeKind)),
            ("llama", Layout(dp_shard=2, zero_stage=1), 1, get_args(RecomputeKind)),
            ("llama", Layout(dp_shard=2, zero_stage=2), 2, get_args(RecomputeKind)),
            ("llama", Layout(dp_shard=2, zero_stage=3), 1, get_args(RecomputeKind)),
            ("llama", Layout(dp_shard=2, zero_stage=3), 2, get_args(RecomputeKind)),
            ("llama", Layout(tp=2, dp_shard=2, zero_stage=3), 1, get_args(RecomputeKind)),
            (
                "llama",
                Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
                2,
                get_args(RecomputeKind),
            ),
        )
        for recompute in recomputes
    ),
    Case("llama", Layout(dp_shard=2, zero_stage=3), 1, "full", sections=TRAINED_ON_DISK),
    Case("llama", Layout(dp_replicate=2, dp_shard=2, zero_stage=3), sections=TRAINED_ON_DISK),
    Case(
        "llama", Layout(dp_replicate=2, dp_shard=2, zero_stage=3), steps=2, sections=TRAINED_ON_DISK
    ),
]

LESS_EXACT = dict.fromkeys(
    (
        "llama-pp=2,zero_stage=0,schedule=zbv-4-selective-rank 1",
        "llama-tp=2,zero_stage=0-1-mixed-input-input, attention, projections-input, attention, "
        "projections, attention_out, gate_up",
        "qwen3_moe-dp_shard=4,ep=4,zero_stage=3,expert_dispatch=once_per_rank-1-full",
    ),
    0.05,
)
"""Tolerance of cases whose peak is predicted less exactly than within 3%."""
HAS_MESHES_PER_PARAMETER = hasattr(_fsdp_common, "ShardPlacementResult")
"""True if FSDP2 gathers experts with their block, as the planner predicts: since torch 2.13."""
ADDS_EACH_GRADIENT = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
"""True if FSDP2 adds each 16-bit gradient of a later micro-batch to its fp32 sum at once: since
torch 2.15. The planner predicts that those of a group exist until the group's pass ends."""


def test_fused_norms_save_no_wider_copies_of_their_inputs() -> None:
    """PyTorch's kernel takes inputs in the precision of Gemma's weights, which is fp32."""
    case = Case("gemma2", Layout())
    facts = ModelFacts(read_recipe_shape(case.make_recipe()))
    candidate = replace(build_template(case.make_recipe()), layout=Layout(), micro_batch_size=ROWS)
    saved = [
        get_layer_activations(
            facts,
            facts.kinds[0],
            replace(candidate, has_fused_norms=has_norms, has_fused_functions=has_functions),
        ).saved_bytes
        for has_norms, has_functions in ((True, False), (True, True), (False, True))
    ]
    assert saved[0] > saved[1] == saved[2]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)], ids=str
)
def test_the_planner_predicts_the_memory_of_the_step(case: Case) -> None:
    recipe = case.make_recipe()
    shape = read_recipe_shape(recipe)
    plan = build_plan(
        shape,
        case.layout,
        BatchPlan(TOKENS, ROWS, case.steps, case.layout.data_ranks),
        recipe.precision,
        offloads_trained_weights=recipe.has_offloaded_trained_weights,
    )
    plan = replace(plan, recompute=case.recompute, recompute_choice=case.build_choice())
    if case.sections in (FUSED, WHOLE_LOGITS):
        plan = replace(plan, pointwise=PointwiseChoice("compiled", "test"))
    report = rehearse_rank(recipe, plan, case.rank)
    facts = ModelFacts(shape.base_shape, case.saved, get_recipe_facts(recipe, shape).frozen_names)
    candidate = replace(
        build_template(recipe),
        layout=case.layout,
        micro_batch_size=ROWS,
        gradient_accumulation_steps=case.steps,
        recompute=case.recompute,
        saved_results=case.saved,
        has_masked_kernels=False,
    )
    candidate = remove_kernels(candidate)  # a rehearsal runs as the CPU does
    pipeline = get_pipeline(
        facts, case.layout, case.steps, TOKENS, has_adapters=candidate.adapter is not None
    )
    load = pipeline.build_rank_load(case.rank if case.layout.pp > 1 else 0)
    predicted = predict_memory(facts, candidate, load, NO_OVERHEAD)
    assert predicted.offloaded == pytest.approx(report.total_offloaded_bytes, rel=0.03)
    assert predicted.weights == pytest.approx(report.weights_bytes, rel=0.03)
    # An update on the host leaves the device step counts, 4 bytes of each parameter.
    step_bytes = 1024 if candidate.is_updated_on_host else 1e-12
    assert predicted.optimizer == pytest.approx(report.optimizer_bytes, rel=0.03, abs=step_bytes)
    persistent = compute_persistent_memory(facts, candidate, load)
    # Of the last block, and in a pipeline of the one that follows the last backward pass. FSDP2
    # reduces, and W computes, no gradients that follow.
    has_returned = case.layout.pp > 1 and not (
        candidate.has_offloaded_shards or candidate.is_deferring
    )
    # An update on the host begins when all have left.
    num_leaving = 0 if candidate.is_updated_on_host else 1 + has_returned
    leaving_bytes = persistent.moved.compute_gradient_bytes(num_leaving, first=0)
    assert persistent.updated_gradients + leaving_bytes == pytest.approx(
        report.gradients_bytes, rel=0.03
    )
    between_steps = report.weights_bytes + report.optimizer_bytes
    peak_bytes = report.peak_bytes - between_steps
    tolerance = LESS_EXACT.get(str(case), case.tolerance)
    predicted_bytes = predicted.live - predicted.weights - predicted.optimizer
    frees_experts = case.layout.ep > 1 and not HAS_MESHES_PER_PARAMETER
    frees_gradients = case.layout.zero_stage == 1 and case.steps > 1 and ADDS_EACH_GRADIENT
    if frees_experts or frees_gradients:
        # By themselves, before their block: less memory.
        assert peak_bytes <= predicted_bytes * (1 + tolerance)
    else:
        assert predicted_bytes == pytest.approx(peak_bytes, rel=tolerance)
    if case.sections in WEIGHT_SECTIONS:
        stored_bytes = report.offloaded_parameter_bytes
        assert stored_bytes > 0
        assert persistent.moved.stored == pytest.approx(stored_bytes, rel=0.02)
        assert predicted.host == pytest.approx(report.host_bytes, rel=0.02)
        assert predicted.disk == pytest.approx(report.disk_bytes, rel=0.02)
        # DDP's gradients of earlier micro-batches are predicted less exactly.
        has_old_gradients = case.layout.dp_replicate > 1 and case.steps > 1
        tolerance = 0.035 if has_old_gradients else 0.02
        assert predicted.live == pytest.approx(report.peak_bytes, rel=tolerance)
