"""No credential reaches an error, an event, a log or a copy of a recipe."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.storage_path import RemotePath, parse_storage_path
from shardwright.cli.main import run
from shardwright.cli.options import enable_log
from shardwright.cluster.job import Job
from shardwright.config import dump_recipe, load_recipe
from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.sources.remote_sources import fetch_sources
from shardwright.errors import CheckpointError, DataError, InputError, SaveFailed
from shardwright.launch.rank_outcome import read_outcomes, write_outcome
from shardwright.masking import is_masked, mask_secrets, mask_values
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.training.metrics.run_log import log_to_run

SECRET = "hunter2"
URL = f"sftp://u:{SECRET}/x@host/run"
MASKED_URL = "sftp://u:***@host/run"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("sftp://u:pa/ss@host/run", "sftp://u:***@host/run"),
        ("s3://AKIA:ab/cd@bucket/run", "s3://AKIA:***@bucket/run"),
        ("sftp://u:p@ss@host/run is gone", "sftp://u:***@host/run is gone"),
        ("sftp://u:p'w@host/run", "sftp://u:***@host/run"),
        ("sftp://:pw@host", "sftp://:***@host"),
        ("ftp://u:p w'x@host/run", "ftp://u:p w'x@host/run"),  # a text, not a URL
        ("https://token@host/x", "https://***@host/x"),
        ("(https://h/x?sig=secret&part=2)", "(https://h/x?sig=***&part=2)"),
        ("https://h/x?X-Amz-Credential=a&s=1", "https://h/x?X-Amz-Credential=***&s=1"),
        ("gs://b/x?access_token=abc", "gs://b/x?access_token=***"),
        ("FS(key='A', secret='b c', anon=False)", "FS(key='A', secret=***, anon=False)"),
        ("{'password': \"a b\", 'token': 'abc'}", "{'password': ***, 'token': ***}"),
        ("aws_secret_access_key=abc, region=x", "aws_secret_access_key=***, region=x"),
        ("account_key: abc==; next", "account_key: ***; next"),
        ("connection_string=abc", "connection_string=***"),
        ("aws_session_token=abc", "aws_session_token=***"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("Authorization: abc", "Authorization: ***"),
    ],
)
def test_credentials_in_texts_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked, "masking twice changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 128, tokens_per_second: 1000, eos_token: </s>",
        "https://host:8080/path, user@host",
        "s3://bucket/run:1 and s3://arn:aws:s3:us-west-2:1:accesspoint/name/a@b",
        "memory://a/b:c@d",
        "NoCredentialsError: Unable to locate credentials",
        "https://h/x?part=2&versionId=abc",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert mask_secrets(text) == text


def test_nested_data_are_masked_by_key() -> None:
    options = {"secret": "a", "AWS_SECRET_ACCESS_KEY": "b", "token": "c", "tokens": "d", "n": 1}
    assert mask_values({"options": [options], "dir": URL}) == {
        "options": [
            {"secret": "***", "AWS_SECRET_ACCESS_KEY": "***", "token": "***", "tokens": "d", "n": 1}
        ],
        "dir": MASKED_URL,
    }


def test_errors_show_no_credentials() -> None:
    error = InputError("not at " + URL, field=URL, got=URL, remedy="see " + URL)
    for shown in (error, copy.copy(error), SaveFailed(f"lost {URL}")):
        assert SECRET not in str(shown)
        assert MASKED_URL in str(shown)
    assert (error.got, error.field) == (MASKED_URL, MASKED_URL)
    assert SECRET not in error.problem


class RecordingSink:
    """Sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_event(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_events_and_logs_show_no_credentials(tmp_path: Path) -> None:
    stream = io.StringIO()
    with (
        open_event_logger(tmp_path, stream=stream) as event_logger,
        log_to_run(event_logger, tmp_path / "log.txt", rank=0),
    ):
        logging.getLogger("shardwright").warning("reading %s failed", URL)
        logging.getLogger("shardwright").info("reading %s", URL)
        sink = RecordingSink()
        EventLogger(None, [sink]).log("warning", message=URL)
        assert sink.events[0].message == MASKED_URL
    for text in (
        (tmp_path / "events.jsonl").read_text(),
        (tmp_path / "log.txt").read_text(),
        stream.getvalue(),
    ):
        assert MASKED_URL in text
        assert SECRET not in text
    assert "reading sftp" in (tmp_path / "log.txt").read_text()


def test_the_log_of_verbs_shows_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(root, "handlers", [])
    enable_log()
    logging.getLogger("shardwright").warning("at %s", URL)
    assert stream.getvalue() == f"at {MASKED_URL}\n"


def test_tracebacks_show_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwright.launch.rank_outcome.get_control_folder", lambda: tmp_path)
    write_outcome(0, RuntimeError(f"no answer from {URL}"))
    (outcome,) = read_outcomes(tmp_path)
    assert SECRET not in (tmp_path / "rank-0.json").read_text()
    assert MASKED_URL in outcome.message

    def fail(*_: Any) -> None:
        raise RuntimeError(f"no answer from {URL}")

    monkeypatch.setattr(sys.modules[run.__module__], "build_app", fail)
    assert run(["plan", "--json"]) == 3
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert MASKED_URL in shown.err
    assert MASKED_URL in json.loads(shown.out)["error"]["message"]


def make_recipe(tmp_path: Path, **changes: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": "absent.txt"},
            "training": {
                "sequence_length": 8,
                "max_steps": 3,
                "learning_rate": 1e-3,
                "micro_batch_size": 1,
            },
            "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
            "checkpoint": {"dir": URL},
            **changes,
        }
    )


