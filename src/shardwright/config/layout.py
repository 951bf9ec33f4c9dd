"""Recipe sections of the parallel layout and of the cluster it is planned for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.recipe_section import (
    NonNegative,
    PathText,
    Positive,
    PositiveBytes,
    RecipeSection,
)

SETTINGS_WITH_AUTO = frozenset(
    {"wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes"}
)
"""Settings that a recipe may combine with `layout: auto`: the planner does not search them."""


class LayoutSection(RecipeSection):
    """Degrees of parallelism. At most one data degree may be omitted: it uses the remaining
    ranks. `layout: auto` lets the planner choose all of them."""

    auto: bool = False
    """Let the planner choose the degrees, the ZeRO stage and the schedule for the available
    devices (or for `cluster`), and also micro-batch size, accumulation and recompute where the
    recipe does not set them."""
    dp_replicate: Positive | None = None
    """Replicas of each shard (hybrid sharding) or of the whole model (zero_stage 0)."""
    dp_shard: Positive | None = None
    """Ranks over which ZeRO shards."""
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """0 replicates everything (DDP); 1 shards optimizer states; 2 also gradients; 3 also
    parameters (FSDP). Default: 3 if anything is sharded, else 0."""
    sequence_parallel: bool = True
    """With `tp`: also shard norms and the residual stream over the sequence, which saves their
    memory at no extra communication."""
    async_tensor_parallel: Literal["none", "auto", "chunked", "fused"] = "none"
    """Overlap of tensor-parallel communication with products. `chunked`: chunks of tokens are
    communicated during the products of others, and gradients are summed behind those of weights.
    `fused`: PyTorch's kernels over symmetric memory (CUDA, ranks of one node) in place of chunks.
    `auto`: `fused` where it is available, else none."""
    expert_dispatch: Literal["whole", "halves", "once_per_rank", "padded", "deep_ep", "auto"] = (
        "whole"
    )
    """Exchange of rows under `ep`. `whole`: a row per choice is sent to its expert, computed and
    returned. `halves`: one half of the tokens' rows are sent while the experts compute the other.
    `once_per_rank`: a token's row is sent once to each rank with one of its experts, which returns
    one weighted sum. `padded`: as `whole`, with the same number of rows for every rank, so that
    the host does not wait for their numbers; a step with more rows is repeated without padding.
    `deep_ep`: rows as `once_per_rank`, by the kernels of the package DeepEP (CUDA, bf16, 2, 4 or 8
    ranks of one node). `auto`: the one of `whole`, `halves` and `once_per_rank` with the shortest
    predicted step, for the recipe's cluster or this machine's GPUs; `whole` without either."""
    expert_row_limit: Annotated[float, Field(strict=True, ge=1.0, allow_inf_nan=False)] = 1.25
    """With `expert_dispatch: padded`: limit of the rows that a rank sends to each other rank, as a
    multiple of the even share. Raised during a run in which steps are repeated."""
    cp_method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """Method by which attention under `cp` accesses the tokens of other ranks: `ring` passes
    keys and values around, `all_gather` gathers them, `ulysses` exchanges heads."""
    cp_split: Literal["zigzag", "work"] = "zigzag"
    """Tokens of each rank under `cp` by `ring` or `all_gather`. `zigzag`: a chunk from the front of
    the row and one from the back, the same work for one document per row. `work`: chunks with the
    same attention work for the documents of each packed micro-batch."""
    schedule: PathText = "1f1b"
    """Pipeline schedule, with `pp`: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, dualpipev, or a
    file that contains a schedule."""
    virtual_stages: Positive | None = None
    """Stages per rank, with `pp` and interleaved_1f1b; default 2."""
    wrap_blocks: Positive = 1
    """Decoder blocks that are gathered together (FSDP wrap granularity)."""
    prefetch_depth: NonNegative = 1
    """Groups of blocks gathered ahead of their use, in forward and backward."""
    max_gathers_in_flight: Positive = 2
    """Maximum number of groups whose full parameters exist at once, including the one in use;
    limits prefetching."""
    bucket_size_bytes: PositiveBytes = 25 * 1024**2
    """Approximate size of the buckets in which zero_stage 0 reduces gradients during the
    backward pass."""

    @model_validator(mode="after")
    def _check_auto(self) -> LayoutSection:
        conflicting = [
            key
            for key in type(self).model_fields
            if key not in {"auto", *SETTINGS_WITH_AUTO}
            and getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.auto and conflicting:
            raise ValueError(f"`auto` already chooses `{conflicting[0]}`: remove one of the two")
        return self


def _parse_layout_setting(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


LayoutSetting = Annotated[LayoutSection, BeforeValidator(_parse_layout_setting)]
"""A mapping, or `auto`."""


class ClusterSection(RecipeSection):
    """Cluster for which `layout: auto` plans, if it is not this machine."""

    node: str
    """Devices of one node, in the notation of `shardwright plan --cluster`: `8xH100-80GB`."""
    link: str | None = None
    """Link between nodes: ib400, eth100, ...; default the usual link for the device."""
    profile: PathText | None = None
    """File with measured rates, which override the catalogue's."""


def _parse_cluster_setting(value: Any) -> Any:
    return {"node": value} if isinstance(value, str) else value


ClusterSetting = Annotated[ClusterSection | None, BeforeValidator(_parse_cluster_setting)]
"""A mapping, or only its `node`."""
