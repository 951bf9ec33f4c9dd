"""Read what the recorder wrote: the ranks of a step, with their shards joined."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shardwright.audit.errors import AuditInputError
from shardwright.audit.recorded_batch import RankRecord, RecordedBatch, read_batch
from shardwright.audit.recorder import FORMAT_VERSION, ShardBox


@dataclass(frozen=True)
class StepRecord:
    """A step of all ranks."""

    folder: Path
    ranks: tuple[RankRecord, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the first rank."""
        return self.ranks[0].values

    @cached_property
    def parameter_info(self) -> dict[str, Mapping[str, Any]]:
        """Description of each recorded parameter by name, from the first rank that has it."""
        found: dict[str, Mapping[str, Any]] = {}
        for rank in self.ranks:
            for name, info in rank.values["parameters"].items():
                found.setdefault(name, info)
        return found

    @property
    def buffer_names(self) -> list[str]:
        """Names of the persistent buffers that a rank recorded."""
        keys = {key for rank in self.ranks for key in rank.tensors if key.startswith("buffer.")}
        return sorted(key.removeprefix("buffer.") for key in keys)

    def read_buffer(self, name: str) -> Tensor:
        """Read a persistent buffer before the step, from the first rank that has it."""
        key = f"buffer.{name}"
        return next(rank.tensors[key] for rank in self.ranks if key in rank.tensors)

    def get_gradient_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter's gradient, or the parameter's without a gradient."""
        info = self.parameter_info[name]
        dtype: torch.dtype = getattr(torch, info.get("gradient_dtype", info["dtype"]))
        return dtype

    def read_data(self) -> list[list[RecordedBatch]]:
        """List the micro-batches of every data rank.

        Raises:
            AuditInputError: no ids or labels, ranks of one data rank with different rows.
        """
        data: dict[int, list[RecordedBatch]] = {}
        for rank in self.ranks:
            batches = [
                read_batch(rank, index) for index in range(len(rank.values["micro_batches"]))
            ]
            number = rank.values["data_rank"]
            first = data.setdefault(number, batches)
            if len(first) != len(batches) or not all(map(RecordedBatch.equals, first, batches)):
                raise AuditInputError(
                    f"rank {rank.values['rank']} read different rows from another rank "
                    f"of data rank {number}",
                    field=str(self.folder),
                    remedy="Pass Recorder(data_rank=...): equal for ranks that read the same rows",
                )
        return [data[number] for number in sorted(data)]

    def join(self, kind: str, name: str, state_key: str = "") -> list[Tensor]:
        """Join the shards of a recorded tensor; list its copies, one if all are equal.

        Args:
            kind: `before`, `after`, `gradient`, `start`, `projection` or `state`.
            name: Name of the parameter.
            state_key: Key of the optimizer's state, for `state`.

        Returns:
            Empty if no rank has this tensor.

        Raises:
            AuditInputError: shards overlap or leave a gap, or ranks differ in the shape.
        """
        key = f"{kind}.{name}" + (f".{state_key}" if state_key else "")
        if kind == "projection":
            return self._join_projections(key, name)
        shape = tuple(self.parameter_info[name]["shape"])
        pieces: dict[ShardBox, list[Tensor]] = {}
        for rank in self.ranks:
            info = rank.values["parameters"].get(name)
            if info is None or key not in rank.tensors:
                continue
            if tuple(info["shape"]) != shape:
                raise AuditInputError(
                    f"{name} has shape {info['shape']} on rank {rank.values['rank']} and "
                    f"{list(shape)} on another",
                    field=str(self.folder),
                )
            for box in _read_boxes(info):
                if math.prod(box.size) == 0:
                    continue
                part = _narrow(rank.tensors[key], box.local_start, box.size, key, self.folder)
                unplaced = ShardBox((), box.global_start, box.size)
                pieces.setdefault(unplaced, []).append(part)
        if not pieces:
            return []
        _check_tiling(name, shape, list(pieces), self.folder)
        copies = []
        for number in range(max(len(parts) for parts in pieces.values())):
            whole = torch.empty(shape, dtype=next(iter(pieces.values()))[0].dtype)
            for box, parts in pieces.items():
                _narrow(whole, box.global_start, box.size, key, self.folder).copy_(
                    parts[number % len(parts)]
                )
            copies.append(whole)
        if all(_are_same(copies[0], copy) for copy in copies[1:]):
            return copies[:1]
        return copies

    def _join_projections(self, key: str, name: str) -> list[Tensor]:
        """Add the projections of different shards; list those of equal shards as copies."""
        by_box: dict[str, list[Tensor]] = {}
        for rank in self.ranks:
            if key in rank.tensors and rank.values["parameters"][name]["boxes"]:
                boxes = str([box[1:] for box in rank.values["parameters"][name]["boxes"]])
                by_box.setdefault(boxes, []).append(rank.tensors[key])
        if not by_box:
            return []
        num_copies = max(len(parts) for parts in by_box.values())
        copies = [
            torch.stack([parts[number % len(parts)] for parts in by_box.values()]).sum(0)
            for number in range(num_copies)
        ]
        if all(_are_same(copies[0], copy) for copy in copies[1:]):
            return copies[:1]
        return copies

    def read_state(self, name: str) -> dict[str, Tensor]:
        """Read the optimizer's state of a parameter before the step, joined, by key."""
        keys = {
            key.removeprefix(f"state.{name}.")
            for rank in self.ranks
            for key in rank.tensors
            if key.startswith(f"state.{name}.") and "." not in key.removeprefix(f"state.{name}.")
        }
        state = {}
        for key in sorted(keys):
            whole_key = f"state.{name}.{key}"
            first = next(r.tensors[whole_key] for r in self.ranks if whole_key in r.tensors)
            state[key] = first if first.ndim == 0 else self.join("state", name, key)[0]
        return state

    def sum_squared_norms(self) -> dict[str, float] | None:
        """Sum the squares of each recorded gradient; copies count once.

        None if not all trainable parameters are recorded.
        """
        if list(self.values["patterns"]) != ["*"]:
            return None
        counted: dict[tuple[str, str], float] = {}
        for rank in self.ranks:
            for name, square in rank.values["squared_gradient_norms"].items():
                boxes = [box[1:] for box in rank.values["parameters"][name]["boxes"]]
                if boxes:
                    counted.setdefault((name, str(boxes)), float(square))
        squares: dict[str, float] = {}
        for (name, _), square in counted.items():
            squares[name] = squares.get(name, 0.0) + square
        return squares


