"""The events of a run: one JSON object per line of `events.jsonl`, the one source of every bar, plot and comparison.

`docs/events.md` is the schema for people; the dataclasses here are the schema for machines. `step` counts optimizer steps
that are done: the first `step` event says 1, a checkpoint at step 100 holds the weights after 100 of them, and `resumed` at
step 100 is followed by step 101. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from shardwright.errors import InputError, nearest

SCHEMA_VERSION = 1
"""Raised when a reader of the old schema would misread a new file. Added fields and kinds do not raise it."""

FILE_NAME = "events.jsonl"

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no NaN: a loss that is not finite is written as one of these strings and read back as the float."""


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
    """Model FLOPs of forward and backward together."""
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
    """Of the global batch."""
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint that is whole on disk."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    size_bytes: int
    seconds: float
    """From the copy to host memory to the moment when it was whole on disk."""
    stall_seconds: float | None = None
    """That training stood still for it; less than `seconds` where it was written in the background."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Training goes on from the checkpoint at `step`; later steps written before this line are superseded."""

    kind: ClassVar[str] = "resumed"
    path: str


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
    """Seen since step 0."""
    final_loss: float | None = None
    """Last validation loss, or last training loss where there is no validation."""


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """A rank died, hung or raised."""

    kind: ClassVar[str] = "failed"
    message: str
    rank: int | None = None


EVENT_TYPES: dict[str, type[Event]] = {
    event_type.kind: event_type
    for event_type in (
        RunStarted, Step, Evaluation, Checkpoint, Resumed, SkippedStep, Warned, Preempted, RunFinished, Failed,
    )
}  # fmt: skip


def make_event(kind: str, **values: Any) -> Event:
    """The typed event of a kind.

    Raises:
        InputError: a kind that does not exist, or fields that are missing or unknown.

    >>> make_event("warning", message="slow disk").message
    'slow disk'
    """
    event_type = EVENT_TYPES.get(kind)
    if event_type is None:
        near = nearest(kind, EVENT_TYPES)
        raise InputError(
            "no such kind of event",
            field="kind",
            got=kind,
            allowed=", ".join(EVENT_TYPES),
            remedy=f"Meant `{near}`?" if near else None,
        )
    known = {f.name for f in fields(event_type)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"a `{kind}` event has no such field", field=unknown[0], allowed=", ".join(sorted(known)))
    missing = [f.name for f in fields(event_type) if f.default is MISSING and f.name not in values]
    if missing:
        raise InputError(f"a `{kind}` event needs it", field=missing[0])
    return event_type(**values)


def encode(event: Event) -> str:
    """The event as one line of JSON, without the newline."""
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": event.kind}
    record["time"] = round(event.time, 3)
    record["elapsed_seconds"] = round(event.elapsed_seconds, 4)
    for field in fields(event):
        if field.name not in record:
            value = getattr(event, field.name)
            if value is not None or field.name == "step":
                record[field.name] = value
    try:
        return json.dumps(record, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_spell_non_finite(record), allow_nan=False, ensure_ascii=False)


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_non_finite(item) for item in value]
    return value


def _readers(event_type: type[Event]) -> dict[str, str]:
    """How each field is read back: `float` knows the spelled non-finite values, `tuple` comes from a list."""
    return {f.name: "float" if "float" in str(f.type) else "tuple" if "tuple" in str(f.type) else "" for f in fields(event_type)}


_READERS = {kind: _readers(event_type) for kind, event_type in EVENT_TYPES.items()}


def decode(record: Mapping[str, Any]) -> Event:
    """The event of a parsed line. Fields that this version does not know are left out: the schema may grow.

    Raises:
        KeyError: the kind is unknown.
        TypeError, ValueError: a field is missing or no number where one belongs.
    """
    kind = record["kind"]
    event_type = EVENT_TYPES[kind]
    values: dict[str, Any] = {}
    for name, reader in _READERS[kind].items():
        if name not in record:
            continue
        value = record[name]
        if reader == "float" and value is not None:
            value = _NON_FINITE[value] if isinstance(value, str) and value in _NON_FINITE else float(value)
        elif reader == "tuple":
            value = tuple(value)
        values[name] = value
    return event_type(**values)
