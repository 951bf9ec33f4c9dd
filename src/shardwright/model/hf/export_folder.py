"""The folder that an export creates or replaces: which folders it may replace, and how."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import InputError

_CONFIG_NAMES = ("config.json", "adapter_config.json")
"""Files of which an exported folder has at least one."""

_TEMPLATES_NAME = "additional_chat_templates"
"""The only folder that transformers writes in addition to the files of a tokenizer."""


def check_export_folder(
    out: str | Path, *, should_overwrite: bool, sources: Sequence[str | Path] = ()
) -> Path:
    """Return the folder to write, with links followed, if an export may create or replace it.

    Replacing a folder deletes everything in it. So only a folder that looks like an export is
    replaced: files, one of them config.json or adapter_config.json. A run folder, a folder of
    checkpoints or a home folder never is.

    Args:
        sources: folders that the export reads; they are never replaced.

    Raises:
        InputError: the folder is a file, is not empty, or must not be replaced.
    """
    folder = Path(os.path.realpath(out))
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file; an export needs a folder", field="--out", got=out)
    remedy = "Name another folder"
    if folder.is_dir() and Path.cwd().is_relative_to(folder):
        raise InputError(
            "this is the current folder or contains it, and an export replaces its folder",
            field="--out",
            got=out,
            remedy=remedy,
        )
    if not folder.is_dir() or not any(folder.iterdir()):
        return folder
    if not should_overwrite:
        raise InputError(
            "the folder is not empty",
            field="--out",
            got=out,
            remedy=f"{remedy}, or use --overwrite",
        )
    for source in sources:
        if Path(os.path.realpath(source)) == folder:
            raise InputError(
                "the export reads this folder, so --overwrite does not replace it",
                field="--out",
                got=out,
                remedy=remedy,
            )
    if not _looks_exported(folder):
        raise InputError(
            "--overwrite would delete files that are not an export's",
            field="--out",
            got=out,
            allowed="a folder without folders in it, with config.json or adapter_config.json",
            remedy=f"{remedy}, or remove this one yourself",
        )
    return folder


def replace_folder(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; delete an older `out` afterwards, or restore it on failure."""
    old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    if out.exists():
        out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _looks_exported(folder: Path) -> bool:
    entries = list(folder.iterdir())
    return any(entry.name in _CONFIG_NAMES for entry in entries) and all(
        entry.is_file() or entry.name == _TEMPLATES_NAME for entry in entries
    )
