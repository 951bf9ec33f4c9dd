"""Checkpoints with valid hashes and unexpected values: refused by field, or resumed."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.integrity import VerifiedCheckpoint
from shardwright.checkpoint.manifest import encode_values, parse_json
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.cli.main import run as shardwright
from shardwright.config import Recipe, dump_recipe
from shardwright.errors import CheckpointError
from shardwright.inference.model_source import open_model_source
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.telemetry.event_logger import EventLogger
from shardwright.training import checkpointing, resume_point
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.checks.run_checks import ValidatedRun, validate_run
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import RankSync
from shardwright.training.resume_point import find_resume_point
from shardwright.training.run import train
from shardwright.training.setup import build_state
from shardwright.training.training_state import TrainingState
from shardwright.watchdog.monitor import PhaseLimits, WatchdogClient
from tests.unit.training.finished import ALPHABET, CONFIG

STEPS = 2
SURROGATE = "\ud800"
REPLACEMENTS: tuple[Any, ...] = (
    *(None, True, -1, 7, 0.5, 1e300, 10**400, "text", "[/x]"),
    *([], {}, [1, None], ["a"], {"a": 1}, {"a": {}}, [{"step": 1}]),
)
"""Values that replace each place of the JSON in turn."""


def build_recipe(folder: Path, max_steps: int) -> Recipe:
    """Build a recipe whose checkpoints have every optional value: adapters and a loss scale."""
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "adapters": {"rank": 2, "targets": ["q_proj"]},
            "precision": "fp16",
            "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": max_steps,
                "learning_rate": 1e-2,
            },
            "checkpoint": {"every_steps": STEPS, "asynchronous": False},
            "run": {"dir": str(folder / "run"), "device": "cpu"},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of two steps."""
    folder = tmp_path_factory.mktemp("invalid")
    (folder / "corpus.txt").write_text(ALPHABET * 20)
    train(build_recipe(folder, STEPS))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[ValidatedRun, TrainingState, RunFolder]:
    """Build the state of a resumed process before it looks for a checkpoint."""
    recipe = build_recipe(folder, STEPS + 1)
    checked = validate_run(recipe, 1)
    return checked, build_state(checked, torch.device("cpu")), RunFolder.from_recipe(recipe)


