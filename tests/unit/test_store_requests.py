"""Failures of a store: those that are retried, how often, and the error in the end."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest

from shardwright import store_requests
from shardwright.store_requests import (
    NUM_ATTEMPTS,
    compute_delay,
    convert_error,
    describe_store_error,
    open_file_system,
    send_request,
)


class NoCredentialsError(Exception):
    """Stands for a client library's error that is no OSError."""


class HTTPClientError(Exception):
    """Stands for botocore's error of a lost connection."""


class StatusError(Exception):
    """Stands for aiohttp's error of an answer."""

    def __init__(self, status: int, text: str = "answer") -> None:
        super().__init__(text)
        self.status = status


@pytest.fixture(autouse=True)
def _wait_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_requests, "FIRST_DELAY_SECONDS", 0.0)


def count_attempts(error: Exception) -> tuple[int, Exception]:
    """Return how often a request was sent that always fails, and the error in the end."""
    attempts: list[None] = []

    def fail() -> None:
        attempts.append(None)
        raise error

    with pytest.raises(Exception) as raised:  # noqa: PT011
        send_request("reading x", fail)
    return len(attempts), raised.value


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("late"),
        OSError(errno.EBUSY, "slow down"),
        OSError("no number"),
        HTTPClientError("lost"),
        StatusError(503),
        StatusError(429),
    ],
)
def test_failures_that_may_pass_are_retried(error: Exception) -> None:
    attempts, raised = count_attempts(error)
    assert attempts == NUM_ATTEMPTS
    assert isinstance(raised, OSError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("403"), PermissionError),
        (FileNotFoundError("no bucket"), FileNotFoundError),
        (NoCredentialsError("Unable to locate credentials"), OSError),
        (StatusError(403), PermissionError),
        (StatusError(401), PermissionError),
        (StatusError(404), FileNotFoundError),
        (StatusError(400), OSError),
        (OSError(errno.EINVAL, "bad name"), OSError),
        (TypeError("a bug"), TypeError),
    ],
)
def test_final_failures_are_raised_at_once(error: Exception, kind: type[Exception]) -> None:
    attempts, raised = count_attempts(error)
    assert attempts == 1
    assert type(raised) is kind
    assert str(error) in str(raised)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCredentialsError("Unable to locate them"), "NoCredentialsError: Unable to locate them"),
        (FileNotFoundError("no bucket"), "FileNotFoundError: no bucket"),
        (StatusError(403, "denied"), "PermissionError: denied"),
        (OSError(errno.EIO, "An error occurred"), "An error occurred"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "ConnectionResetError: reset"),
        (OSError("no number"), "OSError: no number"),
        (OSError(errno.EIO, "broken", "name"), "OSError: [Errno 5] broken: 'name'"),
    ],
)
def test_an_error_is_described_with_its_kind_once(error: Exception, text: str) -> None:
    assert describe_store_error(convert_error(error)) == text


def test_warnings_name_the_kind_of_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    count_attempts(HTTPClientError("lost"))
    assert "reading x failed (HTTPClientError: lost); attempt 2 of 10" in caplog.text


def test_a_request_may_succeed_after_failures() -> None:
    outcomes: list[Any] = [TimeoutError(), ConnectionError(), 7]

    def request() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return int(outcome)

    assert send_request("reading x", request) == 7


def test_delays_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_requests, "FIRST_DELAY_SECONDS", 0.25)
    longest = [max(compute_delay(attempt) for _ in range(200)) for attempt in range(1, 10)]
    assert 0.2 < longest[0] <= 0.25
    assert 5 < longest[-1] <= 10
    assert sum(longest) < 46


@pytest.mark.parametrize("kind", [ConnectionError, PermissionError, HTTPClientError, StatusError])
def test_warnings_and_errors_show_no_credentials(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    text = "GET https://h/x?sig=hunter2"
    error = StatusError(500, text) if kind is StatusError else kind(text)

    def fail() -> None:
        raise error

    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match=r"sig=\*\*\*") as raised:
        send_request("reading sftp://u:hunter2@h/x", fail)
    assert "hunter2" not in caplog.text
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None, "a traceback would show the original error"
    assert raised.value.__suppress_context__
    if kind is not PermissionError:
        assert "sftp://u:***@h/x" in caplog.text
        assert isinstance(raised.value, OSError)
    else:
        assert type(raised.value) is PermissionError


def test_a_parser_that_quotes_a_part_of_a_password_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Port could not be cast to integer value as 'pa'")

    monkeypatch.setattr("fsspec.url_to_fs", fail)
    with pytest.raises(ValueError, match="its message is not shown") as raised:
        open_file_system("sftp://u:pa/ss@host/run")
    assert "'pa'" not in str(raised.value)
    with pytest.raises(ValueError, match="Port could not be cast"):
        open_file_system("sftp://host:x/run")


def test_local_and_unknown_file_systems() -> None:
    assert open_file_system("memory://a/b")[1] == "/a/b"
    with pytest.raises(ValueError, match="nosuch"):
        open_file_system("nosuch://a")
