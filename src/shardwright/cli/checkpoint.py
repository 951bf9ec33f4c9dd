"""`shardwright checkpoint`: list, verify and inspect checkpoints without starting torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from shardwright.checkpoint.commit import (
    BEST_NAME,
    LATEST_NAME,
    StepFolder,
    list_step_folders,
    list_step_folders_by_trust,
    read_pointer,
)
from shardwright.checkpoint.disk import list_sizes
from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorEntry, read_manifest
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.run_values import parse_values, read_values_file
from shardwright.checkpoint.storage_path import StoragePath, parse_storage_path
from shardwright.cli.options import JsonOutput
from shardwright.cli.output.console import open_console, print_table
from shardwright.cli.output.json_output import print_json
from shardwright.control_characters import escape_control_characters
from shardwright.errors import CheckpointError, ExitCode
from shardwright.store_requests import describe_store_error
from shardwright.units import format_bytes, format_count, format_items, format_seconds

app = typer.Typer(
    help="List, verify and inspect checkpoints.", no_args_is_help=True, rich_markup_mode=None
)

CheckpointPathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help=(
            "Checkpoint (step-...), folder of checkpoints, or run folder; "
            "a local path or an fsspec URL."
        ),
    ),
]


@app.command("list")
def list_command(path: CheckpointPathArgument, json_output: JsonOutput = False) -> None:
    """List a run's checkpoints.

    With step, size and pointers (latest, best). Nothing is hashed.
    """
    root = _find_root(parse_storage_path(path, field="PATH"))
    pointed = {name: read_pointer(root, name) for name in (LATEST_NAME, BEST_NAME)}
    rows: list[dict[str, Any]] = []
    for folder in list_step_folders(root):
        names = [name for name, target in pointed.items() if target == folder]
        row: dict[str, Any] = {
            "name": folder.path.name,
            "step": folder.step,
            "pointers": names,
            "problem": None,
        }
        try:
            manifest = read_manifest(folder.path)
            row |= {
                "size_bytes": manifest.num_bytes,
                "num_tensors": len(manifest.tensors),
                "world_size": manifest.world_size,
            }
        except CheckpointError as error:
            row["problem"] = error.problem
        rows.append(row)
    if json_output:
        print_json({"root": str(root), "checkpoints": rows})
        return
    table = Table("checkpoint", "pointers", "size", "tensors", "ranks", "problem")
    for row in rows:
        counts = [str(row.get(key, "")) for key in ("num_tensors", "world_size")]
        size = format_bytes(row["size_bytes"]) if "size_bytes" in row else ""
        table.add_row(row["name"], ", ".join(row["pointers"]), size, *counts, row["problem"] or "")
    print_table(open_console(), table)


@app.command("verify")
def verify_command(path: CheckpointPathArgument, json_output: JsonOutput = False) -> None:
    """Hash every file and check every header.

    In a folder of checkpoints, verify each of them. Exit code 1 if one is damaged.
    """
    place = parse_storage_path(path, field="PATH")
    folders = (
        [place]
        if _is_checkpoint(place)
        else [folder.path for folder in list_step_folders_by_trust(_find_root(place))]
    )
    checked = [_verify_with_progress(folder, is_quiet=json_output) for folder in folders]
    whole = all(not row["faults"] for row in checked)
    if json_output:
        print_json({"whole": whole, "checkpoints": checked})
    else:
        for row in checked:
            outcome = "damaged"  # a damaged manifest has no size
            if not row["faults"]:
                outcome = (
                    f"intact, {format_bytes(row['size_bytes'])} in {format_seconds(row['seconds'])}"
                )
            sys.stdout.write(escape_control_characters(f"{row['name']}: {outcome}\n"))
            sys.stdout.writelines(
                escape_control_characters(f"  {fault}\n") for fault in row["faults"]
            )
    if not whole:
        raise typer.Exit(ExitCode.CHECK_FAILED)


@app.command("inspect")
def inspect_command(path: CheckpointPathArgument, json_output: JsonOutput = False) -> None:
    """Show a checkpoint's values, files, and tensors with their slices.

    In a folder of several checkpoints, show the one to resume from.
    """
    place = parse_storage_path(path, field="PATH")
    folder = (
        place if _is_checkpoint(place) else list_step_folders_by_trust(_find_root(place))[0].path
    )
    manifest = read_manifest(folder)
    values = read_values_file(folder)
    parse_values(values, folder, step=manifest.step)
    if json_output:
        print_json(_build_inspection(folder, manifest, values))
        return
    console = open_console()
    console.print(
        f"{folder}: step {manifest.step}, saved by "
        f"{format_items(manifest.world_size, 'rank')}, {manifest.written_by}; "
        f"{len(manifest.tensors)} tensors of "
        f"{format_bytes(sum(entry.num_bytes for entry in manifest.tensors.values()))}"
    )
    tensors = Table(Column("tensor", overflow="fold"), "dtype", "shape", "elements", "slices")
    for name, entry in manifest.tensors.items():
        tensors.add_row(
            name,
            entry.dtype,
            str(list(entry.shape)),
            format_count(entry.num_elements),
            str(len(entry.slices)),
        )
    files = Table(Column("file", overflow="fold"), "size", "SHA-256")
    for name, file in manifest.files.items():
        files.add_row(name, format_bytes(file.size_bytes), file.sha256[:16])
    for table in (tensors, files):
        print_table(console, table)
    console.print_json(json.dumps(values))


def _build_inspection(folder: StoragePath, manifest: Manifest, values: Any) -> dict[str, Any]:
    def describe(entry: TensorEntry) -> dict[str, Any]:
        slices = [
            {"file": s.file, "offsets": s.box.offsets, "lengths": s.box.lengths}
            for s in entry.slices
        ]
        return {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "size_bytes": entry.num_bytes,
            "slices": slices,
        }

    return {
        "path": str(folder),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "written_by": manifest.written_by,
        "values": values,
        "files": {
            name: {"size_bytes": f.size_bytes, "sha256": f.sha256}
            for name, f in manifest.files.items()
        },
        "tensors": {name: describe(entry) for name, entry in manifest.tensors.items()},
    }


def _verify_with_progress(folder: StoragePath, *, is_quiet: bool) -> dict[str, Any]:
    """Return a checkpoint's faults; show a progress bar on standard error while hashing."""
    started = time.monotonic()
    console = open_console(stderr=True, quiet=is_quiet)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        num_bytes = sum(size or 0 for size in list_sizes(folder).values())
        task = progress.add_task(escape_control_characters(folder.name), total=num_bytes)
        manifest, faults = verify_checkpoint(
            folder, on_block=lambda count: progress.advance(task, count)
        )
    return {
        "name": folder.name,
        "size_bytes": manifest.num_bytes if manifest is not None else None,
        "seconds": round(time.monotonic() - started, 3),
        "faults": faults,
    }


