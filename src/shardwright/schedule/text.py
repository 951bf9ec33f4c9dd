"""Schedules as text, in PyTorch's form: comma-separated, a row per rank, cells such as `2F0`, `1B3`, `1I3`, `0W2`.

An empty cell is a pause and says nothing: when an action runs follows from what it waits for. `#` begins a remark.
Reads what PyTorch's pipelining writes for compute actions; a pair that PyTorch overlaps, `(1F2;0B1)OVERLAP_F_B`, is read as one
after the other. Sends, receives, unshards and reductions follow from the order, so cells that name them are refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.errors import ScheduleError
from shardwright.files import read_text
from shardwright.schedule.actions import KINDS, Action, Schedule

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def write_schedule(schedule: Schedule) -> str:
    """The schedule as `read_schedule` takes it.

    >>> write_schedule(Schedule("by hand", ((Action("F", 0, 0), Action("B", 0, 0)),)))
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def read_schedule(path: Path) -> Schedule:
    """A schedule from a file, named after it. It is not checked here but for its form: see `check`.

    Raises:
        ScheduleError: a file that cannot be read or holds nothing, or a cell that is none; names line and cell.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "is no text"
        raise ScheduleError(f"cannot read {path}: {problem}", field="schedule") from error
    return parse_schedule(text, path.name)


def parse_schedule(text: str, name: str) -> Schedule:
    """A schedule from text; `name` is what it is called, in errors too.

    >>> str(parse_schedule("0F0, 0B0\\n1F0, 1B0", "two"))
    'two: 2 ranks, 2 stages, 1 micro-batch'
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        told = line.partition("#")[0].strip()
        if told:
            cells = enumerate(told.split(","), start=1)
            rows.append(tuple(action for column, cell in cells for action in _read_cell(cell.strip(), name, number, column)))
    schedule = Schedule(name, tuple(rows))
    if schedule.num_stages == 0:
        raise ScheduleError(f"{name} holds no action", field="schedule", remedy="Write a row per rank, such as 0F0,0F1,0B0,0B1")
    return schedule


def _read_cell(cell: str, name: str, line: int, column: int) -> list[Action]:
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        return [action for part in pair[1].split(";") for action in _read_cell(part.strip(), name, line, column)]
    if found := _CELL.fullmatch(cell):
        kind = next(known for known in KINDS if known == found[2])
        return [Action(kind, int(found[1]), int(found[3]))]
    derived = _DERIVED.fullmatch(cell)
    raise ScheduleError(
        f"line {line}, cell {column} of {name} "
        + ("is communication, which follows from the order of the compute actions" if derived else "is no action"),
        field="schedule",
        got=repr(cell),
        allowed="stage, one of F B I W, micro-batch: 2F0",
        remedy="Leave out all but F, B, I and W" if derived else None,
    )
