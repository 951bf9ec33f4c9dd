"""Outcomes of ranks: one cause is reported for any combination."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shardwright.errors import (
    DataError,
    ExitCode,
    GenerationEnded,
    NonFiniteError,
    OutOfMemory,
    Preempted,
    RankFailed,
    RunFailed,
)
from shardwright.launch.rank_outcome import (
    CONTROL_VARIABLE,
    RankOutcome,
    find_cause,
    read_outcomes,
    request_stop,
    write_outcome,
    write_pid,
)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CONTROL_VARIABLE, str(tmp_path))
    return tmp_path


def test_an_input_error_is_restored_completely(control: Path) -> None:
    original = DataError(
        "nothing to learn from",
        field="data.sources",
        got=0,
        allowed="1 or more",
        remedy="Add a file",
    )
    assert write_outcome(1, original) == ExitCode.WRONG_INPUT
    cause = find_cause(read_outcomes(control), {1: 2})
    assert isinstance(cause, DataError)
    assert str(cause) == str(original)
    assert cause.field == "data.sources"


def test_a_killed_rank_is_the_cause_of_its_peers_errors(control: Path) -> None:
    write_outcome(0, RuntimeError("Connection reset by peer"))
    error = find_cause(read_outcomes(control), {1: -9, 0: 3})
    assert isinstance(error, RankFailed)
    assert "rank 1 was killed by SIGKILL" in str(error)


def test_a_rank_that_the_launcher_had_to_kill_was_hanging(control: Path) -> None:
    write_outcome(
        0,
        RuntimeError(
            "[/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
        ),
    )
    failed_at = read_outcomes(control)[0].at_seconds
    error = find_cause(read_outcomes(control), {0: 3, 1: -9}, {0: failed_at, 1: failed_at + 30})
    assert isinstance(error, RankFailed)
    assert str(error).startswith(
        "rank 1 hung: rank 0 timed out waiting for it (Timed out waiting 5000ms for recv"
    )


def test_a_rank_killed_because_another_failed_is_not_the_cause(control: Path) -> None:
    write_outcome(0, NonFiniteError("eleven in a row"))
    failed_at = read_outcomes(control)[0].at_seconds
    error = find_cause(read_outcomes(control), {0: 3, 1: -9}, {0: failed_at, 1: failed_at + 30})
    assert isinstance(error, NonFiniteError)


@pytest.mark.parametrize(
    ("failed_rank", "seconds_later", "is_cause"), [(1, 0.5, True), (0, 0.5, True), (1, -0.5, False)]
)
def test_a_rank_that_nccl_aborts_after_a_failure_is_not_the_cause(
    control: Path, failed_rank: int, seconds_later: float, is_cause: bool
) -> None:
    """NCCL's thread ends a process whose peer is lost with SIGABRT, before the launcher does."""
    write_outcome(failed_rank, OutOfMemory(f"rank {failed_rank} ran out of memory"))
    failed_at = read_outcomes(control)[0].at_seconds
    statuses = {0: -signal.SIGABRT, failed_rank: -signal.SIGABRT if failed_rank == 0 else 3}
    ended = {0: failed_at + seconds_later, failed_rank: failed_at + 0.1}
    error = find_cause(read_outcomes(control), statuses, ended)
    if is_cause:
        assert isinstance(error, OutOfMemory)
    else:
        assert "rank 0 was killed by SIGABRT" in str(error)


def test_an_abort_after_errors_about_lost_peers_is_the_cause(control: Path) -> None:
    write_outcome(1, RuntimeError("NCCL communicator was aborted on rank 1."))
    failed_at = read_outcomes(control)[0].at_seconds
    statuses = {0: -signal.SIGABRT, 1: 3}
    error = find_cause(read_outcomes(control), statuses, {0: failed_at + 1, 1: failed_at})
    assert "rank 0 was killed by SIGABRT" in str(error)


def test_a_lost_peer_is_not_the_cause(control: Path) -> None:
    write_outcome(0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    try:
        raise ValueError("boom")
    except ValueError as error:
        write_outcome(1, error)
    error = find_cause(read_outcomes(control), {0: 3, 1: 3})
    assert isinstance(error, RunFailed)
    assert str(error).startswith("rank 1: ValueError: boom")
    assert "Traceback" in str(error)


def test_our_errors_preserve_their_type_and_gain_their_rank(control: Path) -> None:
    write_outcome(2, NonFiniteError("eleven in a row"))
    error = find_cause(read_outcomes(control), {2: 3})
    assert isinstance(error, NonFiniteError)
    assert str(error) == "rank 2: eleven in a row"


def test_a_rank_that_left_is_no_cause(control: Path) -> None:
    """All ranks leave for a larger launch, but one has an error of its own on the way."""
    assert write_outcome(0, GenerationEnded(7)) == ExitCode.PREEMPTED
    write_outcome(1, ValueError("odd"))
    left = read_outcomes(control)[0]
    assert (left.kind, left.details) == ("GenerationEnded", {"step": "7"})
    cause = find_cause(read_outcomes(control), {1: 3})
    assert type(cause) is RunFailed
    assert "rank 1: ValueError: odd" in str(cause)


def test_a_rank_without_an_outcome_is_named() -> None:
    assert "rank 3 (status 1)" in str(find_cause([], {3: 1}))


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (Preempted("x"), 4), (KeyError("x"), 3), (DataError("x"), 2)]
)
def test_outcomes_have_the_exit_code_of_their_error(
    control: Path, error: BaseException | None, code: int
) -> None:
    assert write_outcome(0, error) == code
    assert [outcome.exit_code for outcome in read_outcomes(control)] == [code]


def test_without_a_launcher_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONTROL_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert write_pid(0) == 0
    write_outcome(0, Preempted("x"))
    assert list(tmp_path.iterdir()) == []


def test_a_stop_before_the_rank_started_is_detected(control: Path) -> None:
    assert write_pid(0) == 0
    request_stop(control, signal.SIGCONT)  # of this process, which has written its id
    request_stop(control, 0)
    assert write_pid(0) == signal.SIGCONT, "the first one counts"


def test_outcomes_are_sorted_by_time(tmp_path: Path) -> None:
    for rank, at in ((0, 2.0), (1, 1.0)):
        path = tmp_path / f"rank-{rank}.json"
        path.write_text(f'{{"rank": {rank}, "exit_code": 3, "at_seconds": {at}}}')
    assert [outcome.rank for outcome in read_outcomes(tmp_path)] == [1, 0]
    assert isinstance(read_outcomes(tmp_path)[0], RankOutcome)
