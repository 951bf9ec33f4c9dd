"""How the run is cut over devices, and which devices those are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from shardwright.config.section import NonNegative, PathText, Positive, Section


class LayoutSection(Section):
    """Degrees of parallelism. One data degree may be left out: it takes the ranks that remain. `layout: auto` leaves them to the
    planner."""

    auto: bool = False
    """Let the planner choose degrees, ZeRO's stage and the schedule for the devices at hand (or for `cluster`), and of micro
    batch, accumulation and recompute what the recipe leaves open."""
    dp_replicate: Positive | None = None
    """Replicas that hold the same shard (hybrid) or the whole model (zero_stage 0)."""
    dp_shard: Positive | None = None
    """Ranks over which ZeRO shards."""
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """0 replicates (DDP); 1 shards optimizer states; 2 gradients too; 3 parameters too (FSDP). Default 3 when anything
    is sharded, else 0."""
    sequence_parallel: bool = True
    """With `tp`: norms and the residual stream are cut over the sequence, too, which saves their memory and costs no traffic."""
    cp_method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """How attention reaches other ranks' tokens under `cp`: keys and values go round or are gathered, or heads are exchanged."""
    schedule: PathText = "1f1b"
    """With `pp`: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, dualpipev, or a file that holds a schedule."""
    virtual_stages: Positive | None = None
    """With `pp` and interleaved_1f1b: stages per rank; default 2."""
    wrap_blocks: Positive = 1
    """Decoder blocks gathered together (FSDP wrap granularity)."""
    prefetch_depth: NonNegative = 1
    """Groups gathered ahead of use, forward and backward."""
    max_gathers_in_flight: Positive = 2
    """Groups whose full parameters may exist at once, the one in use included; prefetching stops there."""
    bucket_size_bytes: Positive = 25 * 1024**2
    """zero_stage 0: gradients are reduced in buckets of about this size while the backward pass goes on."""

    @model_validator(mode="after")
    def _auto_chooses(self) -> LayoutSection:
        kept = {"auto", "wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes"}
        given = [
            key for key in type(self).model_fields if key not in kept and getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.auto and given:
            raise ValueError(f"`auto` chooses `{given[0]}` itself: leave out one of the two")
        return self


def _as_layout(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


Layout = Annotated[LayoutSection, BeforeValidator(_as_layout)]
"""Written as a mapping, or `auto`."""


class ClusterSection(Section):
    """What a layout is planned for, where it is not the devices of this machine."""

    node: str
    """Devices of one node, as `shardwright plan --cluster` takes them: `8xH100-80GB`."""
    link: str | None = None
    """Between nodes: ib400, eth100, ...; default what is usual with the device."""
    profile: PathText | None = None
    """A file of measured rates, which the planner prefers to the catalogue."""


def _as_cluster(value: Any) -> Any:
    return {"node": value} if isinstance(value, str) else value


Cluster = Annotated[ClusterSection | None, BeforeValidator(_as_cluster)]
"""Written as a mapping, or as its node alone."""
