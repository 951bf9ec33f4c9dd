"""Text form of schedules, as PyTorch's: a row per rank, comma-separated cells such as `2F0`.

An empty cell is a pause and has no effect: when an action runs follows from its dependencies.
`#` begins a comment. Reads the compute actions that PyTorch's pipelining writes; a pair that
PyTorch overlaps, `(1F2;0B1)OVERLAP_F_B`, is read as one after the other. Sends, receives,
unshards and reductions follow from the order, so cells that contain them are refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.errors import ScheduleError
from shardwright.files import read_text
from shardwright.schedule.actions import ACTION_KINDS, Action, Schedule

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def write_schedule(schedule: Schedule) -> str:
    """Format a schedule as `read_schedule` reads it.

    >>> write_schedule(Schedule("by hand", ((Action("F", 0, 0), Action("B", 0, 0)),)))
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file, named after it; only its form is checked (see `check`).

    Raises:
        ScheduleError: an unreadable or empty file, or an invalid cell; names line and cell.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ScheduleError(f"cannot read {path}: {problem}", field="schedule") from error
    return parse_schedule(text, path.name)


def parse_schedule(text: str, name: str) -> Schedule:
    """Parse a schedule from text; `name` is its name, also in errors.

    >>> str(parse_schedule("0F0, 0B0\\n1F0, 1B0", "two"))
    'two: 2 ranks, 2 stages, 1 micro-batch'
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = line.partition("#")[0].strip()
        if row:
            cells = enumerate(row.split(","), start=1)
            rows.append(
                tuple(
                    action
                    for column, cell in cells
                    for action in _read_cell(cell.strip(), name, number, column)
                )
            )
    schedule = Schedule(name, tuple(rows))
    if schedule.num_stages == 0:
        raise ScheduleError(
            f"{name} contains no action",
            field="schedule",
            remedy="Write a row per rank, such as 0F0,0F1,0B0,0B1",
        )
    return schedule


def _read_cell(cell: str, name: str, line: int, column: int) -> list[Action]:
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        return [
            action
            for part in pair[1].split(";")
            for action in _read_cell(part.strip(), name, line, column)
        ]
    if match := _CELL.fullmatch(cell):
        kind = next(known for known in ACTION_KINDS if known == match[2])
        return [Action(kind, int(match[1]), int(match[3]))]
    communication = _COMMUNICATION.fullmatch(cell)
    raise ScheduleError(
        f"line {line}, cell {column} of {name} "
        + (
            "is communication, which follows from the order of the compute actions"
            if communication
            else "is not an action"
        ),
        field="schedule",
        got=repr(cell),
        allowed="stage, one of F B I W, micro-batch: 2F0",
        remedy="Keep only F, B, I and W actions" if communication else None,
    )
