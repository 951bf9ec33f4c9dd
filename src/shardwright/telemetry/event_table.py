"""Events of one kind as a table: named columns of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwright.errors import InputError, suggest_name
from shardwright.telemetry.event_encoding import get_event_type
from shardwright.telemetry.event_types import Event

_MAX_SHOWN_ROWS = 10
_MAX_CELL_CHARACTERS = 24


@dataclass(frozen=True, repr=False)
class EventTable:
    """Events of one kind, in file order.

    `columns` maps a field's name to its values, one per event; None where an event lacks the
    field. `pandas.DataFrame(table.columns)` takes it as it is.
    """

    kind: str
    columns: Mapping[str, tuple[Any, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        if name not in self.columns:
            raise InputError(
                "no such column",
                field=f"{self.kind} events",
                got=name,
                allowed=", ".join(self.columns),
                remedy=suggest_name(name, self.columns),
            )
        return self.columns[name]

    def iterate_rows(self) -> Iterator[dict[str, Any]]:
        """Yield each event as a dict of its fields, without those that it lacks."""
        for values in zip(*self.columns.values(), strict=True):
            row = dict(zip(self.columns, values, strict=True))
            yield {name: value for name, value in row.items() if value is not None}

    def __repr__(self) -> str:
        names = [
            name for name, values in self.columns.items() if any(v is not None for v in values)
        ]
        half = _MAX_SHOWN_ROWS // 2
        count = len(self)
        is_shortened = count > _MAX_SHOWN_ROWS
        shown = [*range(half), *range(count - half, count)] if is_shortened else [*range(count)]
        rows = [names, *([_format_cell(self.columns[n][i]) for n in names] for i in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        if is_shortened:
            lines.insert(1 + half, "...")
        return "\n".join([f"{self.kind} events: {count}", *lines])


def build_event_table(events: Iterable[Event], kind: str) -> EventTable:
    """Build the table of all events of one kind.

    Raises:
        InputError: unknown kind.

    >>> from shardwright.telemetry.event_types import WarningEvent
    >>> build_event_table([WarningEvent(step=3, message="slow disk")], "warning")
    warning events: 1
    step  time  elapsed_seconds    message
       3     0                0  slow disk
    """
    names = [field.name for field in fields(get_event_type(kind))]
    selected = [event for event in events if event.kind == kind]
    return EventTable(
        kind, {name: tuple(getattr(event, name) for event in selected) for name in names}
    )


def _format_cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    is_long = len(text) > _MAX_CELL_CHARACTERS
    return f"{text[: _MAX_CELL_CHARACTERS - 3]}..." if is_long else text
