"""The events of a run: one JSON object per line of `events.jsonl`, the one source of every bar, plot and comparison.

`docs/events.md` is the schema for people; the dataclasses here are the schema for machines. `step` counts optimizer steps
that are done: the first `step` event says 1, a checkpoint at step 100 holds the weights after 100 of them, and `resumed` at
step 100 is followed by step 101. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

SCHEMA_VERSION = 1
"""Raised when a reader of the old schema would misread a new file. Added fields and kinds do not raise it."""

FILE_NAME = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every line carries. `time` and `elapsed_seconds` are the writer's to fill in."""

    kind: ClassVar[str]
    step: int | None = None
    """Optimizer steps done when it happened; None when it belongs to none."""
    time: float = 0.0
    """Wall clock, seconds since 1970 (UTC)."""
    elapsed_seconds: float = 0.0
    """Monotonic clock since this process opened the file; starts again from 0 on resume."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A process group is set up and training is about to begin (again, after a resume)."""

    kind: ClassVar[str] = "run_started"
    name: str
    recipe: dict[str, Any]
    """The recipe as resolved."""
    plan: dict[str, Any]
    """`Plan.as_dict()`."""
    layout: str
    """As `--layout` takes it."""
    world_size: int
    total_steps: int
    """Where the run means to end."""
    global_batch_tokens: int
    """Tokens per optimizer step over all ranks."""
    data_hash: str
    """What is learned and in which order: equal exactly when two runs see the same batches at the same steps."""
    num_parameters: int
    versions: dict[str, str]
    """Of shardwright, python, torch and whatever else decides the numbers."""
    host: str
    devices: tuple[str, ...]
    """One per rank."""
    flops_per_token: float | None = None
    """Model FLOPs of forward and backward together, of a token in a full row."""
    matmul_flops_per_second: float | None = None
    """Measured ceiling of one device; MFU is against `world_size` times this."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step, measured on rank 0 unless it says per rank."""

    kind: ClassVar[str] = "step"
    loss: float
    """Mean over the supervised tokens of the global batch, before the update."""
    gradient_norm: float
    """Global, before clipping."""
    learning_rate: float
    tokens: int
    """Of the global batch, as computed: those that fill rows up included."""
    supervised_tokens: int
    samples_seen: int
    """Sequences consumed since step 0, over all ranks: the data cursor."""
    step_seconds: float
    tokens_per_second: float
    """Over all ranks."""
    model_flops_per_second: float | None = None
    """Over all ranks, recompute not counted."""
    mfu: float | None = None
    """model_flops_per_second / (world_size x measured matmul ceiling), 0 to 1."""
    memory_bytes: tuple[int, ...] = ()
    """Peak per rank, in rank order: allocated on the accelerator, resident on a CPU."""
    data_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    reduction_seconds: float | None = None
    """Waited for gradients of other ranks beyond what the backward pass hid."""
    waiting_seconds: float | None = None
    """Of a pipeline: waited for other stages."""
    optimizer_seconds: float | None = None
    """Norm, clip and update."""
    loss_scale: float | None = None
    """fp16 only."""
    expert_load: float | None = None
    """Sparse models: the busiest expert's tokens over its even share, 1 when all layers are even."""
    expert_tokens: tuple[tuple[int, ...], ...] | None = None
    """Sparse models, at steps that are multiples of run.log_every_steps: per sparse layer, in order, the tokens of the global
    batch that chose each expert, before any is dropped."""
    dropped_choices: int | None = None
    """Sparse models with a capacity: choices of the global batch that an expert had no room for."""
    balance_loss: float | None = None
    """Sparse models: mean over sequences and layers, without its coefficient; even loads give the experts per token."""
    router_z_loss: float | None = None
    """Sparse models: mean over sequences and layers, without its coefficient."""
    reward_chosen: float | None = None
    """Preference tuning: mean over the pairs of beta x (log-probability of the chosen response - the reference's)."""
    reward_rejected: float | None = None
    """The same of the rejected response."""
    reward_margin: float | None = None
    """Their difference."""
    reward_accuracy: float | None = None
    """Share of pairs whose chosen response has the higher reward."""


@dataclass(frozen=True, kw_only=True)
class Ranks(Event):
    """How one step went on every rank, in rank order. Written at steps that are multiples of run.log_every_steps, and with more
    than eight ranks less often by as much as there are more, so that the file grows no faster."""

    kind: ClassVar[str] = "ranks"
    step_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]
    """Without waiting for other ranks: what tells a slow rank from those that wait for it."""
    data_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    """With the waits in it; so are backward and reduction."""
    backward_seconds: tuple[float, ...]
    reduction_seconds: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    checkpoint_seconds: tuple[float, ...]
    """That this rank stood still for checkpoints since the event before."""
    wait_seconds: dict[str, tuple[float, ...]]
    """Waited for other ranks, by the cut that the traffic serves: data, tensor, context, expert, pipeline (with what the schedule
    leaves empty), world (sums over several cuts). Cuts for which nobody waited are absent."""
    reserved_bytes: tuple[int, ...] | None = None
    """CUDA: held by the allocator at most."""
    device_bytes: tuple[int, ...] | None = None
    """CUDA: in use on the whole device, by everybody."""
    temperature_celsius: tuple[float, ...] | None = None
    """Where NVML tells."""
    throttled: tuple[str, ...] | None = None
    """Where NVML tells: why the clocks are held down, as `power, heat`; empty where they are not."""


