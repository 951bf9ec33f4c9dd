"""Where each parameter of a layout lies: which slice a rank holds, who holds copies, over whom its gradient is summed."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.errors import LayoutError
from shardwright.layout.degrees import Layout
from shardwright.layout.parameters import ParameterLayout, Shard

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens: gradients, losses and token counts are summed over them."""

_NOT_BUILT = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}


def check_supported(layout: Layout) -> None:
    """Refuse the degrees that this version cannot execute.

    Raises:
        LayoutError: names the first degree above 1 among tp, pp, cp and ep.
    """
    for axis, what in _NOT_BUILT.items():
        if layout.degree(axis) > 1:
            raise LayoutError(
                f"{what} is not built yet",
                field=f"layout.{axis}",
                got=layout.degree(axis),
                allowed="1",
                remedy="Use the data degrees: dp_replicate, dp_shard and zero_stage",
            )


def place_parameter(name: str, shape: tuple[int, ...], layout: Layout) -> ParameterLayout:
    """The one descriptor of a parameter under a layout.

    ZeRO cuts dimension 0 over the sharding axes; every other axis of a degree above 1 holds copies. Axes of degree 1 are not
    listed: nothing is cut, copied or summed over them.

    >>> place_parameter("w", (5, 3), Layout(dp_replicate=2, dp_shard=2, zero_stage=3))
    ParameterLayout(name='w', shape=(5, 3), shards=(Shard(axis='dp_shard', dim=0),), copy_axes=('dp_replicate',), \
sum_axes=('dp_replicate', 'dp_shard'))
    """
    cut = tuple(axis for axis in layout.shard_axes if layout.degree(axis) > 1)
    summed = tuple(axis for axis in DATA_AXES if layout.degree(axis) > 1)
    return ParameterLayout(
        name=name,
        shape=shape,
        shards=tuple(Shard(axis, 0) for axis in cut),
        copy_axes=tuple(axis for axis in summed if axis not in cut),
        sum_axes=summed,
    )


def local_slice(parameter: ParameterLayout, layout: Layout, coordinates: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """(start, length) per dimension of the slice that the rank at `coordinates` holds.

    Slices are torch.chunk's: all of the size ceil(n / degree) but the last ones, which may be shorter or empty.

    >>> layout = Layout(dp_shard=4, zero_stage=3)
    >>> [local_slice(place_parameter("w", (5, 3), layout), layout, {"dp_shard": rank}) for rank in range(4)]
    [((0, 2), (0, 3)), ((2, 2), (0, 3)), ((4, 1), (0, 3)), ((5, 0), (0, 3))]
    """
    bounds = [(0, size) for size in parameter.shape]
    for shard in parameter.shards:
        start, length = bounds[shard.dim]
        chunk = -(-length // layout.degree(shard.axis))
        offset = min(coordinates[shard.axis] * chunk, length)
        bounds[shard.dim] = (start + offset, min(chunk, length - offset))
    return tuple(bounds)
