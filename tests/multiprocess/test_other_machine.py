"""The demo, shortened, on an emulated CPU that has AVX2 only and no bf16 units."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from recipes.demo import MIN_STEPS

from shardwright.telemetry.event_log import (
    EvaluationEvent,
    RunStartedEvent,
    StepEvent,
    read_events,
    select_surviving,
)
from tests import forked
from tests.unit.numerics.test_bf16 import OTHER_MACHINE

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.config.hidden_size=48",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "tokenizer.vocab_size=300",
    "training.sequence_length=32",
)
# The last two are set by the demo, and commands are forked if they have the variables of the fork.
ENVIRONMENT = {
    **OTHER_MACHINE,
    "PYTHONWARNINGS": "ignore",
    "PYTHON_STDLIB": sysconfig.get_path("stdlib"),
}
FORKING = """
import sys
from types import SimpleNamespace
from recipes import demo
from tests import forked
assert sys.platform != "linux" or "torch" in sys.modules, "the demo is not forked"
def leave_out(start):
    return lambda words, preexec_fn, **options: start(words, **options)
demo.subprocess = SimpleNamespace(run=leave_out(forked.run), Popen=leave_out(forked.Popen))
sys.exit(demo.main())
"""
"""The demo, whose commands are forked: nothing can run between a fork and its program."""


@pytest.mark.timeout(900)
def test_the_demo_reports_its_shortening_and_completes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run = tmp_path / "run"
    source.mkdir()
    for path in sorted((ROOT / "src" / "shardwright" / "config").glob("*.py")):
        (source / path.name).write_text(path.read_text())
    settings = [*SMALL, f"data.sources.path={source}", f"data.cache_dir={tmp_path / 'cache'}"]
    words = [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | ENVIRONMENT
    with forked.serve_environment(environment):
        done = forked.run(
            [sys.executable, "-c", FORKING, "--run-dir", str(run), "--seconds", "1", *words],
            env=environment, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        rf"=== shortened from 800 to {MIN_STEPS} steps, because a step takes [\d.]+ s here",
        done.stdout,
    )
    events = select_surviving(read_events(run))
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(
        range(1, MIN_STEPS + 1)
    )
    assert all(
        event.mfu is not None and 0.0 < event.mfu <= 1.0
        for event in events
        if isinstance(event, StepEvent)
    )
    assert len([event for event in events if isinstance(event, EvaluationEvent)]) == 8
    first, resumed = (event.plan for event in events if isinstance(event, RunStartedEvent))
    assert first["precision"]["kind"] == resumed["precision"]["kind"] == "fp32"
    assert first["precision_reason"].startswith("bf16 is emulated on this CPU")
    assert resumed["precision_reason"] == "the run was started in it"
    assert not (tmp_path / "run-pace").exists()
