"""`shardwright checkpoint`: exit codes and JSON; it starts without torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import run
from tests.unit.checkpoint.sample_values import make_run_values
from tests.unit.checkpoint.test_integrity import rewrite_manifest, set_in, write_manifest


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = run(["checkpoint", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_shows_steps_pointers_and_problems(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step-00000020" / "manifest.json").write_text("{}")
    for path in (root, root.parent):  # the folder itself, or the run's folder around it
        code, output = run_json(capsys, "list", str(path))
        assert code == 0
        assert output["schema_version"] == 1
        rows = output["checkpoints"]
        assert isinstance(rows, list)
        assert [(row["step"], row["pointers"], row["problem"] is None) for row in rows] == [
            (10, ["best"], True),
            (20, [], False),
            (30, ["latest"], True),
        ]
    assert run(["checkpoint", "list", str(root)]) == 0
    assert "step-00000030" in capsys.readouterr().out


def test_verify_finds_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", str(root))[0] == 0
    (root / "step-00000020" / "values.json").write_text("{}")
    code, output = run_json(capsys, "verify", str(root))
    assert (code, output["whole"]) == (1, False)
    assert run_json(capsys, "verify", str(root / "step-00000020"))[0] == 1
    assert run_json(capsys, "verify", str(root / "step-00000030"))[0] == 0
    assert run(["checkpoint", "verify", str(root)]) == 1
    output_text, error_text = capsys.readouterr()
    assert "step-00000020: damaged\n  values.json has 2 bytes" in output_text
    assert error_text == "", "a progress bar needs a terminal; in a log it left empty lines"


def test_inspect_shows_values_and_tensors(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = run_json(capsys, "inspect", str(root))
    assert (code, output["step"], output["values"]) == (0, 30, make_run_values(30) | {"note": "ü"})
    tensors = output["tensors"]
    assert isinstance(tensors, dict)
    assert tensors["model.embedding"]["size_bytes"] == 240
    assert run(["checkpoint", "inspect", str(root / "step-00000010")]) == 0
    assert "model.embedding" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "52")  # a name is wrapped, not shortened
    assert run(["checkpoint", "inspect", str(root / "step-00000010")]) == 0
    assert "…" not in capsys.readouterr().out


def rewrite_values(folder: Path, values: dict[str, Any]) -> None:
    """Change the values and update their hash in the manifest."""
    data = json.dumps(values).encode()
    (folder / "values.json").write_bytes(data)
    rewrite_manifest(
        folder,
        set_in(
            "files",
            "values.json",
            value={"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        ),
    )


@pytest.mark.parametrize(
    "unusual", ["[/x]", "[bold]", ":smile:", "\x1b[2J", "\ud800", "{0}", "\u202e", "a\tb"]
)
def test_unusual_text_is_shown_literally(
    root: Path, capfdbinary: pytest.CaptureFixture[bytes], unusual: str
) -> None:
    """Text in tensor names, folder names and values is neither markup nor a terminal code."""
    folder = root / "step-00000030"
    rewrite_manifest(
        root / "step-00000010", set_in(unusual, value=1)
    )  # `list` shows it as a problem
    if unusual != "\ud800":  # not allowed in JSON
        rewrite_values(
            folder, make_run_values(30) | {"layout": unusual, unusual: {unusual: unusual}}
        )
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["tensors"][unusual] = manifest["tensors"].pop("model.norm")
    manifest["written_by"] = unusual
    write_manifest(folder, json.dumps(manifest).encode())
    shown = unusual.replace("\x1b", "␛")
    for words in (["list", str(root)], ["inspect", str(folder)], ["verify", str(folder)]):
        code = run(["checkpoint", *words])
        output = capfdbinary.readouterr()
        assert b"\x1b" not in output.out + output.err
        if unusual == "\ud800":
            assert code == {"list": 0, "inspect": 2, "verify": 1}[words[0]]
            assert words[0] == "list" or b"not valid JSON" in output.out + output.err
        else:
            assert code == 0
            assert unusual == "a\tb" or words[0] != "inspect" or shown.encode() in output.out


@pytest.mark.parametrize("verb", ["list", "verify", "inspect"])
def test_a_folder_without_checkpoints_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert run_json(capsys, verb, str(path))[0] == 2


def test_the_verb_starts_without_torch(root: Path) -> None:
    script = (
        "import sys; from shardwright.cli.main import run\n"
        "verbs = ('list', 'verify', 'inspect')\n"
        f"codes = [run(['checkpoint', verb, {str(root)!r}]) for verb in verbs]\n"
        "assert codes == [0, 0, 0] and 'torch' not in sys.modules\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
