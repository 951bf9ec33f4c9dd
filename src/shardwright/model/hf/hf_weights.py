"""Weights of a Hugging Face folder, read slice by slice.

A folder contains `model.safetensors`, or several files listed in
`model.safetensors.index.json`. `WeightsFolder.check` compares the files' headers with the model
before any rank allocates memory; `WeightsFolder.read` then reads only the bytes of a slice.
Nothing is unpickled.
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

from shardwright.architecture import HFShape, ModelShape, ParameterSpec
from shardwright.errors import WeightsError
from shardwright.files import open_regular_file, read_text
from shardwright.model.weight_init import DimRanges, resolve_bounds

WEIGHTS_FILE_NAME = "model.safetensors"
INDEX_FILE_NAME = "model.safetensors.index.json"

INERT_TENSORS = (
    r"\.rotary_emb\.inv_freq$",  # rotary frequencies, recomputed from the config
    r"\.attn\.bias$",  # gpt2: the causal mask
    r"\.attn\.masked_bias$",  # gpt2: the value of masked scores
    r"\.attention\.bias$",  # gpt_neox: the causal mask
    r"\.attention\.masked_bias$",  # gpt_neox: the value of masked scores
)
"""Buffers in files of older releases that our decoder does not need.

Any other surplus tensor is an error.
"""

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_MAX_LISTED = 20
_COMPARED_CHUNK_ELEMENTS = 1 << 24

logger = logging.getLogger(__name__)


class WeightsFolder:
    """Folder of safetensors files; opening it reads headers, tensors are read on demand.

    Raises:
        WeightsError: no safetensors in the folder, a damaged or truncated file, an index that
            does not fit its files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = {name: _open_file(self.path / name) for name in _list_weight_files(self.path)}
        self._file_of: dict[str, str] = {}
        for file_name, file in self._files.items():
            for tensor_name in file.keys():  # noqa: SIM118 - not a dict
                first_file = self._file_of.setdefault(tensor_name, file_name)
                if first_file != file_name:
                    raise WeightsError(
                        f"{tensor_name} is in both {first_file} and {file_name}",
                        field=str(self.path),
                    )
        self._stored_names: dict[str, str] = {}
        self._stacks: dict[str, ParameterSpec] = {}
        _check_index(self.path, self._file_of)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors in the files, sorted."""
        return tuple(sorted(self._file_of))

    def shape_of(self, stored_name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, by its name in the file."""
        return tuple(self._slice(stored_name).get_shape())

    def dtype_of(self, stored_name: str) -> torch.dtype:
        """Return the dtype of a tensor, by its name in the file."""
        kind = self._slice(stored_name).get_dtype()
        if kind not in SAFETENSORS_DTYPES:
            raise WeightsError(
                f"{stored_name} is stored as {kind}",
                field=self._path_of(stored_name),
                allowed=", ".join(SAFETENSORS_DTYPES),
                remedy="Convert the weights to bf16, fp16 or fp32 first",
            )
        return SAFETENSORS_DTYPES[kind]

    def check(self, shape: ModelShape) -> None:
        """Check that the folder fits a model; call it before `read`, which uses its result.

        Stacked experts are separate tensors in files. A base model saved without its root
        (`layers.0...` for `model.layers.0...`) is accepted, as in transformers. A tied weight
        may be absent. If both are stored they must be equal; if only the tied name is stored,
        it is used for both.

        Raises:
            WeightsError: lists every tensor that is missing, surplus, of a wrong shape or
                unsupported dtype, or tied by the config but stored with different values.
        """
        self._stored_names = self._match(shape)
        specs = shape.list_parameters()
        pieces = [piece for spec in specs for piece in spec.file_slices]
        missing = [
            f"{piece.name} {list(piece.shape)}"
            for piece in pieces
            if piece.name not in self._stored_names
        ]
        used = set(self._stored_names.values())
        inert = {
            name
            for name in self._file_of
            if name not in used and any(re.search(p, f".{name}") for p in INERT_TENSORS)
        }
        surplus = [
            f"{name} {list(self.shape_of(name))}"
            for name in self.tensor_names
            if name not in used and name not in inert
        ]
        wrong = []
        sizes = {piece.name: piece.shape for piece in pieces}
        for name, stored in self._stored_names.items():
            expected = sizes[shape.tied_names.get(name, name)]
            if self.shape_of(stored) != expected:
                wrong.append(
                    f"{stored} is {list(self.shape_of(stored))}, the model expects {list(expected)}"
                )
            elif self._slice(stored).get_dtype() not in SAFETENSORS_DTYPES:
                wrong.append(
                    f"{stored} is stored as {self._slice(stored).get_dtype()}; "
                    f"supported: {', '.join(SAFETENSORS_DTYPES)}"
                )
        if not missing and not wrong:
            wrong += self._find_untied_values(shape)
        if missing or surplus or wrong:
            raise WeightsError(
                _format_groups({"missing": missing, "surplus": surplus, "wrong": wrong}),
                field=str(self.path),
                remedy=_build_remedy(shape, is_renamed=bool(missing and surplus)),
            )
        if inert:
            logger.info(
                "%s: ignored %d buffers without effect, such as %s",
                self.path,
                len(inert),
                min(inert),
            )
        self._stacks = {spec.name: spec for spec in specs if spec.file_patterns}
        for name, owner in shape.tied_names.items():
            # Only the head is stored; it is used for the embedding too.
            if self._stored_names.pop(name, None) == self._stored_names[owner]:
                logger.info(
                    "%s: %s is read from the tensor %s", self.path, owner, self._stored_names[owner]
                )

    def fingerprint(self) -> str:
        """Hash names, shapes, dtypes, and the first and last row of every tensor.

        Reading all values would take minutes. Training changes every tensor, so these rows are
        enough to tell weights apart.
        """
        digest = hashlib.sha256()
        for name in self.tensor_names:
            part = self._slice(name)
            size = part.get_shape()
            digest.update(repr((name, size, part.get_dtype())).encode())
            if size and size[0]:
                for row in (part[:1], part[size[0] - 1 :]):
                    digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def read(
        self,
        name: str,
        *,
        narrow: DimRanges | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Read a parameter or a slice of it, in `dtype` or else as stored.

        Args:
            name: the model's name of the parameter; `check` maps it to the name in the file.
            narrow: (start, length) per dim, or None for the whole dim; only these bytes are
                read.
        """
        if name in self._stacks:
            return self._read_stack(self._stacks[name], narrow, dtype).to(device=device)
        stored = self._stored_names.get(name, name)
        if stored not in self._file_of:
            raise WeightsError(f"no tensor {name}", field=str(self.path))
        bounds = resolve_bounds(name, self.shape_of(stored), narrow)
        self.dtype_of(stored)
        try:
            return _read_slice(self._slice(stored), bounds).to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{stored} cannot be read: {error}", field=self._path_of(stored)
            ) from error

    def _read_stack(
        self, spec: ParameterSpec, narrow: DimRanges | None, dtype: torch.dtype | None
    ) -> Tensor:
        """Read stacked experts, or a slice of them, from the tensors of single experts."""
        bounds = resolve_bounds(spec.name, spec.shape, narrow)
        if dtype is None:
            dtype = self.dtype_of(self._stored_names[spec.file_slices[0].name])
        stack = torch.empty([stop - start for start, stop in bounds], dtype=dtype)
        for piece in spec.file_slices:
            overlap = piece.intersect(bounds)
            if overlap is None:
                continue
            inside = [
                (a - first, b - a)
                for (a, b), (first, _) in zip(overlap[1:], piece.box[1:], strict=True)
            ]
            target = tuple(
                slice(a - start, b - start)
                for (a, b), (start, _) in zip(overlap, bounds, strict=True)
            )
            stack[target] = self.read(piece.name, narrow=inside, dtype=dtype)
        return stack

    def _match(self, shape: ModelShape) -> dict[str, str]:
        """Map the model's names to the files' names, for tensors that are in the files."""
        root = f"{shape.names.root}."
        names = [
            piece.name for spec in shape.list_parameters() for piece in spec.file_slices
        ] + list(shape.tied_names)
        stored_names = {name: name for name in names if name in self._file_of}
        rootless = {name: name.removeprefix(root) for name in names if name.startswith(root)}
        stored_names |= {
            name: short
            for name, short in rootless.items()
            if name not in stored_names and short in self._file_of
        }
        if any(stored != name for name, stored in stored_names.items()):
            logger.info("%s is a base model: its names lack the root `%s`", self.path, root)
        for name, owner in shape.tied_names.items():
            if owner not in stored_names and name in stored_names:
                stored_names[owner] = stored_names[name]
        return stored_names

    def _find_untied_values(self, shape: ModelShape) -> list[str]:
        """List weights that the config ties but that are stored with different values."""
        untied = []
        for name, owner in shape.tied_names.items():
            head = self._stored_names.get(name)
            embedding = self._stored_names[owner]
            if head is None or head == embedding:
                continue
            num_rows, *rest = self.shape_of(embedding)
            step = max(1, _COMPARED_CHUNK_ELEMENTS // max(1, *rest))
            head_slice = self._slice(head)
            embedding_slice = self._slice(embedding)
            starts = range(0, num_rows, step)
            if not all(
                torch.equal(head_slice[row : row + step], embedding_slice[row : row + step])
                for row in starts
            ):
                untied.append(
                    f"{head} differs from {embedding}, but the config ties them "
                    "(tie_word_embeddings: false unties them)"
                )
        return untied

    def find_file(self, name: str) -> tuple[Path, str]:
        """Return the file with a tensor, by the model's name of it, and its name there."""
        stored = self._stored_names.get(name, name)
        return self.path / self._file_of[stored], stored

    def _slice(self, stored_name: str) -> Any:
        return self._files[self._file_of[stored_name]].get_slice(stored_name)

    def _path_of(self, stored_name: str) -> str:
        return str(self.path / self._file_of[stored_name])


def _read_slice(tensor: Any, bounds: Sequence[tuple[int, int]]) -> Tensor:
    if not bounds:  # a scalar has no dimension to slice
        return tensor[...]
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def _build_remedy(shape: ModelShape, *, is_renamed: bool) -> str:
    """Return what to do about tensors that are not those of the model."""
    if is_renamed and isinstance(shape, HFShape):
        return (
            f"If transformers renames or joins tensors when {shape.class_name} loads them, write "
            "the class's own: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder, save_original_format=False)"
        )
    return "config.json must describe exactly the tensors in the files"


def _list_weight_files(folder: Path) -> list[str]:
    """List the names of a folder's weight files."""
    if not folder.is_dir():
        raise WeightsError("no such folder", field=str(folder))
    if (folder / WEIGHTS_FILE_NAME).exists():
        return [WEIGHTS_FILE_NAME]
    if (folder / INDEX_FILE_NAME).exists():
        return sorted(set(_read_index(folder).values()))
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED_SUFFIXES)
    if pickled:
        raise WeightsError(
            f"the weights are pickled ({pickled[0]}), and reading a pickle runs the code in it",
            field=str(folder),
            allowed=f"{WEIGHTS_FILE_NAME}, or {INDEX_FILE_NAME} with its files",
            remedy="If you trust them, convert them once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise WeightsError(
        "the folder has no weights",
        field=str(folder),
        allowed=f"{WEIGHTS_FILE_NAME}, or {INDEX_FILE_NAME} with its files",
        remedy="Set model.init to random to start from scratch",
    )


