"""One line of the doctor's answer: what was looked at, the verdict, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """A check and its answer. `value` is what was found, for people; `numbers` the same for programs, in base units.

    `remedy` says what to do, as a command where there is one; a finding that does not pass always has it.
    """

    section: str
    name: str
    verdict: Verdict
    value: str
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        assert self.verdict == "pass" or self.remedy, f"{self.section}, {self.name}: {self.verdict} without a remedy"

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some verdicts; `pass` of none.

    >>> worst(["pass", "fail", "warn"]), worst([])
    ('fail', 'pass')
    """
    return max(verdicts, key=_ORDER.index, default="pass")


def graded(share: float, *, warn: float, fail: float) -> Verdict:
    """The verdict on a share of what should be, where less is worse.

    >>> graded(0.95, warn=0.9, fail=0.7), graded(0.8, warn=0.9, fail=0.7), graded(0.2, warn=0.9, fail=0.7)
    ('pass', 'warn', 'fail')
    """
    return "fail" if share < fail else "warn" if share < warn else "pass"


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """Ranks as a person lists them.

    >>> name_ranks([3]), name_ranks([0, 1, 2, 5]), name_ranks(range(0, 40, 2), most=3)
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2, 4 and 17 more')
    """
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = ", ".join(words[:most])
    if len(words) > most:
        shown += f" and {sum(len(run) for run in runs[most:])} more"
    return ("rank " if len(numbers) == 1 else "ranks ") + shown
