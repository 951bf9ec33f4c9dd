"""Findings: one line of the doctor's report each, with verdict and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]

_VERDICT_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """Result of one check: `value` as text for people, `numbers` in base units for programs.

    `remedy` says what to do, if possible as a command; a finding that does not pass has one.
    """

    section: str
    name: str
    verdict: Verdict
    value: str
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        assert self.verdict == "pass" or self.remedy, (
            f"{self.section}, {self.name}: {self.verdict} without a remedy"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)


def find_worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts; `pass` if there is none.

    >>> find_worst_verdict(["pass", "fail", "warn"]), find_worst_verdict([])
    ('fail', 'pass')
    """
    return max(verdicts, key=_VERDICT_ORDER.index, default="pass")


def grade_share(share: float, *, warn_below: float, fail_below: float) -> Verdict:
    """Grade a share of the expected value; smaller is worse.

    >>> [grade_share(share, warn_below=0.9, fail_below=0.7) for share in (0.95, 0.8, 0.2)]
    ['pass', 'warn', 'fail']
    """
    return "fail" if share < fail_below else "warn" if share < warn_below else "pass"


def format_ranks(ranks: Iterable[int], max_ranges: int = 8) -> str:
    """Format ranks as ranges.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 5]), format_ranks(range(0, 40, 2), max_ranges=3)
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2, 4 and 17 more')
    """
    numbers = sorted(set(ranks))
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    ranges = [str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups]
    text = ", ".join(ranges[:max_ranges])
    if len(ranges) > max_ranges:
        text += f" and {sum(len(group) for group in groups[max_ranges:])} more"
    return ("rank " if len(numbers) == 1 else "ranks ") + text
