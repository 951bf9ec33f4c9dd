"""The run folder, what is saved, and what happens when a rank is lost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.section import NonNegative, PathText, Positive, Section

DeviceKind = Literal["auto", "cpu", "cuda"]
"""What ranks compute on; `auto` takes CUDA where there is some."""


class CheckpointSection(Section):
    """What is saved, when, where, and how much is kept."""

    dir: PathText | None = None
    """Where: a folder, or an fsspec URL such as `s3://bucket/run`; default `checkpoints` in the run folder."""
    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end, on a stop, and where validation improves (`keep_best`)."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_every: Positive | None = None
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: bool = True
    """Save where the validation loss is the lowest so far, and keep that one too."""
    asynchronous: bool = True
    """Write while the training goes on: its next update waits for a copy to host memory, which is kept for the save after. The last
    save of a run, and the one after a stop signal, are waited for."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long ranks wait for each other while they save; the training's own time-out is run.timeout_seconds."""


class RollbackSection(Section):
    """Going back to an earlier checkpoint, and past the data that came after it, where the loss spikes or where more steps in a row
    than `training.max_skipped_steps` had no finite gradient. Recorded in events.jsonl (`rolled_back`)."""

    spike_nats: Annotated[float, Field(gt=0)] = 1.0
    """A loss this far above the median of the last `window_steps` is a spike."""
    window_steps: Positive = 32
    """Losses that the median is taken of; nothing is a spike before there are as many."""
    at_least_steps_before: NonNegative = 0
    """Take the newest checkpoint this many steps before the spike or more: what made it may have been learned some steps earlier.
    `checkpoint.keep_last` or `keep_every` must have kept one."""
    max_rollbacks: Positive = 3
    """In one call of `train`, or from one restart to the next; what comes after is told and trained through."""


class ElasticSection(Section):
    """What happens when a rank is lost: the ranks of this machine are started again and go on from the newest whole checkpoint."""

    max_restarts: NonNegative = 0
    """How often, in one call of `train`; 0 ends the run with the first loss."""
    min_ranks: Positive | None = None
    """After a generation that saved nothing new, go on with fewer ranks, down to this many, where the layout leaves a degree open
    and the global batch stays the same. Null starts as many as before."""
    rollback: RollbackSection | None = None
    """Go back by itself where the loss spikes; null goes on."""

    @model_validator(mode="after")
    def _acts(self) -> ElasticSection:
        if self.min_ranks is not None and not self.max_restarts:
            raise ValueError("`min_ranks` is for restarts: give `max_restarts`, too")
        return self


class WatchdogSection(Section):
    """When a run of several ranks is said to hang, and one of them to be slow. What hangs is named, with the collective that it
    lacks; everybody's stacks go to `hangs/` in the run folder; the ranks are ended, and started again where `elastic` says so."""

    enabled: bool = True
    """False leaves it to the collectives' own time-out (run.timeout_seconds), which names nobody."""
    factor: Annotated[float, Field(gt=1)] = 20.0
    """A step, a save or a batch of an evaluation hangs after this many times the longest that it has taken so far. The first one is
    not counted; until three more were seen, nine tenths of run.timeout_seconds (checkpoint.timeout_seconds for saves) hold, which
    are the most at any time."""
    floor_seconds: Annotated[float, Field(gt=0)] = 60.0
    """The least that a learned limit may be."""
    setup_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """How long everything before the first step may take: reading data, loading weights, meeting the others."""
    slow_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """A rank is named as slow when its own work, waiting for others left out, takes this many times that of the ranks with the same
    work, in `slow_steps` steps; null names nobody."""
    slow_steps: Annotated[int, Field(ge=6, multiple_of=3, strict=True)] = 15
    """A slow rank is named after this many steps, or up to a third more where it became slow in the middle of a block: three blocks
    in a row must each show it."""


class RunSection(Section):
    """The run folder and what is written there."""

    dir: PathText | None = None
    """Run folder; default `runs/<name>`."""
    log_every_steps: Positive = 1
    """Steps between lines of the log (events.jsonl has every step)."""
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Optional sinks beside events.jsonl."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps that are profiled, by their numbers in the log: all ranks on one clock, one trace for Perfetto or chrome://tracing in
    `profile/` of the run folder. A profiled step is slower."""
    device: DeviceKind = "auto"
    """`auto` takes CUDA where it is."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a collective may wait before the run is declared broken."""
    replica_check_every_steps: Positive | None = None
    """Steps between comparisons of the weights that several ranks hold alike; a difference ends the run before it is saved, and
    `elastic` goes back to the checkpoint before. Checked before every save, too. Null never checks."""
