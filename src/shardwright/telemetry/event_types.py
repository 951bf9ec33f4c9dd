"""Event types of a run: one JSON object per line of `events.jsonl`, the source of all reports.

`docs/events.md` documents the schema that these dataclasses define. `step` counts completed
optimizer steps: the first `step` event has 1, a checkpoint at step 100 contains the weights
after 100 steps, and `resumed` at step 100 is followed by step 101. Times are in seconds, sizes
in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

SCHEMA_VERSION = 1
"""Increased if readers of the old schema would misread a new file; not for added fields and
kinds."""

EVENTS_FILE_NAME = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields of every event. The writer fills in `time` and `elapsed_seconds`."""

    kind: ClassVar[str]
    step: int | None = None
    """Completed optimizer steps at the time of the event; None if it belongs to no step."""
    time: float = 0.0
    """Wall clock time, seconds since 1970 (UTC)."""
    elapsed_seconds: float = 0.0
    """Seconds since this process opened the file (monotonic clock); restarts at 0 on resume."""


@dataclass(frozen=True, kw_only=True)
class RunStartedEvent(Event):
    """The process group is set up and training is about to start, also after a resume."""

    kind: ClassVar[str] = "run_started"
    name: str
    recipe: dict[str, Any]
    """Recipe with all defaults resolved."""
    plan: dict[str, Any]
    """Plan as returned by `Plan.as_dict`."""
    layout: str
    """Layout in the syntax of `--layout`."""
    world_size: int
    total_steps: int
    """Last step of the run."""
    global_batch_tokens: int
    """Tokens per optimizer step over all ranks."""
    data_hash: str
    """Hash of data and order; equal exactly if two runs see the same batches at the same
    steps."""
    num_parameters: int
    versions: dict[str, str]
    """Versions of shardwright, python, torch and other software that affects the numbers."""
    host: str
    devices: tuple[str, ...]
    """Device names, one per rank."""
    flops_per_token: float | None = None
    """Model FLOPs of forward and backward pass together, per token in a full row."""
    matmul_flops_per_second: float | None = None
    """Measured matmul ceiling of one device; MFU is relative to `world_size` times this."""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """One optimizer step, measured on rank 0 except for fields per rank."""

    kind: ClassVar[str] = "step"
    loss: float
    """Mean over the supervised tokens of the global batch, before the update."""
    gradient_norm: float
    """Global gradient norm, before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch as computed, padding included."""
    supervised_tokens: int
    samples_seen: int
    """Sequences consumed since step 0, over all ranks: the data cursor."""
    step_seconds: float
    tokens_per_second: float
    """Tokens per second of all ranks together."""
    model_flops_per_second: float | None = None
    """Model FLOP/s of all ranks together, without recomputation."""
    mfu: float | None = None
    """model_flops_per_second / (world_size x measured matmul ceiling), 0 to 1."""
    memory_bytes: tuple[int, ...] = ()
    """Peak memory per rank, in rank order: allocated on the accelerator, resident on a CPU."""
    data_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    reduction_seconds: float | None = None
    """Exposed gradient reduction: waiting that the backward pass did not overlap."""
    waiting_seconds: float | None = None
    """Pipelines: waiting for other stages."""
    optimizer_seconds: float | None = None
    """Gradient norm, clipping and update."""
    offload_read_bytes: int | None = None
    """Offloading: bytes read from host memory or disk since the step before."""
    offload_written_bytes: int | None = None
    """Offloading: bytes written there since the step before."""
    offload_waiting_seconds: float | None = None
    """Offloading: time that training waited for transfers of states, and for an update that
    overlaps with the next forward pass: the host with a disk, the device with host memory."""
    activation_read_bytes: int | None = None
    """Offloaded activations: bytes that returned to the device since the step before."""
    activation_written_bytes: int | None = None
    """Offloaded activations: bytes that left the device since the step before."""
    activation_waiting_seconds: float | None = None
    """Offloaded activations: time that forward and backward passes waited for transfers."""
    parameter_read_bytes: int | None = None
    """Offloaded weights: bytes that came to the device since the step before, those of gradients
    of trained weights included."""
    parameter_written_bytes: int | None = None
    """Offloaded trained weights: bytes of them and of gradients that left the device since the
    step before. None for frozen weights, which are only read."""
    parameter_waiting_seconds: float | None = None
    """Offloaded weights: time that passes and the update waited for transfers, those of an
    evaluation before the step included."""
    loss_scale: float | None = None
    """Loss scale, fp16 only."""
    fp8_saturated: dict[str, int] | None = None
    """8-bit and 4-bit products, at multiples of run.log_every_steps: elements of operands clamped
    to the format's largest number, over all ranks, by kind of layer."""
    fp8_flushed: dict[str, float] | None = None
    """The same: fraction of the elements that became zero."""
    fp8_nonfinite: dict[str, int] | None = None
    """The same: elements that were infinite or NaN before they were quantised."""
    expert_load: float | None = None
    """Sparse models: tokens of the busiest expert / mean tokens per expert; 1 if all are
    equal."""
    expert_tokens: tuple[tuple[int, ...], ...] | None = None
    """Sparse models, at multiples of run.log_every_steps: tokens of the global batch routed to
    each expert before dropping, shape [sparse layers, experts]."""
    dropped_choices: int | None = None
    """Sparse models with a capacity: token-expert choices of the global batch that exceeded
    it."""
    balance_loss: float | None = None
    """Sparse models: mean over sequences and layers, without its coefficient; even loads give
    the number of experts per token."""
    router_z_loss: float | None = None
    """Sparse models: mean over sequences and layers, without its coefficient."""
    reward_chosen: float | None = None
    """Preference tuning: mean over pairs of beta x (log-probability of the chosen response -
    that of the reference model)."""
    reward_rejected: float | None = None
    """The same for the rejected response."""
    reward_margin: float | None = None
    """Difference of reward_chosen and reward_rejected."""
    reward_accuracy: float | None = None
    """Fraction of pairs whose chosen response has the higher reward."""


