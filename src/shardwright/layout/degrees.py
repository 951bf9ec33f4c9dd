"""Degrees of parallelism and the rules by which they fit a number of ranks.

world_size = pp x dp_replicate x dp_shard x cp x tp; `ep` borrows ranks of dp_shard x cp. `zero_stage` says what is sharded
over dp_shard x cp: 0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from shardwright.config.layout import LayoutSection
from shardwright.errors import LayoutError

ZeroStage = Literal[0, 1, 2, 3]
CpMethod = Literal["auto", "ring", "all_gather", "ulysses"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: neighbours in tp are neighbours in rank, so the chattiest group sits on the fastest links."""

FSDP_AXES = ("dp_shard", "cp")
"""Axes that ZeRO shards over, as one: `fsdp`, dp_shard major."""

EXPERT_AXES = ("efsdp", "ep")
"""How experts cut the ranks of `fsdp`: neighbours hold different experts, and ZeRO shards each expert over `efsdp`."""


@dataclass(frozen=True)
class Layout:
    """A layout in which every degree is known.

    >>> str(Layout(dp_shard=2, zero_stage=3)), Layout(dp_replicate=2, dp_shard=2, zero_stage=3).world_size
    ('dp_shard=2,zero_stage=3', 4)
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: ZeroStage = 0
    sequence_parallel: bool = True
    cp_method: CpMethod = "auto"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    wrap_blocks: int = 1
    prefetch_depth: int = 1
    max_gathers_in_flight: int = 2
    bucket_size_bytes: int = 25 * 1024**2

    @property
    def world_size(self) -> int:
        """Ranks that the layout takes."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which ZeRO shards what is not an expert."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which ZeRO shards one expert."""
        return self.fsdp // self.ep

    def degree(self, axis: str) -> int:
        """Size of an axis: one of `AXES`, `fsdp`, `efsdp` or `ep`."""
        return int(getattr(self, axis))

    def __str__(self) -> str:
        """As `--layout` takes it; what equals the default is left out, `zero_stage` never is."""
        shown = [f for f in fields(self) if f.name == "zero_stage" or getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in shown)


def resolve_layout(section: LayoutSection, world_size: int) -> Layout:
    """Fill in the degrees that were left out.

    Args:
        section: what the recipe or `--layout` says.
        world_size: number of ranks that will run.

    Raises:
        LayoutError: shows the product that does not come out.

    >>> str(resolve_layout(LayoutSection(zero_stage=0), 4))
    'dp_replicate=4,zero_stage=0'
    """
    if section.auto:
        raise LayoutError(
            "`auto` is not chosen yet",
            field="layout",
            got="auto",
            remedy="Name the degrees (--layout), or ask `shardwright plan` for them; `train` chooses for its own devices",
        )
    if world_size < 1:
        raise LayoutError("at least one rank is needed", field="nproc", got=world_size)
    model_degree = section.tp * section.pp * section.cp
    if world_size % model_degree:
        raise LayoutError(
            f"tp x pp x cp = {section.tp} x {section.pp} x {section.cp} = {model_degree} does not divide {world_size} ranks",
            field="layout",
            remedy=f"Start a multiple of {model_degree} ranks, or lower a degree",
        )
    replicate, shard = _data_degrees(section, world_size, model_degree)
    stage = section.zero_stage
    if stage is None:
        stage = 3 if shard * section.cp > 1 else 0
    if (shard * section.cp) % section.ep:
        raise LayoutError(
            f"ep = {section.ep} does not divide dp_shard x cp = {shard} x {section.cp} = {shard * section.cp}",
            field="layout.ep",
            got=section.ep,
            allowed=f"a divisor of {shard * section.cp}",
            remedy=f"The nearest that works is ep={_nearest_divisor(shard * section.cp, section.ep)}",
        )
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        tp=section.tp,
        pp=section.pp,
        cp=section.cp,
        ep=section.ep,
        zero_stage=stage,
        sequence_parallel=section.sequence_parallel,
        cp_method=section.cp_method,
        schedule=section.schedule,
        virtual_stages=section.virtual_stages,
        wrap_blocks=section.wrap_blocks,
        prefetch_depth=section.prefetch_depth,
        max_gathers_in_flight=section.max_gathers_in_flight,
        bucket_size_bytes=section.bucket_size_bytes,
    )


def _data_degrees(section: LayoutSection, world_size: int, model_degree: int) -> tuple[int, int]:
    """dp_replicate and dp_shard: what tp x pp x cp (`model_degree`) leaves of the ranks, shared between them.

    Raises:
        LayoutError: the product does not come out, or zero_stage 0 is asked to shard.
    """
    remaining = world_size // model_degree
    replicate, shard = section.dp_replicate, section.dp_shard
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
        replicate = 1  # zero_stage >= 1 or unsaid: sharding takes the ranks
    if replicate is None:
        assert shard is not None
        replicate = _share(remaining, shard, "dp_replicate", "dp_shard", world_size, model_degree)
    elif shard is None:
        shard = _share(remaining, replicate, "dp_shard", "dp_replicate", world_size, model_degree)
    assert shard is not None
    if replicate * shard != remaining:
        raise LayoutError(
            f"dp_replicate x dp_shard x tp x pp x cp = {replicate} x {shard} x {section.tp} x {section.pp} x {section.cp} "
            f"= {replicate * shard * model_degree}, but {world_size} ranks run",
            field="layout",
            remedy=f"Start {replicate * shard * model_degree} ranks (--nproc), or leave one data degree out: it takes the rest",
        )
    return replicate, shard


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`; of two the smaller.

    >>> _nearest_divisor(8, 3), _nearest_divisor(2, 3)
    (2, 2)
    """
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda divisor: (abs(divisor - wanted), divisor))


def _share(remaining: int, given: int, wanted: str, other: str, world_size: int, model_degree: int) -> int:
    if remaining % given:
        raise LayoutError(
            f"{other} = {given} does not divide the {remaining} data ranks ({world_size} ranks / {model_degree} for tp x pp x cp)",
            field=f"layout.{other}",
            remedy=f"Choose a divisor of {remaining}; {wanted} then takes the rest",
        )
    return remaining // given