def test_the_copy_of_a_recipe_is_masked_and_says_so_when_it_is_opened(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    folder = RunFolder.from_recipe(recipe)
    folder.write_metadata(recipe, {}, {})
    for path in folder.path.iterdir():
        assert SECRET not in path.read_text()
    masked = load_recipe(folder.recipe_path)
    assert masked.checkpoint.dir == MASKED_URL
    assert is_masked(MASKED_URL)
    with pytest.raises(CheckpointError, match="masked, as in every saved copy of a recipe"):
        assert RunFolder.open_existing(folder.path).checkpoints
    (tmp_path / "other.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "other.yaml") == recipe, "ranks get the credentials"


def test_scripts_show_no_credentials(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    with pytest.raises(InputError, match="would be written to the script") as raised:
        Job(recipe, "recipe.yaml", 1, 1, overrides=(f"checkpoint.dir={URL}",))
    assert SECRET not in str(raised.value)


def test_a_url_that_cannot_be_opened_shows_no_part_of_its_credentials(tmp_path: Path) -> None:
    urls = ("sftp://u:pa/ss@host/run", "s3://AKIA:ab/cd@bucket/run", "nosuch://u:ab/cd@b/run")
    for url in urls:
        source = make_recipe(tmp_path, data={"sources": url}).data.sources
        with pytest.raises(CheckpointError) as checkpoint_error:
            parse_storage_path(url)
        with pytest.raises(DataError) as data_error:
            fetch_sources(source, tmp_path, "data.sources")
        for error in (checkpoint_error.value, data_error.value):
            for secret in ("pa/ss", "'pa'", "ss@", "ab/cd", "'ab'", "cd@"):
                assert secret not in str(error)
            assert "***@" in str(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("error: {file}: a recipe must be a mapping", None),
        ("{file}: Permission denied", None),
        ("/gone/passwd: no such file (got 3)", None),
        ("/gone/passwd: No such file or directory", None),
        ("{file}: bad line, password: abc", "{file}: bad line, password: ***"),
        ("{file}:abc", "{file}:***"),  # as in a list of users
        ("{file}=abc", "{file}=***"),
        ("vault/app/password: abc", "vault/app/password: ***"),
        ("passwd: abc", "passwd: ***"),
        ("passwd: no such file", "passwd: *** such file"),
    ],
)
def test_messages_about_files_with_names_of_secrets_are_shown(
    tmp_path: Path, text: str, shown: str | None
) -> None:
    """`/etc/passwd: Permission denied` lost its first word."""
    file = tmp_path / "passwd"
    file.write_text("")
    given = text.format(file=file)
    assert mask_secrets(given) == (given if shown is None else shown.format(file=file))


def test_paths_show_no_credentials() -> None:
    import fsspec

    path = RemotePath("https://h/x?sig=secret", fsspec.filesystem("memory"))
    assert "secret" not in str(path)
    assert "secret" not in repr(path)