def _read_index(folder: Path) -> dict[str, str]:
    """Read the index: tensor name -> file name, with every file in the folder."""
    path = folder / INDEX_FILE_NAME
    try:
        weight_map = json.loads(read_text(path))["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"not a weights index: {type(error).__name__}: {error}", field=str(path)
        ) from error
    for file in sorted(set(entries.values())):
        # Checks the path's text only: files of a download cache are links to outside the
        # folder, which is fine.
        parts = PurePosixPath(file.replace("\\", "/")).parts
        if not parts or ".." in parts or Path(file).is_absolute() or parts[0] == "/":
            raise WeightsError(
                "names a file outside the folder",
                field=str(path),
                got=file,
                allowed="files of this folder",
            )
        if Path(file).suffix != ".safetensors":
            raise WeightsError(
                "lists a file that is not in safetensors format",
                field=str(path),
                got=file,
                allowed="*.safetensors",
            )
    if not entries:
        raise WeightsError("the index lists no tensors", field=str(path))
    return entries


def _check_index(folder: Path, file_of: dict[str, str]) -> None:
    """Check that every tensor of the index is in the file that the index names."""
    if (folder / WEIGHTS_FILE_NAME).exists():
        return
    index = _read_index(folder)
    misplaced = [
        f"{name}: {file}" for name, file in sorted(index.items()) if file_of.get(name) != file
    ]
    if misplaced:
        raise WeightsError(
            _format_groups({"not in the file that the index names": misplaced}),
            field=str(folder / INDEX_FILE_NAME),
        )


def _open_file(path: Path) -> Any:
    try:
        open_regular_file(path).close()  # refuses a FIFO, on which safe_open would block
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise WeightsError(
            "the file is missing",
            field=str(path),
            remedy=f"{INDEX_FILE_NAME} lists this file: copy it into the folder",
        ) from error
    except (SafetensorError, OSError) as error:
        if _is_pointer(path):
            raise WeightsError(
                "this file is a Git LFS pointer, not the weights",
                field=str(path),
                remedy="Run `git lfs pull`",
            ) from error
        raise WeightsError(
            f"damaged, truncated or not a safetensors file: {error}",
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


def _format_groups(groups: dict[str, list[str]]) -> str:
    parts = []
    for title, items in groups.items():
        if items:
            rest = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
            parts.append(f"{len(items)} {title}: {', '.join(items[:_MAX_LISTED])}{rest}")
    return "; ".join(parts)