@contextmanager
def _report_store(path: StoragePath) -> Iterator[None]:
    """Raise the errors of an object store as CheckpointError."""
    try:
        yield
    except OSError as error:
        if isinstance(path, Path):
            raise
        raise CheckpointError(
            f"cannot be read: {describe_store_error(error)}",
            field="PATH",
            got=str(path),
            remedy="Check the bucket's name, the credentials and their permission to read",
        ) from error


def _is_checkpoint(path: StoragePath) -> bool:
    """True if the folder is one checkpoint, by its name or by its manifest."""
    with _report_store(path):
        is_named = path.is_dir() and StepFolder.parse(path) is not None
        is_checkpoint = is_named or (path / MANIFEST_NAME).exists()
    return is_checkpoint


def _find_root(path: StoragePath) -> StoragePath:
    """Return the folder of checkpoints that a path refers to.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    with _report_store(path):
        places = [path, path / "checkpoints"]
        if isinstance(path, Path) and RunFolder(path).recipe_path.is_file():
            places.append(RunFolder.open_existing(path).checkpoints)  # checkpoint.dir
        for root in places:
            if list_step_folders(root):
                return root
    missing = "no such folder" if isinstance(path, Path) else "no such folder or bucket"
    problem = "no checkpoint found" if path.is_dir() else missing
    raise CheckpointError(
        problem,
        field="PATH",
        got=str(path),
        allowed="a step-... folder, a folder of them, or a run folder",
    )
