"""Degrees of parallelism and the rules by which they fit a number of ranks.

world_size = pp x dp_replicate x dp_shard x cp x tp; `ep` uses ranks of dp_shard x cp.
`zero_stage` states what is sharded over dp_shard x cp: 0 nothing (DDP), 1 optimizer states, 2
also gradients, 3 also parameters (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from shardwright.config.layout import LayoutSection
from shardwright.errors import LayoutError
from shardwright.units import format_items

ZeroStage = Literal[0, 1, 2, 3]
CpMethod = Literal["auto", "ring", "all_gather", "ulysses"]
CpSplit = Literal["zigzag", "work"]
ExpertDispatch = Literal["whole", "halves", "once_per_rank", "padded", "deep_ep", "auto"]
_DEEP_EP_RANKS = (2, 4, 8)
"""Ranks of one node that `deep_ep.Buffer.get_dispatch_config` knows (versions 1.2.1 and 2.1.0)."""
DEEP_EP_ROW_UNIT = 16
"""Elements to whose multiples DeepEP's kernels copy rows: 32 bytes in bf16 (likewise,
`csrc/kernels/intranode.cu`). A first dispatch sends one unit per row.
"""
AsyncTensorParallel = Literal["none", "auto", "chunked", "fused"]

MAX_TENSOR_CHUNKS = 4
"""Chunks of tokens with `async_tensor_parallel: chunked`. The communication of one chunk is
exposed; more chunks make products smaller."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: adjacent ranks differ in tp, so the group that communicates most
uses the fastest links."""

FSDP_AXES = ("dp_shard", "cp")
"""Axes over which ZeRO shards, flattened into `fsdp` with dp_shard as the major one."""

EXPERT_AXES = ("efsdp", "ep")
"""Axes into which experts split `fsdp`: adjacent ranks hold different experts, and ZeRO shards
each expert over `efsdp`."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens: gradients and losses are summed over them."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks see different sequences: supervised tokens are counted over them, by whole
rows."""


@dataclass(frozen=True)
class Layout:
    """A layout with every degree resolved.

    >>> str(Layout(dp_shard=2, zero_stage=3))
    'dp_shard=2,zero_stage=3'
    >>> Layout(dp_replicate=2, dp_shard=2, zero_stage=3).world_size
    4
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: ZeroStage = 0
    sequence_parallel: bool = True
    async_tensor_parallel: AsyncTensorParallel = "none"
    expert_dispatch: ExpertDispatch = "whole"
    expert_row_limit: float = 1.25
    cp_method: CpMethod = "auto"
    cp_split: CpSplit = "zigzag"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    wrap_blocks: int = 1
    prefetch_depth: int = 1
    max_gathers_in_flight: int = 2
    bucket_size_bytes: int = 25 * 1024**2

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO shards parameters or states over more than one rank."""
        return self.zero_stage >= 1 and self.fsdp > 1

    @property
    def fsdp(self) -> int:
        """Number of ranks over which ZeRO shards parameters other than experts."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which ZeRO shards one expert."""
        return self.fsdp // self.ep

    @property
    def num_gathers_ahead(self) -> int:
        """Number of groups of parameters that are gathered while another one computes."""
        return min(self.prefetch_depth, self.max_gathers_in_flight - 1)

    def degree(self, axis: str) -> int:
        """Return the size of an axis: one of `AXES`, `fsdp`, `efsdp` or `ep`."""
        return int(getattr(self, axis))

    def describe_data_ranks(self) -> list[str]:
        """Describe how data ranks share the model, in parts of a line.

        >>> Layout(dp_shard=4, dp_replicate=2, zero_stage=3).describe_data_ranks()
        ['ZeRO-3 over 4', '2 replicas']
        """
        if self.zero_stage == 0:
            return [f"DDP {self.dp_replicate}"] if self.dp_replicate > 1 else []
        shards = f"ZeRO-{self.zero_stage} over {self.fsdp}"
        return [shards, f"{self.dp_replicate} replicas"] if self.dp_replicate > 1 else [shards]

    def __str__(self) -> str:
        """Return the form that `--layout` takes, without defaults but always with `zero_stage`."""
        shown_fields = [
            f for f in fields(self) if f.name == "zero_stage" or getattr(self, f.name) != f.default
        ]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in shown_fields)


def select_used_axes(layout: Layout, *axes: str) -> tuple[str, ...]:
    """Return those of `axes` that have more than one rank."""
    return tuple(axis for axis in axes if layout.degree(axis) > 1)