@dataclass(frozen=True, kw_only=True)
class RanksEvent(Event):
    """Timings of one step on every rank, in rank order.

    Logged at multiples of run.log_every_steps; with more than eight ranks proportionally less
    often, so that the file does not grow faster.
    """

    kind: ClassVar[str] = "ranks"
    step_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]
    """Step time without waiting for other ranks; it distinguishes a slow rank from waiting
    ones."""
    data_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    """Forward pass, waits included; the same holds for backward and reduction."""
    backward_seconds: tuple[float, ...]
    reduction_seconds: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    checkpoint_seconds: tuple[float, ...]
    """Time that checkpoints blocked the rank since the previous event of this kind."""
    wait_seconds: dict[str, tuple[float, ...]]
    """Time waiting for other ranks, by kind of parallelism: data, tensor, context, expert,
    pipeline (bubbles included), world (reductions over several kinds). Kinds without waits are
    absent."""
    reserved_bytes: tuple[int, ...] | None = None
    """CUDA: peak memory reserved by the allocator."""
    device_bytes: tuple[int, ...] | None = None
    """CUDA: memory in use on the whole device, by all processes."""
    temperature_celsius: tuple[float, ...] | None = None
    """Device temperature, if NVML is available."""
    throttled: tuple[str, ...] | None = None
    """Reasons for reduced clocks, such as `power, heat`, if NVML is available; empty if
    none."""


