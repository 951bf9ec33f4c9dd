"""Division of a sequence into consecutive groups of limited size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


def group_by_size(
    items: Iterable[_Item], sizes: Iterable[int], max_size: int
) -> Iterator[list[_Item]]:
    """Yield groups of items in order, of at most `max_size` each; a larger item is alone.

    >>> list(group_by_size("abcde", [2, 2, 1, 9, 1], 4))
    [['a', 'b'], ['c'], ['d'], ['e']]
    """
    group: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if group and total + size > max_size:
            yield group
            group = []
            total = 0
        group.append(item)
        total += size
    if group:
        yield group
