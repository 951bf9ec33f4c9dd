"""What of the planner's efficiencies is fitted, with bounds, and where every fit begins. Each
number has a cause with a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Any

from shardwright.planner.calibration import ALL_FRAMEWORKS, EfficiencyTable
from shardwright.planner.published.measurements import PublishedRun

UNITS = {
    "data_overlap": 0.3,
    "tensor_overlap": 0.3,
    "expert_overlap": 0.3,
    "near_expert_overlap": 0.3,
    "straggler_share": 0.03,
    "reserve_share": 0.1,
    "limit_seconds": 0.5,
    "congestion_seconds": 0.3,
    "hop_seconds": 3e-5,
    "data_hop_seconds": 3e-5,
    "pipelined_hop_seconds": 1e-4,
}
"""Fields that are as good as zero for some: the distance between two values is their difference in
these units. Of all others it is the logarithm of their ratio."""


@dataclass(frozen=True)
class Parameter:
    """One number of `efficiencies.yaml`; `precision` for an entry of
    `matmul_share_by_precision`.
    """

    section: str
    name: str
    field: str
    low: float
    high: float
    precision: str = ""

    @property
    def entry(self) -> tuple[str, str]:
        """Where it stands."""
        return self.section, self.name

    def get(self, efficiencies: EfficiencyTable) -> float | None:
        """Its own value; None where the entry does not say."""
        found = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field)
        return (found or {}).get(self.precision) if self.precision else found

    def above(self, efficiencies: EfficiencyTable, case: PublishedRun) -> float:
        """What a case that reads the entry would have without it and without any that is narrower,
        within the bounds.
        """
        achieved = efficiencies.get_efficiency(
            case.cluster.accelerator, case.framework, case.features, before_entry=self.entry
        )
        found = getattr(achieved, self.field)
        if self.precision:
            found = found.get(self.precision, achieved.matmul_share)
        return min(max(float(found), self.low), self.high)

    def put(self, efficiencies: EfficiencyTable, value: float) -> EfficiencyTable:
        """The same with this number, rounded, within its bounds."""
        stored: Any = float(f"{min(max(value, self.low), self.high):.4g}")
        if self.precision:
            stored = {**self._precisions(efficiencies), self.precision: stored}
        return efficiencies.replace_value(self.section, self.name, self.field, stored)

    def drop(self, efficiencies: EfficiencyTable) -> EfficiencyTable:
        """The same with what stands above in place of this number."""
        others = {
            name: value
            for name, value in self._precisions(efficiencies).items()
            if name != self.precision
        }
        return efficiencies.replace_value(self.section, self.name, self.field, others or None)

    def _precisions(self, efficiencies: EfficiencyTable) -> dict[str, float]:
        found = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field)
        return dict(found or {}) if self.precision else {}

    def scaled(self, value: float) -> float:
        """The value as the search sees it."""
        return value / UNITS[self.field] if self.field in UNITS else log(value)

    def plain(self, scaled: float) -> float:
        """The value itself."""
        return scaled * UNITS[self.field] if self.field in UNITS else exp(scaled)


GPU_FIELDS = {
    "matmul_share": (0.3, 0.95),
    "m_half": (64, 300),
    "attention_forward_share": (0.3, 0.75),
    "attention_backward_share": (0.25, 0.65),
    "memory_share": (0.6, 0.92),
    "intra_share": (0.4, 0.92),
    "inter_share": (0.2, 0.92),
}
"""What an accelerator and its links achieve, with the bounds of the search."""

TRAINER_FIELDS = {
    "host_seconds": (1e-6, 1e-3),
    "bytes_share": (0.4, 3.0),
    "data_overlap": (0.0, 1.0),
    "tensor_overlap": (0.0, 0.9),
    "step_seconds": (1e-3, 0.5),
    "straggler_share": (0.0, 0.2),
    "reserve_share": (0.0, 0.6),
    "reserve_bytes": (1e7, 8e9),
}
"""How a trainer keeps its device busy, and what its allocator holds."""

TRAINERS = (
    "nanotron",
    "megatron-core",
    "megatron-lm",
    "megatron-deepspeed",
    "aleph",
    "llm-foundry",
    "torchtitan",
    "litgpt",
)
OTHERS = (
    # Widths that do not fill a product's tiles, or that tensor cores do not take at all.
    Parameter("accelerators", "Ampere", "uneven_share", 0.4, 1.0),
    Parameter("accelerators", "Ampere", "odd_share", 0.05, 1.0),
    # The 500 W of one cluster, and a B200 that is kept below its power.
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share", 0.1, 0.98),
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    Parameter("features", "power_limited", "matmul_share", 0.1, 0.98),
    Parameter("features", "power_limited", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Hosts differ with the machine: Grace starts operations more slowly than x86. One trainer's:
    # how much is started is its doing.
    *(
        Parameter("features", f"megatron-core on {name}", "host_seconds", 2e-6, 2e-4)
        for name in ("Hopper", "B200-180GB-SXM", "B300-270GB-SXM", "GB200-186GB", "GB300-279GB")
    ),
    # Sparse layers: what the host has to start, what is sent beside compute, grouped products by
    # kernel and precision, and routing in operations of its own.
    Parameter("frameworks", "megatron-core", "sparse_operations", 1.0, 6.0),
    Parameter("frameworks", "megatron-core", "expert_overlap", 0.0, 0.95),
    Parameter("features", "fused experts", "near_expert_overlap", 0.0, 0.95),
    Parameter("features", "latent_experts", "expert_overlap", 0.3, 0.98),
    Parameter("features", "latent_experts", "near_expert_overlap", 0.3, 0.98),
    Parameter("frameworks", "megatron-core", "expert_share", 0.3, 1.0),
    Parameter("features", "fp8 experts", "expert_share", 0.2, 1.2),
    Parameter("features", "nvfp4 experts", "expert_share", 0.1, 1.0),
    Parameter("features", "fused experts", "expert_share", 0.3, 1.2),
    Parameter("features", "biased experts", "expert_share", 0.2, 1.0),
    Parameter("features", "token dropping", "expert_share", 0.2, 1.0),
    Parameter("features", "unfused routing", "routing_seconds", 1e-8, 1e-5),
    Parameter("features", "nvfp4 experts", "matmul_share_by_precision", 0.05, 0.98, "nvfp4"),
    # What scans of state spaces, and their convolutions, reach of the pace of the attention that
    # stands in for them.
    Parameter("features", "hybrid", "attention_forward_share", 0.02, 0.75),
    Parameter("features", "hybrid", "attention_backward_share", 0.02, 0.65),
    Parameter("features", "hybrid", "bytes_share", 0.4, 6.0),
    # The kernels of 2023 on the first H100.
    Parameter("features", "llm-foundry on Hopper", "matmul_share", 0.3, 0.95),
    Parameter("features", "llm-foundry on Hopper", "matmul_share_by_precision", 0.1, 0.95, "fp8"),
    Parameter("features", "llm-foundry on Hopper", "attention_forward_share", 0.15, 0.75),
    Parameter("features", "llm-foundry on Hopper", "attention_backward_share", 0.1, 0.65),
    # PyTorch's attention on Hopper is FlashAttention-2; NeMo's is cuDNN's, which was written for
    # it.
    Parameter("features", "torchtitan on Hopper", "attention_forward_share", 0.15, 0.75),
    Parameter("features", "torchtitan on Hopper", "attention_backward_share", 0.1, 0.65),
    # Attention with sinks has no kernel as good as plain attention's.
    Parameter("features", "attention_sinks", "attention_forward_share", 0.02, 0.75),
    Parameter("features", "attention_sinks", "attention_backward_share", 0.02, 0.65),
    # Asynchronous tensor parallelism, and scaling by row, which costs more than by tensor.
    Parameter("features", "async_tp", "tensor_overlap", 0.01, 0.99),
    Parameter("features", "rowwise", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Attention kernels that aleph-layouts compares, and a fused norm beside them.
    *(
        Parameter("features", kernel, field, low, high)
        for kernel in (
            "flash_attention2",
            "flash_attentionv1.0.8",
            "flash_attention2 + RMS kernel",
            "fused",
            "torch",
        )
        for field, low, high in (
            ("attention_forward_share", 0.2, 0.75),
            ("attention_backward_share", 0.15, 0.65),
            ("bytes_share", 0.4, 4.0),
        )
    ),
    # DeepSpeed's ZeRO-3 of 2021 gathered and reduced with little beside it, and parameter by
    # parameter.
    Parameter("frameworks", "deepspeed", "inter_share", 0.05, 0.92),
    Parameter("frameworks", "deepspeed", "data_overlap", 0.01, 1.0),
    Parameter("frameworks", "deepspeed", "bytes_share", 0.4, 4.0),
    Parameter("frameworks", "deepspeed", "data_hop_seconds", 0.0, 1e-4),
    # FSDP2's prefetching is one implementation, which several trainers have; torchtitan's rows tell
    # of it.
    Parameter("frameworks", "FSDP2", "data_overlap", 0.0, 1.0),
    # aleph's tensor parallelism sums twice a block without overlap, over what its links then reach.
    Parameter("frameworks", "aleph", "intra_share", 0.1, 0.92),
    Parameter("frameworks", "aleph", "collective_seconds", 5e-6, 1e-3),
    # nanotron's cluster: rings over EFA, alone and beside a pipeline, what a pipeline's micro-batch
    # waits on 512 GPUs, and what one waits for an allocator at the end of the device's memory.
    Parameter("frameworks", "nanotron", "inter_share", 0.02, 0.92),
    Parameter("frameworks", "nanotron", "limit_seconds", 0.0, 5.0),
    Parameter("frameworks", "nanotron", "hop_seconds", 0.0, 1e-3),
    Parameter("frameworks", "nanotron", "data_hop_seconds", 0.0, 1e-4),
    Parameter("frameworks", "nanotron", "pipelined_hop_seconds", 0.0, 5e-3),
    Parameter("frameworks", "nanotron", "congestion_seconds", 0.0, 5.0),
    Parameter("frameworks", "nanotron", "collective_seconds", 2e-6, 5e-2),
)


def _parameters() -> tuple[Parameter, ...]:
    found = []
    for generation in ("gpu", "Volta", "Ampere", "Hopper", "Blackwell", "Blackwell Ultra"):
        found += [
            Parameter("accelerators", generation, field, low, high)
            for field, (low, high) in GPU_FIELDS.items()
        ]
        for precision in (
            ("fp8", "nvfp4") if generation in ("Hopper", "Blackwell", "Blackwell Ultra") else ()
        ):
            found.append(
                Parameter(
                    "accelerators", generation, "matmul_share_by_precision", 0.1, 0.98, precision
                )
            )
    for trainer in (ALL_FRAMEWORKS, *TRAINERS):
        found += [
            Parameter("frameworks", trainer, field, low, high)
            for field, (low, high) in TRAINER_FIELDS.items()
            if (trainer, field)
            not in (("megatron-core", "host_seconds"), ("torchtitan", "data_overlap"))
        ]
    return (*found, *OTHERS)


PARAMETERS = _parameters()
NANOTRON = {
    "limit_seconds": 0.9,
    "inter_share": 0.3,
    "congested_gpus": 512,
    "congestion_seconds": 0.8,
    "pipelined_hop_seconds": 3e-4,
    "hop_seconds": 5e-5,
    "data_hop_seconds": 3e-5,
    "host_seconds": 7e-5,
}
DEEPSPEED = {"data_hop_seconds": 1e-5}
OURS = {"tensor_overlap": 0.0}  # tensor-parallel collectives are waited for where they are started
LATENT = {
    "latent_experts": {"expert_overlap": 0.75, "near_expert_overlap": 0.75}
}  # three quarters of the rows are not sent
ROUTING = {
    "unfused routing": {"routing_seconds": 2e-7}
}  # what single rows show of NeMo's boards of eight around the turn of 2026
CPU = {
    "runs_on_host": True,
    "host_seconds": 1.69e-5,
    "bytes_share": 3.85,
    "data_overlap": 0.0,
    "context_overlap": 0.0,
    "handoff_seconds": 0.00274,
    "step_share": 0.605,
    "expert_share": 0.792,
    "tensor_overlap": 0.0,
    "step_seconds": 5e-3,
    "straggler_share": 0.01,
    "reserve_share": 0.05,
    "reserve_bytes": 0.3e9,
}
"""Of our own runs on CPU cores over gloo, beside their measured profile: `host_seconds`,
`bytes_share`, `handoff_seconds`, `step_share` and `expert_share` are what `python -m
benchmarks.fit_cpu` prints. gloo's threads send with the very cores that compute: nothing hides."""
START = EfficiencyTable(
    {
        "accelerators": {"cpu": CPU},
        "frameworks": {"nanotron": NANOTRON, "deepspeed": DEEPSPEED, "shardwright": OURS},
        "features": LATENT | ROUTING,
    }
)
"""Where every fit begins: the defaults of `Efficiency`, and what single rows of nanotron's table
show at a glance.
"""