@dataclass(frozen=True, kw_only=True)
class MemoryEvent(Event):
    """Memory use of each rank, in rank order; measured once per process, in its second step."""

    kind: ClassVar[str] = "memory"
    weights_bytes: tuple[int, ...]
    """Parameters, and their copies in the compute precision (`precision.working_weights`)."""
    gradients_bytes: tuple[int, ...]
    """Gradients, at the time when all of them exist."""
    optimizer_bytes: tuple[int, ...]
    """Optimizer states on the device."""
    peak_bytes: tuple[int, ...]
    """Peak of that step: allocated on CUDA, resident on a CPU."""
    driver_bytes: tuple[int, ...] | None = None
    """CUDA: device memory in use outside the allocator."""
    reserved_bytes: tuple[int, ...] | None = None
    """CUDA: peak memory reserved by the allocator."""
    offloaded_bytes: tuple[int, ...] | None = None
    """Offloading: optimizer states in host memory or on disk."""
    offloaded_activation_bytes: tuple[int, ...] | None = None
    """Offloading: most bytes of saved tensors that were in host memory or on disk at once."""
    offloaded_parameter_bytes: tuple[int, ...] | None = None
    """Offloading: weights of each rank in host memory or on disk, which are not in weights_bytes;
    of trained ones their gradients too."""


@dataclass(frozen=True, kw_only=True)
class PipelineEvent(Event):
    """Timeline of one step of one pipeline; logged about twenty times in a run."""

    kind: ClassVar[str] = "pipeline"
    schedule: str
    """Name of the schedule."""
    ranks: tuple[int, ...]
    """Global rank of each pipeline rank."""
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    """Pipeline rank of each stage."""
    actions: tuple[tuple[str, ...], ...]
    """Actions of each pipeline rank in order; `3F0` is stage 3, forward, micro-batch 0."""
    begins: tuple[tuple[float, ...], ...]
    """Start of each action, seconds since the first one, on rank 0's clock."""
    ends: tuple[tuple[float, ...], ...]
    clock_error_seconds: float
    """Maximum remaining difference between the ranks' clocks."""


@dataclass(frozen=True, kw_only=True)
class ProfileEvent(Event):
    """A profile of a step was saved in the run folder, with all ranks on one clock."""

    kind: ClassVar[str] = "profile"
    path: str
    ranks: int
    """Number of ranks in the profile."""
    clock_error_seconds: float
    summary: str | None = None
    """Summary of rank 0's trace in one line: time, idle share, largest kinds of kernels."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """Evaluation on the validation set, or on its first rows, after `step`."""

    kind: ClassVar[str] = "evaluation"
    loss: float
    perplexity: float
    tokens: int
    """Supervised tokens that the loss is averaged over."""
    seconds: float
    best: bool = False
    """True if the loss is the lowest so far."""
    reward_chosen: float | None = None
    """Preference tuning, as in `step`: mean over pairs of beta x (log-probability of the chosen
    response - that of the reference model)."""
    reward_rejected: float | None = None
    """The same for the rejected response."""
    reward_margin: float | None = None
    """Difference of reward_chosen and reward_rejected."""
    reward_accuracy: float | None = None
    """Fraction of pairs whose chosen response has the higher reward."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    size_bytes: int
    seconds: float
    """Time from when the save was due until it was complete on disk."""
    stall_seconds: float | None = None
    """Time that training waited for it, also before the next update; less than `seconds` if it
    was written in the background."""


@dataclass(frozen=True, kw_only=True)
class RestartEvent(Event):
    """The launcher has started the ranks again after a failure."""

    kind: ClassVar[str] = "restarted"
    number: int
    """Number of this restart, from 1."""
    max_restarts: int
    world_size: int
    reason: str
    is_warm: bool = False
    """True with `elastic.warm_restarts`."""
    surviving_ranks: tuple[int, ...] = ()
    """Warm restarts: ranks with a process of the generation before. Without any the restart is a
    cold one."""
    stuck_ranks: tuple[int, ...] = ()
    """Warm restarts: ranks whose process was replaced because it could not leave the failed
    generation."""
    seconds_since_loss: float | None = None
    """Warm restarts: seconds from the launcher's notice of the loss to this event."""


