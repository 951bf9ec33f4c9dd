"""Prometheus text: its format and values."""

from __future__ import annotations

import math
import re

from shardwright.telemetry.event_log import ResumeEvent
from shardwright.telemetry.prometheus import format_metrics
from tests.unit.telemetry.samples import make_ranks_event, make_start_event, make_step_event
from tests.unit.telemetry.test_event_log import ONE_OF_EACH

TEXT = r'"(?:[^"\\\n]|\\.)*"'
LINE = re.compile(
    rf"shardwright_[a-z_0-9]+\{{run={TEXT}(?:,[a-z]+={TEXT})*\}} "
    r"(?:NaN|[+-]Inf|-?[\d.]+(?:e[+-]\d+)?)"
)


def test_every_line_has_the_format_and_every_metric_occurs_once() -> None:
    name = 'odd "name"\\\n'
    text = format_metrics(
        [
            (name, ONE_OF_EACH),
            ("other", [make_step_event(1, loss=math.nan, gradient_norm=math.inf)]),
        ]
    )
    lines = text.splitlines()
    assert text.endswith("\n")
    for line in lines:
        assert line.startswith(("# HELP shardwright_", "# TYPE shardwright_")) or LINE.fullmatch(
            line
        ), line
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert 'shardwright_train_loss{run="other"} NaN' in lines
    assert 'shardwright_train_gradient_norm{run="other"} +Inf' in lines


def test_metrics_have_the_newest_surviving_values() -> None:
    events = [
        make_start_event(),
        *(make_step_event(i, loss=float(i)) for i in (1, 2, 3)),
        make_ranks_event(3),
        ResumeEvent(step=1, path="a"),
    ]
    text = format_metrics(
        [
            (
                "a",
                [
                    *events,
                    make_step_event(2, loss=9.0),
                    make_ranks_event(2, own_seconds=(0.1, 0.2)),
                ],
            )
        ]
    )
    for line in ("step", "train_loss"):
        assert f'shardwright_{line}{{run="a"}} {2 if line == "step" else 9}\n' in text
    assert 'shardwright_rank_own_seconds{run="a",rank="1"} 0.2' in text
    assert 'shardwright_rank_wait_seconds{run="a",rank="0",cut="data"} 0.15' in text
    assert 'shardwright_memory_bytes{run="a",rank="1"} 200' in text
    assert 'shardwright_resumes{run="a"} 1' in text
    assert format_metrics([]) == format_metrics([("a", [])]) == ""
