"""The run folder, what is saved, and what happens when a rank is lost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.section import NonNegative, Positive, Section


class CheckpointSection(Section):
    """What is saved, when, where, and how much is kept."""

    dir: str | None = None
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
    """Write while the training goes on: it waits for a copy to host memory only, which is kept for the next save. The last save of
    a run, and the one after a stop signal, are waited for."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long ranks wait for each other while they save; the training's own time-out is run.timeout_seconds."""


class ElasticSection(Section):
    """What happens when a rank is lost: the ranks of this machine are started again and go on from the newest whole checkpoint."""

    max_restarts: NonNegative = 0
    """How often, in one call of `train`; 0 ends the run with the first loss."""
    min_ranks: Positive | None = None
    """After a generation that saved nothing new, go on with fewer ranks, down to this many, where the layout leaves a degree open
    and the global batch stays the same. Null starts as many as before."""

    @model_validator(mode="after")
    def _acts(self) -> ElasticSection:
        if self.min_ranks is not None and not self.max_restarts:
            raise ValueError("`min_ranks` is for restarts: give `max_restarts`, too")
        return self


class RunSection(Section):
    """The run folder and what is written there."""

    dir: str | None = None
    """Run folder; default `runs/<name>`."""
    log_every_steps: Positive = 1
    """Steps between lines of the log (events.jsonl has every step)."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Optional sinks beside events.jsonl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it is."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a collective may wait before the run is declared broken."""
    replica_check_every_steps: Positive | None = None
    """Steps between comparisons of the weights that several ranks hold alike; a difference ends the run before it is saved, and
    `elastic` goes back to the checkpoint before. Checked before every save, too. Null never checks."""