@dataclass(frozen=True, kw_only=True)
class ResumeEvent(Event):
    """Training continues from the state after `step`; withdraws lines of later steps."""

    kind: ClassVar[str] = "resumed"
    path: str | None = None
    """Checkpoint; None if the state was in memory."""
    source: str = "checkpoint"
    """`checkpoint`, or `memory`: copies in the memory of the ranks (`elastic.peer_copies`)."""
    steps_lost: int | None = None
    """With `elastic.peer_copies`: finished steps that are run again, besides the step that was in
    progress."""


@dataclass(frozen=True, kw_only=True)
class ReshardEvent(Event):
    """The state after `step` was sharded by another layout than the run's now, and was loaded bit
    by bit. Follows the `resumed` line.
    """

    kind: ClassVar[str] = "resharded"
    from_layout: str
    """Layout that had the state, in the syntax of `--layout`."""
    to_layout: str
    world_size: int
    """Number of ranks now."""
    former_world_size: int | None = None
    """Number of ranks before; None if this is not known, as after `--resume`."""
    source: str = "checkpoint"
    """As in `resumed`."""
    seconds: float | None = None
    """Time to load the state under the layout."""


@dataclass(frozen=True, kw_only=True)
class RollbackEvent(Event):
    """The run returned to the checkpoint at `step` automatically and skips the data in between.

    A `resumed` line accompanies it.
    """

    kind: ClassVar[str] = "rolled_back"
    reason: str
    from_step: int
    """Step before the rollback."""
    path: str
    first_sample: int
    """Position of the first skipped sample in the sample order."""
    num_samples: int
    """Number of skipped samples."""


@dataclass(frozen=True, kw_only=True)
class SkippedStepEvent(Event):
    """All ranks skipped the update of this step because the gradient was not finite."""

    kind: ClassVar[str] = "skipped_step"
    reason: str
    in_a_row: int = 1
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """A problem that does not stop the run."""

    kind: ClassVar[str] = "warning"
    message: str
    rank: int | None = None
    slowdown: dict[str, Any] | None = None
    """First steps that are slower than predicted: `part` (products, traffic, input, waiting),
    `parallelism` of traffic, `rank` for which the others wait, seconds predicted and measured
    of the part and of the step, and `faster_layout` at the measured rates with its
    `faster_seconds`."""


@dataclass(frozen=True, kw_only=True)
class PreemptionEvent(Event):
    """The run was asked to stop."""

    kind: ClassVar[str] = "preempted"
    reason: str
    """Reason, such as the name of a signal."""


@dataclass(frozen=True, kw_only=True)
class RunFinishedEvent(Event):
    """Last line of a process that ended normally."""

    kind: ClassVar[str] = "run_finished"
    status: Literal["completed", "preempted", "failed"]
    total_seconds: float
    """Seconds of this process, set-up included."""
    total_tokens: int
    """Tokens computed since step 0, padding included; steps before this process count full
    rows."""
    final_loss: float | None = None
    """Last validation loss, or last training loss if there is no validation."""


@dataclass(frozen=True, kw_only=True)
class FailureEvent(Event):
    """A rank died, hung or raised."""

    kind: ClassVar[str] = "failed"
    message: str
    rank: int | None = None


MEASUREMENT_TYPES: tuple[type[Event], ...] = (RanksEvent, MemoryEvent, PipelineEvent)
"""Event types for the report, which are not shown as lines of text."""

EVENT_TYPES: dict[str, type[Event]] = {
    event_type.kind: event_type
    for event_type in (
        RunStartedEvent, StepEvent, RanksEvent, MemoryEvent, PipelineEvent,
        ProfileEvent, EvaluationEvent, CheckpointEvent, RestartEvent, ResumeEvent, ReshardEvent,
        RollbackEvent, SkippedStepEvent, WarningEvent, PreemptionEvent, RunFinishedEvent,
        FailureEvent,
    )
}  # fmt: skip
