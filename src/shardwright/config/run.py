"""Recipe sections of the run folder, checkpoints, restarts and the watchdog."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.recipe_section import (
    LocalFolderText,
    NonNegative,
    PathText,
    Positive,
    RecipeSection,
)

DeviceKind = Literal["auto", "cpu", "cuda"]
"""Device type of the ranks; `auto` uses CUDA if available."""


class CheckpointSection(RecipeSection):
    """Checkpoints: when and where they are saved, and how many are kept."""

    dir: PathText | None = None
    """Folder or fsspec URL such as `s3://bucket/run`; default `checkpoints` in the run
    folder. A relative folder starts at the working directory."""
    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end, on a stop signal, and when
    validation improves (`keep_best`)."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep. Those from before a state with NaN or infinity stay
    too."""
    keep_every: Positive | None = None
    """Never delete checkpoints of steps that are multiples of this."""
    keep_best: bool = True
    """Save when the validation loss is the lowest so far, and keep that checkpoint too."""
    asynchronous: bool = True
    """Write checkpoints in the background: the next update waits only for a copy to host
    memory, whose buffers are reused by later saves. The last save of a run, and the one after a
    stop signal, are synchronous."""
    allow_non_finite: bool = False
    """Continue from a checkpoint whose weights or optimizer states contain NaN or infinity, with
    a warning. It is an error otherwise."""
    timeout_seconds: Annotated[float, Field(strict=True, gt=0)] = 1800.0
    """Maximum time that ranks wait for each other during a save; run.timeout_seconds applies to
    training."""


class RollbackSection(RecipeSection):
    """Return to an earlier checkpoint and skip the data after it, when the loss spikes or when
    more than `training.max_skipped_steps` consecutive steps have a non-finite gradient.
    Recorded in events.jsonl (`rolled_back`)."""

    spike_nats: Annotated[float, Field(strict=True, gt=0)] = 1.0
    """A loss this far above the median of the last `window_steps` is a spike."""
    window_steps: Positive = 32
    """Number of losses in the median; no spike is detected before that many steps."""
    at_least_steps_before: NonNegative = 0
    """Roll back to the newest checkpoint that is at least this many steps older than the spike,
    because its cause may lie some steps earlier. `checkpoint.keep_last` or `keep_every` must
    keep such a checkpoint."""
    max_rollbacks: Positive = 3
    """Maximum number of rollbacks in one call of `train`, or between two restarts; later spikes
    are logged and training continues."""


NODE_TOKEN_VARIABLE = "SHARDWRIGHT_NODE_TOKEN"
"""Environment variable with the secret of a run whose nodes keep their processes
(`elastic.warm_restarts`): the launcher on the first node accepts no others."""