def get_checkpoint_path(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / f"step-{STEPS:08d}"


def read_values(folder: Path) -> Any:
    return json.loads((get_checkpoint_path(folder) / "values.json").read_bytes())


def rewrite_file(folder: Path, text: bytes, name: str = "values.json") -> None:
    """Replace a file of the checkpoint and update all hashes."""
    checkpoint = get_checkpoint_path(folder)
    (checkpoint / name).write_bytes(text)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"][name] = {"size_bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest_bytes = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(manifest_bytes)
    (checkpoint / "manifest.sha256").write_text(
        f"{hashlib.sha256(manifest_bytes).hexdigest()}  manifest.json\n"
    )


def iterate_places(value: Any, parent: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every place of a JSON value, the value itself first."""
    yield parent
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from iterate_places(item, (*parent, key))


def replace_at(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a place."""
    if not place:
        return copy.deepcopy(value)
    key = place[0]
    rest = place[1:]
    changed = dict(content) if isinstance(content, dict) else list(content)
    changed[key] = replace_at(content[key], rest, value)
    return changed


def delete_at(content: Any, place: tuple[Any, ...]) -> Any:
    """Return a copy without the value at a place."""
    changed = copy.deepcopy(content)
    target = changed
    for key in place[:-1]:
        target = target[key]
    del target[place[-1]]
    return changed


def test_every_replaced_or_missing_value_is_refused_or_restored(
    folder: Path,
    trained: tuple[ValidatedRun, TrainingState, RunFolder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each variant raises one of our errors, or restores to a state that can be saved again."""
    caplog.set_level(logging.CRITICAL)
    checked, state, run = trained
    original = read_values(folder)
    newest = resume_point.find_newest_checkpoint(run.checkpoints)
    assert newest is not None
    current: list[Any] = [original]
    device = torch.device("cpu")
    ranks = RankEnvironment()
    context = RankContext(
        checked,
        ranks,
        device,
        run,
        EventLogger(None, ()),
        RankSync(ranks, device),
        StopRequest(),
        WatchdogClient(None, PhaseLimits(checked.recipe.watchdog, {})),
    )

    def iterate_variants() -> Iterator[Any]:
        first = next(iter(original["optimizer"]["hyperparameters"]))
        for place in iterate_places(original):
            # Values that are compared or shown as a whole need a few places only.
            if place[:2] == ("run", "model") and place[2:3] not in (
                (),
                ("family",),
                ("layers",),
                ("latent",),
            ):
                continue
            if place[:2] == ("optimizer", "hyperparameters") and place[2:3] not in ((), (first,)):
                continue
            if place:
                yield delete_at(original, place)
            for value in REPLACEMENTS:
                yield replace_at(original, place, value)

    def read_current_values(checkpoint: VerifiedCheckpoint, **_: Any) -> Any:
        content = current[0]
        if not isinstance(content, dict):
            raise CheckpointError("no object", field=str(checkpoint.path))
        return content

    monkeypatch.setattr("shardwright.checkpoint.tensor_loading.read_values", read_current_values)
    monkeypatch.setattr(resume_point, "find_newest_checkpoint", lambda *_, **__: newest)
    monkeypatch.setattr(checkpointing, "load_checkpoint", lambda *_, **__: None)
    refused = accepted = longest = 0
    for variant in iterate_variants():
        current[0] = variant
        try:
            start = find_resume_point(checked, run)
            assert start is not None
            saver = RunCheckpointer(context, state)
            saver.restore(start)
            resume_point.list_changes(start, checked)
            encode_values(
                saver.collect_values() | {"optimizer": start.values.optimizer.model_dump()}
            )
        except CheckpointError as error:
            refused += 1
            longest = max(longest, len(str(error)))
        else:
            assert state.step == STEPS
            accepted += 1
    assert refused > 500
    assert longest < 10_000
    # Hyperparameters, the part of the recipe that may change, counts within their range.
    assert accepted > 100


REFUSED: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("run",), ..., "run: .*got nothing; allowed: a value"),
    (("step",), ..., "step: .*got nothing"),
    (("step",), 7, "step: .*got 7; allowed: 2, as in the manifest"),
    (("samples_seen",), 5, "samples_seen: .*got 5; allowed: 4, as the other values imply"),
    (("skipped_in_a_row",), None, "skipped_in_a_row: .*got null; allowed: a whole number"),
    (("skipped_in_a_row",), True, "skipped_in_a_row: .*got true; allowed: a whole number"),
    (("steps_left_out",), -1, "steps_left_out: .*got -1; allowed: at least 0"),
    (("best_loss",), "[/x]", r"best_loss: .*got '\[/x\]'; allowed: a number"),
    (("loss_scaler", "scale"), 0, "loss_scaler.scale: .*allowed: more than 0"),
    (("evaluation_due",), 1, "evaluation_due: .*got 1; allowed: true or false"),
    (("optimizer",), [], r"optimizer: .*got \[\]; allowed: an object"),
    (
        ("optimizer", "steps"),
        {"a.b": "2"},
        r"optimizer\.steps\['a\.b'\]: .*got '2'; allowed: a whole number",
    ),
    (("drift",), ["x"], r"drift\[0\]: .*got 'x'; allowed: an object"),
    (("run", "freeze"), "text", "run.freeze: .*allowed: a list"),
    (("run", "base"), None, "run: .*adapters without a base"),
    (("run", "adapters", "rank"), 0, "run.adapters.rank: .*allowed: at least 1"),
    (
        ("run", "adapters", "kind"),
        "x",
        "run.adapters.kind: .*got 'x'; allowed: 'lora', 'rslora' or 'dora'",
    ),
    (("run", "adapters", "colour"), 1, "run.adapters.colour: .*allowed: kind, rank"),
)


@pytest.mark.parametrize(("place", "value", "message"), REFUSED)
def test_every_reader_of_a_checkpoint_names_the_field(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    place: tuple[str, ...],
    value: Any,
    message: str,
) -> None:
    original = read_values(folder)
    changed = copy.deepcopy(original)
    target = changed
    for key in place[:-1]:
        target = target[key]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    rewrite_file(folder, json.dumps(changed).encode())
    recipe = build_recipe(folder, STEPS + 1)
    try:
        with pytest.raises(
            CheckpointError, match=f"not a shardwright checkpoint.*{message.partition('.*')[2]}"
        ) as resumed:
            find_resume_point(validate_run(recipe, 1), RunFolder.from_recipe(recipe))
        assert f"values.json: {message.partition(':')[0]}".replace("\\", "") in str(resumed.value)
        with pytest.raises(CheckpointError) as opened:
            open_model_source(folder / "run")
        assert str(opened.value) == str(resumed.value)
        assert shardwright(["checkpoint", "inspect", str(get_checkpoint_path(folder))]) == 2
        assert str(resumed.value) in capsys.readouterr().err
    finally:
        rewrite_file(folder, json.dumps(original).encode())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[]", "not a shardwright checkpoint"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "allowed: 32 levels"),
        (b'{"a": ' * 100_000, "not valid JSON"),
        (b'{"step": 1e999}', "1e999 is not JSON"),
        (b'{"step": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (rb'{"step": "\ud800"}', "not valid JSON"),
    ],
)
def test_invalid_json_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: bytes, problem: str
) -> None:
    original = json.dumps(read_values(folder)).encode()
    rewrite_file(folder, text)
    try:
        with pytest.raises(CheckpointError, match=problem):
            open_model_source(folder / "run")
        for options in ([], ["--json"]):
            assert (
                shardwright(["checkpoint", "inspect", str(get_checkpoint_path(folder)), *options])
                == 2
            )
            assert problem in capsys.readouterr().err
    finally:
        rewrite_file(folder, original)


def test_pairs_of_surrogates_are_decoded() -> None:
    assert parse_json(rb'{"a": "\ud83d\ude00"}', Path("values.json")) == {"a": "\U0001f600"}


def test_the_verbs_end_with_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original = read_values(folder)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(build_recipe(folder, STEPS + 1)))
    rewrite_file(folder, json.dumps(delete_at(original, ("run",))).encode())
    try:
        for options in (
            ["train", str(recipe), "--resume"],
            ["export", str(folder / "run"), "--out", str(tmp_path / "out"), "--merge"],
            ["generate", str(folder / "run"), "--prompt", "a"],
        ):
            assert shardwright(options) == 2
            manifest_bytes = capsys.readouterr().err
            assert "values.json: run: not a shardwright checkpoint" in manifest_bytes
            assert "Traceback" not in manifest_bytes
    finally:
        rewrite_file(folder, json.dumps(original).encode())


def test_unusual_values_within_their_range_are_resumed(folder: Path) -> None:
    """Change every value that may differ. This test is last because it adds a step."""
    values = read_values(folder)
    values |= {
        "best_loss": -1e300,
        "skipped_in_a_row": 2**61,
        "evaluation_due": True,
        "recipe": {"training": [1], "[/x]": None},
    }
    values |= {
        "steps_left_out": 2**60 - STEPS,
        "samples_seen": 2**61,
        "layout": "[/x]",
        "of a later version": {"a": [1]},
    }
    values |= {"drift": [{"step": 0, "field": "[/x]", "saved": {"a": None}}]}
    values["loss_scaler"] = {"scale": 1.5, "finite_steps": 2**61}
    values["optimizer"]["hyperparameters"] = {"[/x]": {}}
    values["optimizer"]["steps"] = dict.fromkeys(values["optimizer"]["steps"], 2**61)
    rewrite_file(folder, json.dumps(values).encode())
    manifest_bytes = train(build_recipe(folder, STEPS + 1), resume=True)
    assert manifest_bytes is not None
    assert (manifest_bytes["status"], manifest_bytes["steps"]) == ("completed", STEPS + 1)
