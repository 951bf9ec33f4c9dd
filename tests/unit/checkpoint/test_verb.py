"""`shardwright checkpoint`: exit codes, JSON, and that it starts without torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import run
from tests.unit.checkpoint.some_values import run_values
from tests.unit.checkpoint.test_damage import rewrite, set_in, write_manifest


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = run(["checkpoint", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000020" / "manifest.json").write_text("{}")
    for path in (root, root.parent):  # the folder itself, or the run's folder around it
        code, told = answer(capsys, "list", str(path))
        assert code == 0
        assert told["schema_version"] == 1
        rows = told["checkpoints"]
        assert isinstance(rows, list)
        assert [(row["step"], row["pointers"], row["problem"] is None) for row in rows] == [
            (10, ["best"], True),
            (20, [], False),
            (30, ["latest"], True),
        ]
    assert run(["checkpoint", "list", str(root)]) == 0
    assert "step-00000030" in capsys.readouterr().out


def test_verify_finds_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "verify", str(root))[0] == 0
    (root / "step-00000020" / "values.json").write_text("{}")
    code, told = answer(capsys, "verify", str(root))
    assert (code, told["whole"]) == (1, False)
    assert answer(capsys, "verify", str(root / "step-00000020"))[0] == 1
    assert answer(capsys, "verify", str(root / "step-00000030"))[0] == 0
    assert run(["checkpoint", "verify", str(root)]) == 1
    assert "step-00000020: damaged\n  values.json has 2 bytes" in capsys.readouterr().out


def test_inspect(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = answer(capsys, "inspect", str(root))
    assert (code, told["step"], told["values"]) == (0, 30, run_values(30) | {"note": "ü"})
    tensors = told["tensors"]
    assert isinstance(tensors, dict)
    assert tensors["model.embedding"]["size_bytes"] == 240
    assert run(["checkpoint", "inspect", str(root / "step-00000010")]) == 0
    assert "model.embedding" in capsys.readouterr().out


def rewrite_values(folder: Path, values: dict[str, Any]) -> None:
    """Change the values and let the manifest agree with them."""
    data = json.dumps(values).encode()
    (folder / "values.json").write_bytes(data)
    rewrite(
        folder,
        set_in(
            "files",
            "values.json",
            value={"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        ),
    )


@pytest.mark.parametrize(
    "odd", ["[/x]", "[bold]", ":smile:", "\x1b[2J", "\ud800", "{0}", "\u202e", "a\tb"]
)
def test_odd_text_is_shown_as_it_is(
    root: Path, capfdbinary: pytest.CaptureFixture[bytes], odd: str
) -> None:
    """In names of tensors, of folders and in values: neither markup nor a code for the terminal,
    and printable in any case.
    """
    folder = root / "step-00000030"
    rewrite(root / "step-00000010", set_in(odd, value=1))  # a problem that `list` shows
    if odd != "\ud800":  # no JSON may hold it
        rewrite_values(folder, run_values(30) | {"layout": odd, odd: {odd: odd}})
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["tensors"][odd] = manifest["tensors"].pop("model.norm")
    manifest["written_by"] = odd
    write_manifest(folder, json.dumps(manifest).encode())
    shown = odd.replace("\x1b", "␛")
    for words in (["list", str(root)], ["inspect", str(folder)], ["verify", str(folder)]):
        code = run(["checkpoint", *words])
        told = capfdbinary.readouterr()
        assert b"\x1b" not in told.out + told.err
        if odd == "\ud800":
            assert code == {"list": 0, "inspect": 2, "verify": 1}[words[0]]
            assert words[0] == "list" or b"not valid JSON" in told.out + told.err
        else:
            assert code == 0
            assert odd == "a\tb" or words[0] != "inspect" or shown.encode() in told.out


@pytest.mark.parametrize("verb", ["list", "verify", "inspect"])
def test_what_is_no_checkpoint_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert answer(capsys, verb, str(path))[0] == 2


def test_it_starts_without_torch(root: Path) -> None:
    script = (
        "import sys; from shardwright.cli.main import run\n"
        f"codes = [run(['checkpoint', verb, {str(root)!r}]) for verb in ('list', 'verify', 'inspect')]\n"
        "assert codes == [0, 0, 0] and 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
