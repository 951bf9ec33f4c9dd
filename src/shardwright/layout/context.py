"""Which places of a row each context rank has, and by which method the ranks attend to each other's. No torch.

A row of T tokens is cut into equal chunks. A causal query in the last chunk sees all of the row, one in the first nearly nothing;
so for `ring` and `all_gather` a rank has one chunk from the front and its mirror from the back (zigzag), which makes the ranks'
work equal. For `ulysses` every rank computes whole rows of some heads, and has one chunk of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from shardwright.errors import LayoutError
from shardwright.layout.degrees import Layout

ContextMethod = Literal["ring", "all_gather", "ulysses"]

ULYSSES_RANKS = 8
"""The most ranks of tp x cp, neighbours all, among which `auto` takes the all-to-all: what one node holds nearly everywhere."""


@dataclass(frozen=True)
class ContextChoice:
    """The method that a layout's `cp_method` comes to, and why in one line."""

    method: ContextMethod
    reason: str


def chunks_of(method: ContextMethod, degree: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of the row that each of `degree` ranks has, in its order.

    >>> chunks_of("ring", 2), chunks_of("ulysses", 2)
    (((0, 3), (1, 2)), ((0,), (1,)))
    """
    if method == "ulysses":
        return tuple((rank,) for rank in range(degree))
    return tuple((rank, 2 * degree - 1 - rank) for rank in range(degree))


def num_chunks(method: ContextMethod, degree: int) -> int:
    """Equal chunks that the row is cut into."""
    return degree if method == "ulysses" else 2 * degree


def choose_context_method(
    layout: Layout, *, num_heads: int, num_kv_heads: int, windows: tuple[int | None, ...], sequence_length: int
) -> ContextChoice:
    """What `cp_method` comes to for a model; the same for planner and engine, since it asks for nothing but layout and shape.

    Args:
        windows: of each layer, in tokens; None for a layer that sees everything.
        sequence_length: tokens of a row.
    """
    if layout.cp_method != "auto":
        return ContextChoice(layout.cp_method, "as asked for (layout.cp_method)")
    cp, ranks = layout.cp, layout.tp * layout.cp
    refusal = _refuse_heads(layout, num_heads, num_kv_heads)
    if refusal is None and num_kv_heads >= ranks <= ULYSSES_RANKS:
        return ContextChoice("ulysses", f"heads divide by {cp}, and the {ranks} ranks of tp x cp sit in one node")
    why_not = f"{ranks} ranks of tp x cp may not sit in one node" if ranks > ULYSSES_RANKS else f"heads do not divide by {cp}"
    chunk = sequence_length // (2 * cp)
    narrow = sum(window is not None and window <= chunk for window in windows)
    if 2 * narrow > len(windows):
        shown = f"most layers' windows are within a chunk of {chunk} tokens: a ring's passes would have no work to hide behind"
        return ContextChoice("all_gather", f"{why_not}; {shown}")
    return ContextChoice("ring", f"{why_not}; passes hide behind attention")


def check_context(
    layout: Layout, *, num_heads: int, num_kv_heads: int, windows: tuple[int | None, ...], sequence_length: int
) -> ContextChoice:
    """The method, after refusing what it cannot cut.

    Raises:
        LayoutError: heads or tokens that do not divide, with the numbers and the nearest that works.
    """
    choice = choose_context_method(
        layout, num_heads=num_heads, num_kv_heads=num_kv_heads, windows=windows, sequence_length=sequence_length
    )
    if layout.cp == 1:
        return choice
    if choice.method == "ulysses":
        refusal = _refuse_heads(layout, num_heads, num_kv_heads)
        if refusal is not None:
            smaller = range(min(layout.cp - 1, num_heads // layout.tp), 0, -1)
            nearest = next(cp for cp in smaller if _refuse_heads(replace(layout, cp=cp), num_heads, num_kv_heads) is None)
            raise LayoutError(
                refusal,
                field="layout.cp",
                got=layout.cp,
                remedy=f"The nearest degree that works is {nearest}; cp_method ring and all_gather cut no heads",
            )
    check_row(choice.method, layout, sequence_length)
    return choice


def check_row(method: ContextMethod, layout: Layout, num_tokens: int) -> None:
    """Refuse a row that does not come apart into equal chunks (of equal shares, under sequence parallelism).

    Raises:
        LayoutError: the numbers, and the nearest lengths that work.
    """
    parts, shown = num_chunks(method, layout.cp), "cp" if method == "ulysses" else "2 x cp"
    if layout.tp > 1 and layout.sequence_parallel:
        parts, shown = lcm(parts, layout.cp * layout.tp), f"{shown}, and by cp x tp under sequence parallelism: by"
    if num_tokens % parts == 0 and num_tokens > 0:
        return
    below, above = num_tokens // parts * parts, -(-max(num_tokens, 1) // parts) * parts
    raise LayoutError(
        f"{method} cuts a row into equal chunks, and {num_tokens} tokens do not divide by {shown} = {parts}",
        field="training.sequence_length",
        got=num_tokens,
        allowed=f"a multiple of {parts}",
        remedy=f"The nearest that works is {below or above}" + (f" or {above}" if below else ""),
    )


def _refuse_heads(layout: Layout, num_heads: int, num_kv_heads: int) -> str | None:
    """Why the all-to-all cannot cut a tensor-parallel rank's heads; None where it can."""
    held, held_kv = num_heads // layout.tp, max(1, num_kv_heads // layout.tp)
    each = "" if layout.tp == 1 else f" (of each of {layout.tp} tensor-parallel ranks)"
    if held % layout.cp:
        return f"ulysses cuts heads, and {held} heads{each} do not divide by {layout.cp} context ranks"
    if held_kv % layout.cp and layout.cp % held_kv:
        return f"ulysses cannot share {held_kv} key-value heads{each} evenly among {layout.cp} context ranks"
    return None