class ElasticSection(RecipeSection):
    """Restarts after the loss of a rank: all ranks that `train --nproc` started continue from the
    newest complete checkpoint, in new processes or, with `warm_restarts`, mostly in those they
    have."""

    max_restarts: NonNegative = 0
    """Maximum number of restarts in one call of `train`; 0 ends the run at the first
    failure."""
    min_ranks: Positive | None = None
    """Minimum number of ranks. After a generation that saved nothing new (with `peer_copies`: that
    finished no step), restart with fewer ranks, if the layout leaves a degree open and the global
    batch stays the same. With `layout: auto` the planner chooses number and layout. Null always
    restarts with the same number."""
    grow_after_steps: Positive | None = None
    """Number of steps of a run that continues with fewer ranks, after which as many ranks as at
    first start again, because a lost device may be back. If these save nothing new (with
    `peer_copies`: finish no step), the smaller number continues, and twice as many steps pass
    before the next try. Null never returns to more ranks."""
    warm_restarts: bool = False
    """Keep the processes of the ranks that are not lost, with their imports, compiled code and
    caches, and start the lost rank from a spare process that waits. A restart then takes about
    a second instead of several; the spare occupies a few hundred MB of host memory. Processes
    that cannot leave the failed generation within ten seconds are replaced. Only for ranks
    started by `train --nproc`; on several nodes, one such command per node."""
    spare_nodes: NonNegative = 0
    """Number of nodes without ranks, whose processes wait for the loss of another node. With
    `warm_restarts` on several nodes only."""
    node_wait_seconds: Annotated[float, Field(strict=True, ge=0)] = 60.0
    """Seconds that the other nodes wait, after the loss of a node, for one to take its ranks: a
    node that connects again. Then the run continues with fewer ranks (`min_ranks`), or ends."""
    peer_copies: Annotated[int, Field(ge=0, le=1)] = 0
    """1 keeps a copy of every rank's state in the memory of another rank's process, on another
    node if there are several, and renews it after every step while the next one is computed. A
    warm restart then continues from memory, without reading a checkpoint, and loses at most the
    step in progress and the one whose copy was on its way. Host memory: twice the state of a rank
    and twice what it receives. 0 keeps none."""
    rollback: RollbackSection | None = None
    """Automatic rollback on loss spikes; null continues without rollback."""

    @model_validator(mode="after")
    def _check_restarts(self) -> ElasticSection:
        if self.min_ranks is not None and not self.max_restarts:
            raise ValueError("`min_ranks` is for restarts: set `max_restarts` too")
        if self.grow_after_steps is not None and self.min_ranks is None:
            raise ValueError(
                "`grow_after_steps` is for runs that continue with fewer ranks: set `min_ranks` too"
            )
        if self.warm_restarts and not self.max_restarts:
            raise ValueError("`warm_restarts` is for restarts: set `max_restarts` too")
        if self.spare_nodes and not self.warm_restarts:
            raise ValueError(
                "`spare_nodes` replace lost nodes in warm restarts: set `warm_restarts` too"
            )
        if self.peer_copies and not self.warm_restarts:
            raise ValueError(
                "`peer_copies` need processes that survive a restart: set `warm_restarts` too"
            )
        return self


class WatchdogSection(RecipeSection):
    """Detection of hangs and slow ranks in runs with several ranks. On a hang, the watchdog
    reports the rank and the collective that it did not reach, writes the stacks of all ranks to
    `hangs/` in the run folder, and ends the ranks; they restart if `elastic` allows it."""

    enabled: bool = True
    """False leaves hangs to the time-out of the collectives (run.timeout_seconds), which does
    not identify a rank."""
    factor: Annotated[float, Field(strict=True, gt=1)] = 20.0
    """A step, a save or an evaluation batch counts as a hang after this many times the longest
    duration so far. The first one is not counted. Until three more are measured, and as an
    upper bound at any time, the limit is nine tenths of run.timeout_seconds (for saves,
    checkpoint.timeout_seconds)."""
    floor_seconds: Annotated[float, Field(strict=True, gt=0)] = 60.0
    """Lower bound of a limit derived from measured durations."""
    setup_seconds: Annotated[float, Field(strict=True, gt=0)] = 3600.0
    """Time limit for everything before the first step: reading data, loading weights,
    connecting to the other ranks."""
    slow_factor: Annotated[float, Field(strict=True, gt=1)] | None = 1.5
    """A rank is reported as slow when its own work, without waiting for others, takes this many
    times as long as that of the ranks with the same work, over `slow_steps` steps; null reports
    none."""
    slow_steps: Annotated[int, Field(ge=6, multiple_of=3, strict=True)] = 15
    """Steps before a slow rank is reported, up to a third more if it became slow within a
    block: each of three consecutive blocks must show it."""


class RunSection(RecipeSection):
    """Run folder, device and observation of a run."""

    dir: LocalFolderText | None = None
    """Run folder; default `runs/<name>`."""
    log_every_steps: Positive = 1
    """Steps between log lines (events.jsonl contains every step)."""
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Additional sinks for events, besides events.jsonl."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps to profile, by their numbers in the log. All ranks' timelines are aligned and
    written as one trace for Perfetto or chrome://tracing, to `profile/` in the run folder.
    Profiled steps are slower."""
    device: DeviceKind = "auto"
    """Device of the ranks; `auto` uses CUDA if available."""
    timeout_seconds: Annotated[float, Field(strict=True, gt=0)] = 600.0
    """Time limit of a collective; after it the run fails."""
    replica_check_every_steps: Positive | None = None
    """Steps between comparisons of the weights that are replicated on several ranks. A
    difference ends the run before it is saved, and `elastic` restarts from the previous
    checkpoint. The weights are also compared before every save. Null disables all
    comparisons."""