def resolve_layout(section: LayoutSection, world_size: int) -> Layout:
    """Fill in the degrees that were left out.

    Args:
        section: the recipe's `layout` section, with `--layout` applied.
        world_size: number of ranks of the run.

    Raises:
        LayoutError: the degrees do not multiply to `world_size`; shows the arithmetic.

    >>> str(resolve_layout(LayoutSection(zero_stage=0), 4))
    'dp_replicate=4,zero_stage=0'
    """
    if section.auto:
        raise LayoutError(
            "this verb cannot resolve `layout: auto`",
            field="layout",
            got="auto",
            remedy="Set the degrees (--layout), or let `shardwright plan` choose them; "
            "`train` chooses for its own devices",
        )
    if world_size < 1:
        raise LayoutError("at least one rank is required", field="nproc", got=world_size)
    model_degree = section.tp * section.pp * section.cp
    if world_size % model_degree:
        raise LayoutError(
            f"tp x pp x cp = {section.tp} x {section.pp} x {section.cp} = {model_degree} does not "
            f"divide {world_size} ranks",
            field="layout",
            remedy=f"Start a multiple of {model_degree} ranks, or lower tp, pp or cp",
        )
    replicate, shard = _resolve_data_degrees(section, world_size, model_degree)
    stage = section.zero_stage
    if stage is None:
        stage = 3 if shard * section.cp > 1 else 0
    fsdp = shard * section.cp
    if fsdp % section.ep:
        raise LayoutError(
            f"ep = {section.ep} does not divide dp_shard x cp = {shard} x {section.cp} = {fsdp}",
            field="layout.ep",
            got=section.ep,
            allowed=f"a divisor of {fsdp}",
            remedy=f"The nearest that works is ep={_find_nearest_divisor(fsdp, section.ep)}",
        )
    _check_expert_dispatch(section)
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        tp=section.tp,
        pp=section.pp,
        cp=section.cp,
        ep=section.ep,
        zero_stage=stage,
        sequence_parallel=section.sequence_parallel,
        async_tensor_parallel=section.async_tensor_parallel,
        expert_dispatch="whole" if section.ep == 1 else section.expert_dispatch,
        expert_row_limit=section.expert_row_limit,
        cp_method=section.cp_method,
        cp_split=section.cp_split,
        schedule=section.schedule,
        virtual_stages=section.virtual_stages,
        wrap_blocks=section.wrap_blocks,
        prefetch_depth=section.prefetch_depth,
        max_gathers_in_flight=section.max_gathers_in_flight,
        bucket_size_bytes=section.bucket_size_bytes,
    )


def _check_expert_dispatch(section: LayoutSection) -> None:
    if section.expert_dispatch not in ("whole", "auto") and section.ep == 1:
        raise LayoutError(
            "without expert parallelism (ep 1) no rows are sent to experts",
            field="layout.expert_dispatch",
            got=section.expert_dispatch,
            allowed="whole, auto",
            remedy="Remove it, or set ep",
        )
    if section.expert_dispatch == "deep_ep" and section.ep not in _DEEP_EP_RANKS:
        raise LayoutError(
            "DeepEP's kernels for the GPUs of one node serve certain numbers of ranks",
            field="layout.ep",
            got=section.ep,
            allowed=", ".join(map(str, _DEEP_EP_RANKS)),
            remedy="Change ep, or use expert_dispatch: once_per_rank",
        )
    has_limit = section.expert_row_limit != LayoutSection.model_fields["expert_row_limit"].default
    if has_limit and section.expert_dispatch != "padded":
        raise LayoutError(
            f"expert_dispatch {section.expert_dispatch} has no limit of rows",
            field="layout.expert_row_limit",
            got=section.expert_row_limit,
            remedy="Remove it, or set layout.expert_dispatch: padded",
        )


def _resolve_data_degrees(
    section: LayoutSection, world_size: int, model_degree: int
) -> tuple[int, int]:
    """Return dp_replicate and dp_shard, which divide the ranks left by tp x pp x cp.

    Raises:
        LayoutError: the product does not match, or zero_stage 0 is combined with dp_shard.
    """
    remaining = world_size // model_degree
    replicate = section.dp_replicate
    shard = section.dp_shard
    if section.zero_stage == 0:
        if (shard or 1) > 1:
            raise LayoutError(
                "zero_stage 0 shards nothing",
                field="layout.dp_shard",
                got=shard,
                allowed="1",
                remedy="Use dp_replicate for plain data parallelism, or zero_stage 1, 2 or 3",
            )
        shard = 1
    if replicate is None and shard is None:
        replicate = 1  # with zero_stage >= 1 or unset, dp_shard takes all ranks
    if replicate is None:
        assert shard is not None
        replicate = _divide_data_ranks(
            remaining, shard, "dp_replicate", "dp_shard", world_size, model_degree
        )
    elif shard is None:
        shard = _divide_data_ranks(
            remaining, replicate, "dp_shard", "dp_replicate", world_size, model_degree
        )
    assert shard is not None
    if replicate * shard != remaining:
        num_needed = replicate * shard * model_degree
        there_are = "there is" if world_size == 1 else "there are"
        raise LayoutError(
            f"dp_replicate x dp_shard x tp x pp x cp = {replicate} x {shard} x "
            f"{section.tp} x {section.pp} x {section.cp} "
            f"= {num_needed}, but {there_are} {format_items(world_size, 'rank')}",
            field="layout",
            remedy=f"Start {format_items(num_needed, 'rank')} (--nproc), or omit one data "
            "degree: it takes the rest",
        )
    return replicate, shard


def _find_nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` that is nearest to `target`, the smaller one of two.

    >>> _find_nearest_divisor(8, 3), _find_nearest_divisor(2, 3)
    (2, 2)
    """
    return min(
        (d for d in range(1, number + 1) if number % d == 0),
        key=lambda divisor: (abs(divisor - target), divisor),
    )


def _divide_data_ranks(
    remaining: int,
    divisor: int,
    derived_name: str,
    divisor_name: str,
    world_size: int,
    model_degree: int,
) -> int:
    if remaining % divisor:
        raise LayoutError(
            f"{divisor_name} = {divisor} does not divide the {remaining} data ranks "
            f"({world_size} ranks / {model_degree} for tp x pp x cp)",
            field=f"layout.{divisor_name}",
            remedy=f"Choose a divisor of {remaining}; {derived_name} then takes the rest",
        )
    return remaining // divisor