@dataclass(frozen=True, kw_only=True)
class Memory(Event):
    """What a rank's memory holds, measured once by each process when its second step had gradients. Bytes, in rank order."""

    kind: ClassVar[str] = "memory"
    weights_bytes: tuple[int, ...]
    gradients_bytes: tuple[int, ...]
    """When they were all there."""
    optimizer_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    """Of that step: allocated on CUDA, resident on a CPU."""
    driver_bytes: tuple[int, ...] | None = None
    """CUDA: in use on the device and not by the allocator."""
    reserved_bytes: tuple[int, ...] | None = None
    """CUDA: held by the allocator at most."""


@dataclass(frozen=True, kw_only=True)
class PipelineRan(Event):
    """When the ranks of one pipeline computed what, in one step; about twenty times in a run."""

    kind: ClassVar[str] = "pipeline"
    schedule: str
    """Its name."""
    ranks: tuple[int, ...]
    """Of the world, by place in the pipeline."""
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    """Places in the pipeline."""
    actions: tuple[tuple[str, ...], ...]
    """Per place its actions in order: `3F0` is stage 3, forward, micro-batch 0."""
    begins: tuple[tuple[float, ...], ...]
    """Seconds since the first of them began, on rank 0's clock."""
    ends: tuple[tuple[float, ...], ...]
    clock_error_seconds: float
    """By how much the ranks' clocks may still disagree."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """A profile of a step lies in the run folder, all ranks on one clock."""

    kind: ClassVar[str] = "profile"
    path: str
    ranks: int
    """Ranks in it."""
    clock_error_seconds: float


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """The validation set, or its first `max_batches`, at the weights of `step`."""

    kind: ClassVar[str] = "evaluation"
    loss: float
    perplexity: float
    tokens: int
    """Supervised tokens it is the mean of."""
    seconds: float
    best: bool = False
    """Lowest so far."""
    reward_chosen: float | None = None
    """Preference tuning, as in `step`: mean over the pairs of beta x (log-probability of the chosen response - the reference's)."""
    reward_rejected: float | None = None
    """The same of the rejected response."""
    reward_margin: float | None = None
    """Their difference."""
    reward_accuracy: float | None = None
    """Share of pairs whose chosen response has the higher reward."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint that is whole on disk."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    size_bytes: int
    seconds: float
    """From the moment when the save was due to the one when it was whole on disk."""
    stall_seconds: float | None = None
    """That training stood still for it, before the update that followed, too; less than `seconds` where it was written in the
    background."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Training goes on from the checkpoint at `step`; later steps written before this line are superseded."""

    kind: ClassVar[str] = "resumed"
    path: str


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The run went back to the checkpoint at `step` by itself (a `resumed` line says so, too), and past the data in between."""

    kind: ClassVar[str] = "rolled_back"
    reason: str
    from_step: int
    """Where it was."""
    path: str
    first_sample: int
    """Position in the order of samples from which on nothing is used,"""
    num_samples: int
    """and how many are left out."""


@dataclass(frozen=True, kw_only=True)
class SkippedStep(Event):
    """All ranks left the weights as they were at this step: the gradient was not finite."""

    kind: ClassVar[str] = "skipped_step"
    reason: str
    in_a_row: int = 1
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something a person should know that does not stop the run."""

    kind: ClassVar[str] = "warning"
    message: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Preempted(Event):
    """The run was asked to stop."""

    kind: ClassVar[str] = "preempted"
    reason: str
    """The signal's name, for instance."""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The last line of a process that ended in good order."""

    kind: ClassVar[str] = "run_finished"
    status: Literal["completed", "preempted", "failed"]
    total_seconds: float
    """Of this process, set-up included."""
    total_tokens: int
    """Computed since step 0, those that fill rows up included; of steps before this process at most so many, had rows been full."""
    final_loss: float | None = None
    """Last validation loss, or last training loss where there is no validation."""


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A rank died, hung or raised."""

    kind: ClassVar[str] = "failed"
    message: str
    rank: int | None = None


MEASUREMENTS: tuple[type[Event], ...] = (Ranks, Memory, PipelineRan)
"""Kinds that are read by the report and say nothing as a line."""

EVENT_TYPES: dict[str, type[Event]] = {
    event_type.kind: event_type
    for event_type in (
        RunStarted, Step, Ranks, Memory, PipelineRan, Profiled, Evaluation, Checkpoint, Resumed, RolledBack, SkippedStep, Warned,
        Preempted, RunFinished, Failed,
    )
}  # fmt: skip
