"""Restarts after failures: causes, limits and world sizes, with simulated launches."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.config import Recipe
from shardwright.errors import (
    GenerationEnded,
    InputError,
    NonFiniteError,
    Preempted,
    RankFailed,
    RecipeError,
    RunFailed,
    SaveFailed,
    ShardwrightError,
)
from shardwright.launch.elastic import (
    LaunchAttempt,
    Restart,
    find_smaller_world_size,
    run_with_restarts,
)
from shardwright.launch.rank_outcome import RESUME_ADVICE
from shardwright.launch.stop_signals import StopRequest
from shardwright.training.run import train
from tests.unit.training.finished import CONFIG


def build_recipe(folder: Path, *, layout: dict[str, Any] | None = None, **elastic: int) -> Recipe:
    training = {
        "sequence_length": 8,
        "global_batch_size": 12,
        "micro_batch_size": 1,
        "max_steps": 2,
        "learning_rate": 1e-3,
    }
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "data": {"sources": "unread"},
            "precision": "fp32",
            "training": training,
            "layout": layout or {},
            "elastic": elastic,
            "run": {"dir": str(folder)},
        }
    )


def test_warm_restarts_need_restarts_and_our_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="`warm_restarts` is for restarts"):
        build_recipe(tmp_path, warm_restarts=True)
    recipe = build_recipe(tmp_path, warm_restarts=True, max_restarts=1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InputError, match=r"elastic\.warm_restarts") as error:
        train(recipe)
    assert "let the launcher start one process per node, with --nproc" in str(error.value.remedy)


def test_a_restart_is_passed_to_the_ranks_as_text() -> None:
    restart = Restart(1, 3, 4, "rank 1 was killed", True, (0, 2), (3,), 12.5, 6, 100)
    assert Restart.from_json(restart.to_json()) == restart
    assert not restart.is_growth
    assert Restart(1, 3, 4, "", former_world_size=2).is_growth


class Launches:
    """Simulated launches that end as listed.

    An int is the step of a checkpoint that the launch saves before the end that follows.
    """

    def __init__(self, folder: Path, *ends: ShardwrightError | int | None) -> None:
        self.folder = folder / "checkpoints"
        self.ends = list(ends)
        self.attempts = list[LaunchAttempt]()

    def __call__(self, generation: LaunchAttempt) -> None:
        self.attempts.append(generation)
        end = self.ends.pop(0)
        if isinstance(end, int):
            self.folder.mkdir(exist_ok=True)
            (self.folder / "latest").write_text(f"step-{end:08d}\n")
            end = self.ends.pop(0)
            assert not isinstance(end, int)
        if end is not None:
            raise end


def test_a_lost_rank_causes_a_counted_restart(tmp_path: Path) -> None:
    launches = Launches(
        tmp_path,
        RankFailed("rank 1 died\nlong story"),
        4,
        RankFailed(f"rank 0 died{RESUME_ADVICE}"),
        None,
    )
    run_with_restarts(build_recipe(tmp_path, max_restarts=2), 4, launches, StopRequest())
    assert launches.attempts == [
        LaunchAttempt(0, 4),
        LaunchAttempt(1, 4, "rank 1 died"),
        LaunchAttempt(2, 4, "rank 0 died"),
    ]
    launches = Launches(tmp_path, *(RankFailed(f"{number}") for number in range(3)))
    with pytest.raises(RankFailed, match="2"):
        run_with_restarts(build_recipe(tmp_path, max_restarts=2), 4, launches, StopRequest())


def test_without_the_section_there_is_no_restart(tmp_path: Path) -> None:
    launches = Launches(tmp_path, RankFailed("rank 1 died"))
    with pytest.raises(RankFailed):
        run_with_restarts(build_recipe(tmp_path), 2, launches, StopRequest())


@pytest.mark.parametrize(
    "end", [NonFiniteError("nan"), SaveFailed("full"), Preempted("stop"), RecipeError("wrong")]
)
def test_failures_that_would_repeat_cause_no_restart(tmp_path: Path, end: ShardwrightError) -> None:
    with pytest.raises(type(end)):
        run_with_restarts(
            build_recipe(tmp_path, max_restarts=9), 2, Launches(tmp_path, end), StopRequest()
        )


def test_a_stop_request_prevents_a_restart_after_a_failure(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.record(signal.SIGTERM)
    with pytest.raises(RunFailed):
        run_with_restarts(
            build_recipe(tmp_path, max_restarts=9), 2, Launches(tmp_path, RunFailed("broke")), stop
        )


def test_the_world_shrinks_only_if_no_checkpoint_was_saved_since(tmp_path: Path) -> None:
    died = RankFailed("died")
    launches = Launches(tmp_path, 2, died, died, 4, died, None)
    run_with_restarts(
        build_recipe(tmp_path, max_restarts=5, min_ranks=2), 6, launches, StopRequest()
    )
    assert [generation.world_size for generation in launches.attempts] == [
        6,
        6,
        4,
        4,
    ]  # 5 ranks do not divide 12 sequences


def test_the_world_keeps_its_size_while_steps_are_finished(tmp_path: Path) -> None:
    """With copies in memory a generation without a checkpoint may still have made progress."""
    died = RankFailed("died")
    launches = Launches(tmp_path, died, died, None)
    newest_steps = [0, 7, 7, 7, 7]  # before and after each generation
    run_with_restarts(
        build_recipe(tmp_path, max_restarts=5, min_ranks=2),
        6,
        launches,
        StopRequest(),
        lambda: newest_steps.pop(0),
    )
    assert [generation.world_size for generation in launches.attempts] == [6, 6, 4]


def test_a_smaller_world_grows_again_after_some_steps(tmp_path: Path) -> None:
    """Attempts of the first size that make no progress return to the size before, each time for
    twice as many steps. A growth is no restart.
    """
    died = RankFailed("died")
    left = GenerationEnded(9)
    recipe = build_recipe(tmp_path, max_restarts=4, min_ranks=2, grow_after_steps=3)
    launches = Launches(tmp_path, died, 2, left, InputError("no such device"), 4, left, died, None)
    run_with_restarts(recipe, 6, launches, StopRequest())
    assert launches.attempts == [
        LaunchAttempt(0, 6),
        LaunchAttempt(1, 4, "died", 6, 3),
        LaunchAttempt(1, 6, "", 4),
        LaunchAttempt(2, 4, "no such device", 6, 6),
        LaunchAttempt(2, 6, "", 4),
        LaunchAttempt(3, 4, "died", 6, 12),
    ]


def test_a_larger_world_with_progress_stays(tmp_path: Path) -> None:
    died = RankFailed("died")
    recipe = build_recipe(tmp_path, max_restarts=4, min_ranks=2, grow_after_steps=3)
    launches = Launches(tmp_path, died, GenerationEnded(9), 2, died, died, None)
    run_with_restarts(recipe, 6, launches, StopRequest())
    assert [attempt.world_size for attempt in launches.attempts] == [6, 4, 6, 6, 4]
    # The last one has waited no longer: the growth before it has not failed.
    assert launches.attempts[-1].leave_after_steps == 3


def test_steps_of_the_smaller_world_are_no_progress_of_the_larger(tmp_path: Path) -> None:
    """The larger world reaches the step at which the smaller one has left, and no further. So the
    smaller one continues, not one of a size in between.
    """
    died = RankFailed("died")
    recipe = build_recipe(tmp_path, max_restarts=4, min_ranks=2, grow_after_steps=3)
    launches = Launches(tmp_path, died, died, GenerationEnded(7), died, None)
    # Before and after each launch. The launcher learns the step of ranks that left from them.
    newest_steps = [0, 0, 0, 0, 0, 0, 7, 7]
    run_with_restarts(recipe, 6, launches, StopRequest(), lambda: newest_steps.pop(0))
    assert [attempt.world_size for attempt in launches.attempts] == [6, 4, 3, 6, 3]


def test_after_a_stop_the_same_ranks_save_their_state(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, max_restarts=4, min_ranks=2, grow_after_steps=3)
    stop = StopRequest()
    attempts = []

    def launch(attempt: LaunchAttempt) -> None:
        attempts.append(attempt)
        if len(attempts) == 1:
            raise RankFailed("died")
        if len(attempts) == 2:
            stop.record(signal.SIGTERM)
            raise GenerationEnded(9)
        raise Preempted("saved")

    with pytest.raises(Preempted):
        run_with_restarts(recipe, 6, launch, stop)
    last = attempts[-1]
    assert (last.world_size, last.former_world_size, last.leave_after_steps) == (4, None, None)
    assert last.restart_reason == "a stop was requested while more ranks were about to start"


def test_only_as_many_ranks_start_as_the_nodes_can_run(tmp_path: Path) -> None:
    """Six ranks on three nodes; one is lost, then another, and both are back in the end."""
    died = RankFailed("died")
    recipe = build_recipe(tmp_path, max_restarts=9, min_ranks=2, grow_after_steps=3)
    ends = [died, died, GenerationEnded(3), GenerationEnded(9), None]
    launches = Launches(tmp_path, *ends)
    slots_after_launch = {1: 3, 2: 2, 3: 2, 4: 6}
    run_with_restarts(
        recipe,
        6,
        launches,
        StopRequest(),
        find_smaller=lambda size: size - 1 or None,
        count_slots=lambda: slots_after_launch[len(launches.attempts)],
    )
    sizes = [(attempt.world_size, attempt.leave_after_steps) for attempt in launches.attempts]
    assert sizes == [(6, None), (3, 3), (2, 3), (2, 6), (6, None)]
    assert launches.attempts[3].restart_reason == (
        "too few nodes were connected while more ranks were about to start"
    )


def test_growth_needs_smaller_worlds(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="`grow_after_steps` is for runs that continue"):
        build_recipe(tmp_path, max_restarts=1, grow_after_steps=3)


def test_a_smaller_world_preserves_layout_and_global_batch(tmp_path: Path) -> None:
    assert find_smaller_world_size(build_recipe(tmp_path, max_restarts=1, min_ranks=1), 4) == 3
    assert find_smaller_world_size(build_recipe(tmp_path, max_restarts=1, min_ranks=4), 4) is None
    assert find_smaller_world_size(build_recipe(tmp_path, max_restarts=1), 4) is None
    assert (
        find_smaller_world_size(
            build_recipe(tmp_path, max_restarts=1, min_ranks=1, layout={"tp": 2}), 4
        )
        == 2
    )
    fixed = {"dp_replicate": 1, "dp_shard": 4, "zero_stage": 3}
    assert (
        find_smaller_world_size(
            build_recipe(tmp_path, max_restarts=1, min_ranks=1, layout=fixed), 4
        )
        is None
    )
