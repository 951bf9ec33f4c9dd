"""One descriptor per parameter. Reduction, clip, checkpoint and hash read it; nothing else decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Tensor dimension `dim` is cut over mesh axis `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies over the ranks.

    `copy_axes` hold equal values (count once in a norm, write once in a checkpoint); the gradient is the sum over
    `sum_axes`, and is divided by nothing: the loss already carries the one normaliser.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    copy_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Mesh axes over which it is cut."""
        return tuple(shard.axis for shard in self.shards)