def load_step(folder: Path, step: int | None = None) -> StepRecord:
    """Read a recorded step.

    Args:
        folder: The recorder's folder, or the folder of one step.
        step: Number of the step; default the only one.

    Raises:
        AuditInputError: no step, several without a choice, ranks missing or of different steps,
            a damaged file.
    """
    step_folder = _choose_step(folder, step)
    ranks = []
    for path in sorted(step_folder.glob("rank-*.json")):
        try:
            values = _decode_numbers(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise _build_damage_error(path, f"cannot be read: {error}") from error
        version = values.get("format_version") if isinstance(values, dict) else None
        if version is None:
            raise _build_damage_error(path, "has no format_version")
        if version != FORMAT_VERSION:
            raise AuditInputError(
                "this file was written by another version of the recorder",
                field=str(path),
                got=version,
                allowed=str(FORMAT_VERSION),
                remedy="Write a new recorder with `shardwright audit recorder --overwrite` and "
                "record again",
            )
        tensors_path = path.with_suffix(".safetensors")
        try:
            tensors = load_file(tensors_path)
        except (OSError, ValueError, SafetensorError) as error:
            is_missing = isinstance(error, FileNotFoundError)
            problem = "is missing" if is_missing else f"cannot be read: {error}"
            raise _build_damage_error(tensors_path, problem) from error
        ranks.append(RankRecord(values, tensors))
    _check_ranks(step_folder, ranks)
    return StepRecord(step_folder, tuple(sorted(ranks, key=lambda rank: rank.values["rank"])))


def _build_damage_error(path: Path, problem: str) -> AuditInputError:
    return AuditInputError(
        f"this file of the recorder {problem}",
        field=str(path),
        remedy="Copy the files of all ranks again, or record the step again",
    )


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Return True if all elements are equal; nan equals nan."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _decode_numbers(values: Any) -> Any:
    """Replace names of numbers that JSON lacks with the numbers, except in the configuration."""
    if isinstance(values, str) and values in ("inf", "-inf", "nan"):
        return float(values)
    if isinstance(values, dict):
        return {k: each if k == "config" else _decode_numbers(each) for k, each in values.items()}
    if isinstance(values, list):
        return [_decode_numbers(each) for each in values]
    return values


def _choose_step(folder: Path, step: int | None) -> Path:
    if not folder.is_dir():
        raise AuditInputError(
            "not a folder" if folder.exists() else "no such folder",
            field=str(folder),
            remedy="Give the folder that the recorder wrote",
        )
    if any(folder.glob("rank-*.json")):
        return folder
    found = sorted(path for path in folder.glob("step-*") if any(path.glob("rank-*.json")))
    numbers = [int(path.name.removeprefix("step-")) for path in found]
    if not found:
        raise AuditInputError(
            "this folder has no recorded step",
            field=str(folder),
            remedy="Recorder(folder, steps=[...]) writes step-NNNNNN in it",
        )
    if step is None and len(found) > 1:
        raise AuditInputError(
            "this folder has several recorded steps",
            field=str(folder),
            got=", ".join(map(str, numbers)),
            remedy="Choose one with --step",
        )
    if step is not None and step not in numbers:
        raise AuditInputError(
            "this step is not recorded",
            field="--step",
            got=step,
            allowed=", ".join(map(str, numbers)),
        )
    return found[0 if step is None else numbers.index(step)]


def _check_ranks(folder: Path, ranks: Sequence[RankRecord]) -> None:
    numbers = [rank.values["rank"] for rank in ranks]
    world_sizes = {rank.values["world_size"] for rank in ranks}
    if len(world_sizes) != 1:
        raise AuditInputError(
            "ranks of different runs are in one folder",
            field=str(folder),
            got=f"world sizes {sorted(world_sizes)}",
            remedy="Record into an empty folder",
        )
    missing = sorted(set(range(world_sizes.pop())) - set(numbers))
    if missing:
        raise AuditInputError(
            f"rank {', '.join(map(str, missing))} is missing",
            field=str(folder),
            got=f"ranks {numbers}",
            remedy="Copy the files of all ranks into one folder, or record on a shared file system",
        )
    steps = {rank.values["step"] for rank in ranks}
    if len(steps) != 1:
        raise AuditInputError(
            "ranks recorded different steps",
            field=str(folder),
            got=f"steps {sorted(steps)}",
            remedy="Call before_step once per optimizer step on every rank",
        )


def _read_boxes(info: Mapping[str, Any]) -> list[ShardBox]:
    return [ShardBox(*(tuple(part) for part in box)) for box in info["boxes"]]


def _narrow(
    tensor: Tensor, start: Sequence[int], size: Sequence[int], key: str, folder: Path
) -> Tensor:
    part = tensor
    try:
        for dim, (first, length) in enumerate(zip(start, size, strict=True)):
            part = part.narrow(dim, first, length)
    except (RuntimeError, ValueError, IndexError) as error:
        raise AuditInputError(
            f"{key} of shape {list(tensor.shape)} has no box {list(start)} + {list(size)}",
            field=str(folder),
            remedy="Correct the shard information given to the recorder",
        ) from error
    return part


def _check_tiling(name: str, shape: Sequence[int], boxes: Sequence[ShardBox], folder: Path) -> None:
    """Check that the boxes of all ranks cover the parameter once."""
    for one, other in combinations(boxes, 2):
        if all(
            a < b + m and b < a + n
            for a, n, b, m in zip(
                one.global_start, one.size, other.global_start, other.size, strict=True
            )
        ):
            raise AuditInputError(
                f"shards of {name} overlap: {list(one.global_start)} + {list(one.size)} and "
                f"{list(other.global_start)} + {list(other.size)}",
                field=str(folder),
                remedy="Correct the shard information given to the recorder",
            )
    covered = sum(math.prod(box.size) for box in boxes)
    if covered != math.prod(shape):
        raise AuditInputError(
            f"shards of {name} leave a gap: {covered} of {math.prod(shape)} elements",
            field=str(folder),
            remedy="Record every rank, and correct the shard information given to the recorder",
        )
