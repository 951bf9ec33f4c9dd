"""Folders that an export creates and replaces: --overwrite deletes nothing but a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.model.hf.export_folder import check_export_folder, replace_folder


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def test_an_absent_and_an_empty_folder_are_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        out = tmp_path / name
        assert check_export_folder(out, should_overwrite=False) == out.resolve()


def test_a_model_is_replaced_with_overwrite_only(tmp_path: Path) -> None:
    out = make_model(tmp_path / "model")
    with pytest.raises(InputError, match=r"not empty.*or use --overwrite"):
        check_export_folder(out, should_overwrite=False)
    assert check_export_folder(out, should_overwrite=True) == out.resolve()


@pytest.mark.parametrize("name", ["checkpoints", ".git"])
def test_a_folder_with_folders_is_never_replaced(tmp_path: Path, name: str) -> None:
    """A run folder has a config.json too, and so may a repository or a home folder."""
    out = make_model(tmp_path / "run")
    (out / name).mkdir()
    with pytest.raises(InputError, match="would delete files that are not an export's"):
        check_export_folder(out, should_overwrite=True)


def test_files_without_a_config_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="would delete files that are not an export's"):
        check_export_folder(tmp_path, should_overwrite=True)


def test_the_folder_that_the_export_reads_is_never_replaced(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    link = tmp_path / "link"
    link.symlink_to(base)
    with pytest.raises(InputError, match="the export reads this folder"):
        check_export_folder(link, should_overwrite=True, sources=(base,))


def test_the_current_folder_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for out in (".", ".."):
        with pytest.raises(InputError, match="the current folder"):
            check_export_folder(out, should_overwrite=True)


def test_a_link_is_followed_and_remains(tmp_path: Path) -> None:
    old = make_model(tmp_path / "old")
    link = tmp_path / "link"
    link.symlink_to(old)
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_text("new")
    replace_folder(partial, check_export_folder(link, should_overwrite=True))
    assert link.is_symlink()
    assert (link / "config.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
