"""Weights of a Hugging Face folder, read slice by slice.

A folder holds `model.safetensors`, or several files named by `model.safetensors.index.json`. `WeightsFolder.check` holds what
the headers say against what the model needs, before any rank allocates; `WeightsFolder.read` then touches only the bytes of the
slice it is asked for. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwright.architecture import ModelShape, ParameterSpec
from shardwright.errors import WeightsError
from shardwright.model.init import Narrow, slice_bounds

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

INERT_TENSORS = (
    r"\.rotary_emb\.inv_freq$",  # rotary frequencies, recomputed from the config
    r"\.attn\.bias$",  # gpt2: the causal mask
    r"\.attn\.masked_bias$",  # gpt2: the number that masks
    r"\.attention\.bias$",  # gpt_neox: the causal mask
    r"\.attention\.masked_bias$",  # gpt_neox: the number that masks
)
"""Buffers that older releases wrote to file and that no decoder of ours reads; anything else that is surplus is an error."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SHOWN = 20
_COMPARED_ELEMENTS = 1 << 24

logger = logging.getLogger(__name__)


class WeightsFolder:
    """A folder of safetensors, opened by header; tensors are read on demand.

    Raises:
        WeightsError: no safetensors in the folder, a damaged or truncated file, an index that does not fit its files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = {name: _open(self.path / name) for name in _weight_files(self.path)}
        self._file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for tensor_name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                other = self._file_of.setdefault(tensor_name, file_name)
                if other != file_name:
                    raise WeightsError(f"{tensor_name} stands in {other} and again in {file_name}", field=str(self.path))
        self._stored_as: dict[str, str] = {}
        self._stacks: dict[str, ParameterSpec] = {}
        _check_index(self.path, self._file_of)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names as they stand in the files, sorted."""
        return tuple(sorted(self._file_of))

    def shape_of(self, stored_name: str) -> tuple[int, ...]:
        """Shape of a tensor under the name that the file uses."""
        return tuple(self._slice(stored_name).get_shape())

    def dtype_of(self, stored_name: str) -> torch.dtype:
        """Dtype of a tensor under the name that the file uses."""
        kind = self._slice(stored_name).get_dtype()
        if kind not in _DTYPES:
            raise WeightsError(
                f"{stored_name} is stored as {kind}",
                field=self._where(stored_name),
                allowed=", ".join(_DTYPES),
                remedy="Convert the weights to bf16, fp16 or fp32 first",
            )
        return _DTYPES[kind]

    def check(self, shape: ModelShape) -> None:
        """Hold the folder against a model; must come before `read`, which uses the names found here.

        Stacked experts are looked for one by one, as files hold them.

        A base model saved without its root (`layers.0...` for `model.layers.0...`) is taken, as transformers takes it. A tied
        weight may be absent; where it is stored as well it must equal its owner, and where only it is stored it serves as both.

        Raises:
            WeightsError: one error that lists every tensor that is missing, surplus, mis-shaped, of a dtype we do not read, or
                tied by the config but stored with different values.
        """
        self._stored_as = self._match(shape)
        specs = shape.parameters()
        pieces = [piece for spec in specs for piece in spec.pieces]
        missing = [f"{piece.name} {list(piece.shape)}" for piece in pieces if piece.name not in self._stored_as]
        used = set(self._stored_as.values())
        inert = {name for name in self._file_of if name not in used and any(re.search(p, f".{name}") for p in INERT_TENSORS)}
        surplus = [f"{name} {list(self.shape_of(name))}" for name in self.tensor_names if name not in used and name not in inert]
        wrong = []
        sizes = {piece.name: piece.shape for piece in pieces}
        for name, stored in self._stored_as.items():
            wanted = sizes[shape.tied.get(name, name)]
            if self.shape_of(stored) != wanted:
                wrong.append(f"{stored} is {list(self.shape_of(stored))}, the model wants {list(wanted)}")
            elif self._slice(stored).get_dtype() not in _DTYPES:
                wrong.append(f"{stored} is stored as {self._slice(stored).get_dtype()}; we read {', '.join(_DTYPES)}")
        if not missing and not wrong:
            wrong += self._tied_apart(shape)
        if missing or surplus or wrong:
            raise WeightsError(
                _listed({"missing": missing, "surplus": surplus, "wrong": wrong}),
                field=str(self.path),
                remedy="The config.json must describe exactly the tensors in the files",
            )
        if inert:
            logger.info("%s: left %d inert buffers unread, %s for one", self.path, len(inert), min(inert))
        self._stacks = {spec.name: spec for spec in specs if spec.stored}
        for name, owner in shape.tied.items():
            # Only the head was stored: it is the one matrix of both.
            if self._stored_as.pop(name, None) == self._stored_as[owner]:
                logger.info("%s: %s is read from the tensor %s", self.path, owner, self._stored_as[owner])

    def fingerprint(self) -> str:
        """A hash that tells these weights from others: names, shapes, dtypes, and the first and last row of every tensor.

        Reading everything would take minutes; whoever trains a model moves all of its tensors.
        """
        told = hashlib.sha256()
        for name in self.tensor_names:
            part = self._slice(name)
            size = part.get_shape()
            told.update(repr((name, size, part.get_dtype())).encode())
            if size and size[0]:
                for row in (part[:1], part[size[0] - 1 :]):
                    told.update(row.contiguous().view(torch.uint8).numpy().tobytes())
        return told.hexdigest()[:16]

    def read(
        self,
        name: str,
        *,
        narrow: Narrow | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A parameter, or the slice of it that a rank holds, in a requested dtype, or as it is stored.

        Args:
            name: the model's name for it (`check` found what the file calls it).
            narrow: per dimension (start, length), or None for all of it; only these bytes are read.
        """
        if name in self._stacks:
            return self._read_stack(self._stacks[name], narrow, dtype).to(device=device)
        stored = self._stored_as.get(name, name)
        if stored not in self._file_of:
            raise WeightsError(f"no tensor {name}", field=str(self.path))
        bounds = slice_bounds(name, self.shape_of(stored), narrow)
        self.dtype_of(stored)
        try:
            return _take(self._slice(stored), bounds).to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{stored} cannot be read: {error}", field=self._where(stored)) from error

    def _read_stack(self, spec: ParameterSpec, narrow: Narrow | None, dtype: torch.dtype | None) -> Tensor:
        """A stack of experts, or the slice of it that a rank holds, from the tensors of the single experts."""
        bounds = slice_bounds(spec.name, spec.shape, narrow)
        if dtype is None:
            dtype = self.dtype_of(self._stored_as[spec.pieces[0].name])
        stack = torch.empty([stop - start for start, stop in bounds], dtype=dtype)
        for piece in spec.pieces:
            common = piece.meet(bounds)
            if common is None:
                continue
            inside = [(a - first, b - a) for (a, b), (first, _) in zip(common[1:], piece.box[1:], strict=True)]
            target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
            stack[target] = self.read(piece.name, narrow=inside, dtype=dtype)
        return stack

    def _match(self, shape: ModelShape) -> dict[str, str]:
        """The model's names -> the files' names, for those that the files hold."""
        root = f"{shape.names.root}."
        names = [piece.name for spec in shape.parameters() for piece in spec.pieces] + list(shape.tied)
        found = {name: name for name in names if name in self._file_of}
        rootless = {name: name.removeprefix(root) for name in names if name.startswith(root)}
        found |= {name: short for name, short in rootless.items() if name not in found and short in self._file_of}
        if any(stored != name for name, stored in found.items()):
            logger.info("%s holds a base model: its names lack the root `%s`", self.path, root)
        for name, owner in shape.tied.items():
            if owner not in found and name in found:
                found[owner] = found[name]
        return found

    def _tied_apart(self, shape: ModelShape) -> list[str]:
        """Weights that the config ties but that are stored twice with different values."""
        apart = []
        for name, owner in shape.tied.items():
            head, embedding = self._stored_as.get(name), self._stored_as[owner]
            if head is None or head == embedding:
                continue
            num_rows, *rest = self.shape_of(embedding)
            step = max(1, _COMPARED_ELEMENTS // max(1, *rest))
            first, second = self._slice(head), self._slice(embedding)
            if not all(torch.equal(first[row : row + step], second[row : row + step]) for row in range(0, num_rows, step)):
                apart.append(f"{head} differs from {embedding}, which the config ties it to (tie_word_embeddings: false unties)")
        return apart

    def _slice(self, stored_name: str) -> Any:
        return self._files[self._file_of[stored_name]].get_slice(stored_name)

    def _where(self, stored_name: str) -> str:
        return str(self.path / self._file_of[stored_name])


def _take(tensor: Any, bounds: Sequence[tuple[int, int]]) -> Tensor:
    if not bounds:  # a scalar has no dimension to slice
        return tensor[...]
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def _weight_files(folder: Path) -> list[str]:
    """File names of a folder's weights, relative to it."""
    if not folder.is_dir():
        raise WeightsError("no such folder", field=str(folder))
    if (folder / WEIGHTS_NAME).exists():
        return [WEIGHTS_NAME]
    if (folder / INDEX_NAME).exists():
        return sorted(set(_read_index(folder).values()))
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED_SUFFIXES)
    if pickled:
        raise WeightsError(
            f"the weights are pickled ({pickled[0]}), and opening a pickle runs the code in it",
            field=str(folder),
            allowed=f"{WEIGHTS_NAME}, or {INDEX_NAME} with its files",
            remedy="If you trust them, convert once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise WeightsError(
        "no weights here",
        field=str(folder),
        allowed=f"{WEIGHTS_NAME}, or {INDEX_NAME} with its files",
        remedy="Set model.init to random to start from scratch",
    )


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index; every file lies in the folder."""
    path = folder / INDEX_NAME
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"not an index of weights: {type(error).__name__}: {error}", field=str(path)) from error
    for file in sorted(set(entries.values())):
        # By its words only: the files of a download cache are links that lead out of the folder, and are welcome.
        parts = PurePosixPath(file.replace("\\", "/")).parts
        if not parts or ".." in parts or Path(file).is_absolute() or parts[0] == "/":
            raise WeightsError("names a file outside the folder", field=str(path), got=file, allowed="files of this folder")
        if Path(file).suffix != ".safetensors":
            raise WeightsError("names a file that is not safetensors", field=str(path), got=file, allowed="*.safetensors")
    if not entries:
        raise WeightsError("the index names no tensors", field=str(path))
    return entries


def _check_index(folder: Path, file_of: dict[str, str]) -> None:
    """Every tensor of the index stands in the file it names."""
    if (folder / WEIGHTS_NAME).exists():
        return
    index = _read_index(folder)
    astray = [f"{name}: {file}" for name, file in sorted(index.items()) if file_of.get(name) != file]
    if astray:
        raise WeightsError(_listed({"not in the file that the index names": astray}), field=str(folder / INDEX_NAME))


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise WeightsError("the file is missing", field=str(path), remedy=f"{INDEX_NAME} names it: copy it here") from error
    except (SafetensorError, OSError) as error:
        if _is_pointer(path):
            raise WeightsError("is a Git LFS pointer, not the weights", field=str(path), remedy="Run `git lfs pull`") from error
        raise WeightsError(
            f"damaged, truncated or no safetensors file: {error}",
            field=str(path),
            got=f"{path.stat().st_size} bytes",
            remedy="Copy or download it again",
        ) from error


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(24) == b"version https://git-lfs."
    except OSError:
        return False


def _listed(groups: dict[str, list[str]]) -> str:
    parts = []
    for title, items in groups.items():
        if items:
            rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            parts.append(f"{len(items)} {title}: {', '.join(items[:_SHOWN])}{rest}")
    return "; ".join(parts)
