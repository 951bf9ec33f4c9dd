"""Cases of `benchmarks.layouts`: models, layouts, precisions and recomputation on one and two CPU
ranks. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwright.architecture import ModelShape, read_config
from shardwright.config.layout import LayoutSection
from shardwright.config.recipe_loading import parse_layout
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout, resolve_layout
from shardwright.planner import Candidate
from shardwright.plans import BatchPlan, Plan, build_plan

TOKENS = 512
GLOBAL_BATCH = 8
MICRO_BATCHES = 8
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": TOKENS,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 1024, **_COMMON},
    "wide": {
        "model_type": "llama",
        **_COMMON,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "hidden_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **_COMMON,
    },
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
ZERO_1 = "dp_shard=2,zero_stage=1"
ZERO_3 = "dp_shard=2,zero_stage=3"
_PLAIN = ("", "dp_replicate=2", ZERO_3, "tp=2", "tp=2,sequence_parallel=false")
_LAYOUTS = (*_PLAIN, ZERO_1, "pp=2", "cp=2,cp_method=ring")


@dataclass(frozen=True)
class Entry:
    """One layout of one model, in one precision."""

    model: str
    layout: Layout
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "full"] = "none"

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return read_config(MODELS[self.model])

    @property
    def batch(self) -> BatchPlan:
        """Batch with one row per micro-batch; a pipeline's micro-batches are the accumulation."""
        data_ranks = self.layout.data_ranks
        return BatchPlan(
            TOKENS, GLOBAL_BATCH // MICRO_BATCHES, MICRO_BATCHES // data_ranks, data_ranks
        )

    @property
    def plan(self) -> Plan:
        """Plan for the engine."""
        return build_plan(
            self.shape,
            self.layout,
            self.batch,
            PrecisionSection(kind=self.precision),
            self.recompute,
        )

    @property
    def candidate(self) -> Candidate:
        """Candidate for the planner."""
        return Candidate(
            self.layout,
            TOKENS,
            micro_batch_size=self.batch.micro_batch_size,
            gradient_accumulation_steps=self.batch.gradient_accumulation_steps,
            precision=self.precision,
            recompute=self.recompute,
            loss_chunk_tokens=TOKENS,
        )

    @property
    def layout_name(self) -> str:
        """Name of the layout in tables."""
        return "one process" if self.layout.world_size == 1 else str(self.layout)

    @property
    def forward_work(self) -> str:
        """Name of the work; entries that share it give the same result up to rounding."""
        return f"{self.model} {self.precision}"

    @property
    def group(self) -> str:
        """Name of the entries that are built, calibrated and timed together, within minutes. The
        schedules are a group.
        """
        return (
            f"{self.forward_work} schedules"
            if self.layout.pp > 1 and self.forward_work == "dense fp32"
            else self.forward_work
        )

    def __str__(self) -> str:
        suffix = " recompute" if self.recompute == "full" else ""
        return f"{self.forward_work} {self.layout_name}{suffix}"


def _entry(model: str, text: str, *also: Any) -> Entry:
    return Entry(
        model, resolve_layout(LayoutSection(**parse_layout(text)), 2 if text else 1), *also
    )


ENTRIES: tuple[Entry, ...] = (
    *(_entry("dense", text) for text in (*_PLAIN, ZERO_1)),
    *(_entry("dense", f"pp=2,schedule={schedule}") for schedule in SCHEDULES),
    *(_entry("dense", f"cp=2,cp_method={method}") for method in ("ring", "all_gather", "ulysses")),
    *(_entry("dense", text, "fp32", "full") for text in ("", ZERO_3)),
    *(_entry("dense", text, "bf16") for text in _LAYOUTS),
    *(_entry("dense", text, "bf16", "full") for text in ("", ZERO_3)),
    *(_entry("wide", text) for text in _LAYOUTS),
    *(_entry("wide", text, "bf16") for text in _LAYOUTS),
    *(_entry("moe", text) for text in ("", ZERO_3, "dp_shard=2,ep=2,zero_stage=3")),
    *(_entry("moe", text, "bf16") for text in ("", ZERO_3, "dp_shard=2,ep=2,zero_stage=3")),
)
