"""Predicted cost of a candidate: bytes by part, seconds by part, and derived figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardwright.planner.candidate import Candidate
from shardwright.planner.uncertainty import MIN_FIT_PROBABILITY, Uncertainty, format_probability
from shardwright.units import format_bytes


@dataclass(frozen=True)
class MemoryParts:
    """Peak bytes on the rank with the most memory, by part, at the moment of the step when
    their sum is largest."""

    weights: float = 0.0
    """Master weights (or the adapter's frozen base) that persist between steps, their working
    copies in the compute precision, and the frozen reference of preference training."""
    gradients: float = 0.0
    optimizer: float = 0.0
    """Moments, and a second copy of the weights if the framework has one."""
    activations: float = 0.0
    """Saved activations of the micro-batches in flight, and those of the layer being
    recomputed."""
    logits: float = 0.0
    """Logits, their gradient, and the gradients that the loss computes with them."""
    gathered: float = 0.0
    """Parameters gathered or cast to the compute precision."""
    workspaces: float = 0.0
    """Temporary buffers of reductions and matmuls."""
    reserve: float = 0.0
    """Bytes that the allocator reserves beyond live tensors: fragmentation."""

    driver: float = 0.0
    """The device's context and the collectives' buffers, outside the tensor allocator."""
    host: float = 0.0
    """Optimizer states, weights and saved tensors in host memory, at most; not part of the total,
    which is the device's."""
    disk: float = 0.0
    """The same on disk."""

    @property
    def total(self) -> float:
        """Bytes of all parts, as the device's monitor reports them."""
        between = self.weights + self.gradients + self.optimizer
        return (
            between
            + self.activations
            + self.logits
            + self.gathered
            + self.workspaces
            + self.reserve
            + self.driver
        )

    @property
    def offloaded(self) -> float:
        """Bytes in host memory and on disk."""
        return self.host + self.disk

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves (torch: max_memory_reserved)."""
        return self.total - self.driver

    @property
    def live(self) -> float:
        """Bytes of tensors (torch: max_memory_allocated)."""
        return self.reserved - self.reserve


@dataclass(frozen=True)
class TimeParts:
    """Seconds of one optimizer step on the slowest rank. The exposed parts add up to the step;
    hidden communication overlaps with compute."""

    compute: float = 0.0
    """Forward, backward and recomputation."""
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    """Exposed sends of hidden states."""
    data: float = 0.0
    """Exposed gathers of parameters and reductions of gradients."""
    bubble: float = 0.0
    imbalance: float = 0.0
    """Waits for ranks and micro-batches with more tokens. 0 if full rows are assumed."""
    offload: float = 0.0
    """Waits for offloaded activations and weights."""
    optimizer: float = 0.0
    """Norm, clip and update."""
    reference: float = 0.0
    """Forward passes of the reference model in preference training, with their communication
    and bubble."""
    overhead: float = 0.0
    """Host work between steps, and stragglers."""
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0
    hidden_expert: float = 0.0
    hidden_pipeline: float = 0.0
    hidden_data: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of one optimizer step."""
        return (
            self.compute
            + self.exposed
            + self.bubble
            + self.imbalance
            + self.offload
            + self.optimizer
            + self.reference
            + self.overhead
        )

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return self.tensor + self.context + self.expert + self.pipeline + self.data


@dataclass(frozen=True)
class Prediction:
    """A candidate with its predicted cost on a cluster."""

    candidate: Candidate
    num_gpus: int
    memory: MemoryParts
    time: TimeParts
    memory_capacity_bytes: float
    """Bytes of one device that a process may use."""
    model_flops_per_step: float
    """Model FLOPs as in `architecture.flop_count`: causal attention, without recomputation."""
    peak_flops_per_second: float
    """Dense peak of one device in the candidate's precision."""
    uncertainty: Uncertainty
    """Spreads of the errors of step time and memory."""
    step_tokens: float | None = None
    """Mean tokens of a step, padding included, with the rows of the data. None: full rows."""
    is_measured: bool = False
    """True if `tune` measured the step time of these settings on this hardware: `time` is then
    scaled to it, and the interval is that of the measurement."""

    @property
    def step_interval(self) -> tuple[float, float]:
        """Low and high of the step's seconds: eight of ten measured runs are between them."""
        return self.uncertainty.time.apply(self.time.step)

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Low and high of the peak memory's bytes: eight of ten measured runs are between
        them."""
        return self.uncertainty.memory.apply(self.memory.total)

    @property
    def fit_probability(self) -> float:
        """Probability that a run takes at most the device's capacity."""
        return self.uncertainty.memory.compute_probability(
            self.memory.total, self.memory_capacity_bytes
        )

    @property
    def fits(self) -> bool:
        """True if the predicted memory is within the device's capacity on every rank."""
        return self.memory.total <= self.memory_capacity_bytes

    @property
    def is_tight(self) -> bool:
        """True if it fits as predicted, but the high end of its memory does not: its
        probability of fitting is below `MIN_FIT_PROBABILITY`."""
        return self.fits and self.memory_interval[1] > self.memory_capacity_bytes

    @property
    def warning(self) -> str | None:
        """Warning with the probability that a tight layout fits. None if it is not tight."""
        if not self.is_tight:
            return None
        return (
            f"may run out of memory: {format_bytes(self.memory.total)} of "
            f"{format_bytes(self.memory_capacity_bytes)} predicted, which fits with a probability "
            f"of {format_probability(self.fit_probability)} "
            f"(recommended: {MIN_FIT_PROBABILITY:.0%})"
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        return (self.step_tokens or self.candidate.global_batch_tokens) / self.time.step

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second of one device."""
        return self.tokens_per_second / self.num_gpus

    @property
    def model_flops_utilisation(self) -> float:
        """Model FLOPs per second over the dense peak."""
        return (
            self.model_flops_per_step / self.time.step / self.num_gpus / self.peak_flops_per_second
        )

    def compute_days(self, num_steps: int) -> float:
        """Return the days that `num_steps` optimizer steps take."""
        return num_steps * self.time.step / 86400

    def compute_gpu_hours(self, num_steps: int) -> float:
        """Return the GPU-hours that `num_steps` optimizer steps take."""
        return num_steps * self.time.step * self.num_gpus / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as a JSON object in base units."""
        candidate = self.candidate
        layout = self.candidate.layout
        return {
            "layout": asdict(layout) | {"world_size": layout.world_size},
            "describe": candidate.describe(),
            "micro_batch_size": candidate.micro_batch_size,
            "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
            "global_batch_size": candidate.global_batch_size,
            "sequence_length": candidate.sequence_length,
            "precision": candidate.precision,
            "recompute": candidate.recompute,
            "optimizer": candidate.optimizer,
            "adapter": None if candidate.adapter is None else asdict(candidate.adapter),
            "offload": candidate.offload,
            "parameter_offload": candidate.parameter_offload,
            "activation_offload": candidate.activation_offload,
            "reference": candidate.reference,
            "compile": candidate.compile,
            "loss_kernel": "liger" if candidate.has_liger_loss else "chunked",
            "loss_chunk_tokens": candidate.loss_chunk_tokens,
            "working_weights": candidate.has_working_weights,
            "read_ahead_bytes": candidate.read_ahead_bytes,
            "runnable": candidate.is_runnable,
            "num_gpus": self.num_gpus,
            "step_tokens": self.step_tokens or candidate.global_batch_tokens,
            "measured": self.is_measured,
            "fits": self.fits,
            "tight": self.is_tight,
            "fit_probability": self.fit_probability,
            "memory_bytes": asdict(self.memory)
            | {"offloaded": self.memory.offloaded}
            | {"total": self.memory.total, "capacity": self.memory_capacity_bytes}
            | _name_ends(self.memory_interval),
            "step_seconds": asdict(self.time)
            | {"total": self.time.step}
            | _name_ends(self.step_interval),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_flops_utilisation": self.model_flops_utilisation,
        }


def _name_ends(interval: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("low", "high"), interval, strict=True))
