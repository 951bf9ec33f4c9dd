"""The fitted efficiencies of the planner with their bounds, and the start of every fit. Each number
has a nameable cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Any

from shardwright.planner.published.measurements import PublishedRun
from shardwright.planner.rates.calibration import ALL_FRAMEWORKS, EfficiencyTable

UNITS = {
    "data_overlap": 0.3,
    "tensor_overlap": 0.3,
    "expert_overlap": 0.3,
    "near_expert_overlap": 0.3,
    "straggler_share": 0.03,
    "reserve_share": 0.1,
    "hop_seconds": 3e-5,
    "data_hop_seconds": 3e-5,
    "pipelined_hop_seconds": 1e-4,
}
"""Fields that may be nearly zero: the distance of two values is their difference in these units.
For other fields it is the logarithm of their ratio."""


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
        """Section and name of the entry."""
        return self.section, self.name

    def get(self, efficiencies: EfficiencyTable) -> float | None:
        """Return its own value; None if the entry has none."""
        value = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field)
        return (value or {}).get(self.precision) if self.precision else value

    def above(self, efficiencies: EfficiencyTable, case: PublishedRun) -> float:
        """Return the value that `case` has without this entry and without narrower ones, within the
        bounds.
        """
        efficiency = efficiencies.get_efficiency(
            case.cluster.accelerator, case.framework, case.features, before_entry=self.entry
        )
        value = getattr(efficiency, self.field)
        if self.precision:
            value = value.get(self.precision, efficiency.matmul_share)
        return min(max(float(value), self.low), self.high)

    def replace(self, efficiencies: EfficiencyTable, value: float) -> EfficiencyTable:
        """Return a table with this number, rounded and within its bounds."""
        stored: Any = float(f"{min(max(value, self.low), self.high):.4g}")
        if self.precision:
            stored = {**self._precisions(efficiencies), self.precision: stored}
        return efficiencies.replace_value(self.section, self.name, self.field, stored)

    def drop(self, efficiencies: EfficiencyTable) -> EfficiencyTable:
        """Return a table without this number, so that the level above applies."""
        others = {
            name: value
            for name, value in self._precisions(efficiencies).items()
            if name != self.precision
        }
        return efficiencies.replace_value(self.section, self.name, self.field, others or None)

    def _precisions(self, efficiencies: EfficiencyTable) -> dict[str, float]:
        value = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field)
        return dict(value or {}) if self.precision else {}

    def scale(self, value: float) -> float:
        """Convert a value to the scale of the search."""
        return value / UNITS[self.field] if self.field in UNITS else log(value)

    def unscale(self, scaled: float) -> float:
        """Convert a value of the search back."""
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
"""Rates of an accelerator and its links, with the bounds of the search."""

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
"""Use of the device by a trainer, and memory that its allocator reserves."""

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
    # Widths that do not fill a product's tiles, or that tensor cores do not support.
    Parameter("accelerators", "Ampere", "uneven_share", 0.4, 1.0),
    Parameter("accelerators", "Ampere", "odd_share", 0.05, 1.0),
    # One cluster with a limit of 500 W, and a B200 below its full power.
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share", 0.1, 0.98),
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    Parameter("features", "power_limited", "matmul_share", 0.1, 0.98),
    Parameter("features", "power_limited", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Hosts differ with the machine: Grace starts operations more slowly than x86. For one trainer,
    # because the number of operations depends on the trainer.
    *(
        Parameter("features", f"megatron-core on {name}", "host_seconds", 2e-6, 2e-4)
        for name in ("Hopper", "B200-180GB-SXM", "B300-270GB-SXM", "GB200-186GB", "GB300-279GB")
    ),
    # Sparse layers: operations of the host, overlapped communication, grouped products by kernel
    # and precision, and routing in separate operations.
    Parameter("frameworks", "megatron-core", "sparse_operations", 1.0, 6.0),
    Parameter("frameworks", "megatron-core", "expert_overlap", 0.0, 0.95),
    Parameter("frameworks", "megatron-core", "expert_share", 0.3, 1.0),
    Parameter("features", "fp8 experts", "expert_share", 0.2, 1.2),
    Parameter("features", "nvfp4 experts", "expert_share", 0.1, 1.0),
    Parameter("features", "fused experts", "expert_share", 0.3, 1.2),
    Parameter("features", "biased experts", "expert_share", 0.2, 1.0),
    Parameter("features", "token dropping", "expert_share", 0.2, 1.0),
    Parameter("features", "unfused routing", "routing_seconds", 1e-8, 1e-5),
    Parameter("features", "nvfp4 experts", "matmul_share_by_precision", 0.05, 0.98, "nvfp4"),
    # Rates of state-space scans and their convolutions, relative to the attention that represents
    # them here.
    Parameter("features", "hybrid", "attention_forward_share", 0.02, 0.75),
    Parameter("features", "hybrid", "attention_backward_share", 0.02, 0.65),
    Parameter("features", "hybrid", "bytes_share", 0.4, 6.0),
    # Kernels of 2023 on the first H100.
    Parameter("features", "llm-foundry on Hopper", "matmul_share", 0.3, 0.95),
    Parameter("features", "llm-foundry on Hopper", "matmul_share_by_precision", 0.1, 0.95, "fp8"),
    # FlashAttention-2 and Triton's kernels, written for Ampere.
    Parameter("features", "Ampere attention on Hopper", "attention_forward_share", 0.15, 0.75),
    Parameter("features", "Ampere attention on Hopper", "attention_backward_share", 0.1, 0.65),
    # Attention with sinks has no kernel as good as plain attention's.
    Parameter("features", "attention_sinks", "attention_forward_share", 0.02, 0.75),
    Parameter("features", "attention_sinks", "attention_backward_share", 0.02, 0.65),
    # Asynchronous tensor parallelism, and scaling by row, which costs more than by tensor.
    Parameter("features", "async_tp", "tensor_overlap", 0.01, 0.99),
    Parameter("features", "rowwise", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Attention kernels that aleph-layouts compares, and a fused norm with them.
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
    # DeepSpeed's ZeRO-3 of 2021 gathered and reduced with little overlap, parameter by
    # parameter.
    Parameter("frameworks", "deepspeed", "inter_share", 0.05, 0.92),
    Parameter("frameworks", "deepspeed", "data_overlap", 0.01, 1.0),
    Parameter("frameworks", "deepspeed", "bytes_share", 0.4, 4.0),
    Parameter("frameworks", "deepspeed", "data_hop_seconds", 0.0, 1e-4),
    # Several trainers use FSDP2's prefetching, which is one implementation; torchtitan's rows
    # determine it.
    Parameter("frameworks", "FSDP2", "data_overlap", 0.0, 1.0),
    # aleph's tensor parallelism sums twice per block without overlap.
    Parameter("frameworks", "aleph", "intra_share", 0.1, 0.92),
    Parameter("frameworks", "aleph", "collective_seconds", 5e-6, 1e-3),
    # nanotron's cluster: rings over EFA, alone and next to a pipeline, the wait of a pipeline's
    # micro-batch on 512 GPUs, and the wait for an allocator near the end of the device's memory.
    Parameter("frameworks", "nanotron", "inter_share", 0.02, 0.92),
    Parameter("frameworks", "nanotron", "hop_seconds", 0.0, 1e-3),
    Parameter("frameworks", "nanotron", "data_hop_seconds", 0.0, 1e-4),
    Parameter("frameworks", "nanotron", "pipelined_hop_seconds", 0.0, 5e-3),
    Parameter("frameworks", "nanotron", "collective_seconds", 2e-6, 5e-2),
)


def _list_parameters() -> tuple[Parameter, ...]:
    parameters = []
    for generation in ("gpu", "Volta", "Ampere", "Hopper", "Blackwell", "Blackwell Ultra"):
        parameters += [
            Parameter("accelerators", generation, field, low, high)
            for field, (low, high) in GPU_FIELDS.items()
        ]
        for precision in (
            ("fp8", "nvfp4") if generation in ("Hopper", "Blackwell", "Blackwell Ultra") else ()
        ):
            parameters.append(
                Parameter(
                    "accelerators", generation, "matmul_share_by_precision", 0.1, 0.98, precision
                )
            )
    for trainer in (ALL_FRAMEWORKS, *TRAINERS):
        parameters += [
            Parameter("frameworks", trainer, field, low, high)
            for field, (low, high) in TRAINER_FIELDS.items()
            if (trainer, field)
            not in (
                ("megatron-core", "host_seconds"),
                ("torchtitan", "data_overlap"),
                ("nanotron", "reserve_share"),
            )
        ]
    return (*parameters, *OTHERS)


PARAMETERS = _list_parameters()
# The reserve is simulated, not fitted: torch's allocator with the trainer's tensors in order
# (docs/decisions/0204-nanotrons-allocator.md).
NANOTRON = {
    "reserve_share": 0.03,
    "inter_share": 0.3,
    "pipelined_hop_seconds": 3e-4,
    "hop_seconds": 5e-5,
    "data_hop_seconds": 3e-5,
    "host_seconds": 7e-5,
}
DEEPSPEED = {"data_hop_seconds": 1e-5}
OURS = {"tensor_overlap": 0.0}  # tensor-parallel collectives are synchronous
# Counted and measured, not fitted: operators of the step on CUDA move 1.33 times the bytes of
# `count_elementwise_bytes` (llama 1B and 8B), Inductor's kernels 0.58 of that, and large copies
# reach 4.25 of an H200's 4.8 TB/s (docs/benchmarks/gpu.md).
OURS_ON_GPU = {
    "bytes_share": 1.33,
    "compiled_bytes_share": 0.58,
    "memory_share": 0.885,
    "optimizer_share": 0.885,
}
# Counted, not fitted: rows of a quarter of the width are sent.
LATENT = {"latent_experts": {"expert_overlap": 0.75, "near_expert_overlap": 0.75}}
# From single rows of NeMo on boards of eight GPUs around the turn of 2026.
ROUTING = {"unfused routing": {"routing_seconds": 2e-7}}
# Counted, not fitted. One kernel computes all experts; other launches take as long as those of all
# trainers (`host_seconds` of the fit). Of the exchange, as much may overlap as of
# other communication that trainers overlap.
FUSED = {
    "fused experts": {"expert_launch_seconds": 0.0},
    "overlapped experts": {"expert_overlap": 0.9, "near_expert_overlap": 0.9},
}
CPU = {
    "runs_on_host": True,
    "host_seconds": 1.69e-5,
    "bytes_share": 3.85,
    "data_overlap": 0.0,
    "context_overlap": 0.0,
    "handoff_seconds": 0.00274,
    "handoff_share": 0.66,
    "step_share": 0.605,
    "expert_share": 0.792,
    "tensor_overlap": 0.0,
    "step_seconds": 5e-3,
    "straggler_share": 0.01,
    "reserve_share": 0.05,
    "reserve_bytes": 0.3e9,
}
"""Our own runs on CPU cores over gloo, in addition to their measured profile. `python -m
benchmarks.fit_cpu` prints `host_seconds`, `bytes_share`, `handoff_share`, `step_share` and
`expert_share`. gloo's threads use the cores that compute, so no communication is overlapped."""
# Measured elsewhere, not fitted. For bf16 widths that are 8 beyond a multiple of 16, cuBLAS chooses
# a kernel with small tiles for these generations: 89.6 and 83.6 instead of 155.9 TFLOP/s on an RTX
# 4090 (widths of 2056, 2072 and 2040; issue 181718 of PyTorch, 2026-04-28).
HALF_ALIGNED = {"half_aligned_share": 0.56}
RTX_4090 = {"matmul_share": 0.944}
# Measured by the kernel's authors, not fitted. On A100 it reaches up to 73% of the peak forward
# and 63% backward (arXiv 2307.08691, section 1). On an H100 370 and 291 TFLOP/s without a causal
# mask, 284 and 287 with one, at 8,192 tokens and heads of 128 (pull request 1791 of
# flash-attention). Half of the rate is at 735 and 910 tokens, if aleph-layouts' rows of 2,048
# tokens have these maxima.
ON_AMPERE = {
    "attention_forward_share": 0.73,
    "attention_backward_share": 0.63,
    "attention_half_tokens": 800.0,
}
ON_HOPPER = {
    "attention_forward_share": 0.374,
    "attention_backward_share": 0.294,
    "attention_half_tokens": 800.0,
}
# 648 TFLOP/s forward where FlashAttention-2 reaches 370 (616 and 335 with a causal mask), and 1.5
# to 1.75 times its rate backward (arXiv 2407.08608, figure 5 and section 4.1).
WITH_FLASH_ATTENTION_3 = ON_HOPPER | {
    "attention_forward_share": 0.655,
    "attention_backward_share": 0.478,
}
# 1.3 times cuDNN's kernel (arXiv 2603.05451, abstract), whose fitted shares are Blackwell's.
WITH_FLASH_ATTENTION_4 = {"attention_forward_share": 0.654, "attention_backward_share": 0.404}
FLASH_ATTENTION = {
    "FlashAttention-2 on Ada": ON_AMPERE,
    "FlashAttention-2 on Ampere": ON_AMPERE,
    "FlashAttention-2 on Hopper": ON_HOPPER,
    "FlashAttention-3 on Hopper": WITH_FLASH_ATTENTION_3,
    "FlashAttention-4 on Blackwell": WITH_FLASH_ATTENTION_4,
}
START = EfficiencyTable(
    {
        "accelerators": {
            "cpu": CPU,
            "Ampere": HALF_ALIGNED,
            "Ada": HALF_ALIGNED,
            "RTX4090-24GB": RTX_4090,
        },
        "frameworks": {
            "nanotron": NANOTRON,
            "deepspeed": DEEPSPEED,
            "megatron-core": {"expert_launch_seconds": 2.2e-5},
            "shardwright": OURS,
            "shardwright on gpu": OURS_ON_GPU,
            # PyTorch's attention is FlashAttention-2 there.
            "shardwright on Ada": ON_AMPERE,
            "shardwright on Ampere": ON_AMPERE,
        },
        "features": LATENT | ROUTING | FUSED | FLASH_ATTENTION,
    }
)
"""Start of every fit: the defaults of `Efficiency`, with values read from single rows of nanotron's
table.
"""
