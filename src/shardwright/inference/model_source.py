"""Sources of trained models: run folders with checkpoints, and Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import AdapterShape, ModelShape
from shardwright.checkpoint.commit import BEST_NAME, LATEST_NAME, list_step_folders, read_pointer
from shardwright.checkpoint.integrity import VerifiedCheckpoint
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.run_values import RunIdentity
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.checkpoint.tensor_loading import (
    find_newest_checkpoint,
    open_checkpoint,
    read_run_values,
    read_tensor,
)
from shardwright.config import Recipe
from shardwright.config.model import ModelSection
from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.data.tokens.tokenizer_loading import has_tokenizer, load_tokenizer
from shardwright.errors import CheckpointError, InputError, TokenizerError
from shardwright.model.decoder import Decoder
from shardwright.model.hf.exported_tensors import choose_stored_dtype
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.hf.hf_folder import read_generation_config
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.products.nf4 import read_packed_slice
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.precision import resolve_dtypes

MODEL_PREFIX = "model."
"""Prefix of the weights' names in a run's checkpoints."""

_MAX_STEP_DIGITS = 18
"""Maximum digits of a step on the command line; int() fails above 4,300."""

DTYPE_OF_PRECISION = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Dtypes by their names in the recipe."""


@dataclass(frozen=True)
class ModelSource:
    """Trained model, not yet in memory.

    Attributes:
        read: Returns one whole parameter by name, as stored.
        dtype: Precision of the training (run) or of the files (folder).
        generation_config: That of the folder. A run has that of the model that it started from.
        base: Folder of the base model under adapters; None for a base initialised from a seed.
        read_full_precision: Like `read`, with a quantised base in its original precision.
        needs_tokenizer: True if the model was trained with a tokenizer.
    """

    name: str
    shape: ModelShape
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    tokenizer_folder: Path
    step: int | None = None
    generation_config: dict[str, Any] | None = None
    base: str | None = None
    read_full_precision: Callable[[str], Tensor] | None = None
    needs_tokenizer: bool = False

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer. A model trained on token ids may have none."""
        return self.needs_tokenizer or has_tokenizer(self.tokenizer_folder)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the model was trained with.

        Raises:
            TokenizerError: It is missing, or has ids outside the model's vocabulary.
        """
        if not self.has_tokenizer:
            raise TokenizerError(
                "this model has no tokenizer, which text input and output need",
                field="RUN",
                got=f"nothing in {self.tokenizer_folder}",
                allowed="tokenizer.json, or vocab.json and merges.txt",
                remedy="Put the tokenizer that made its token ids in that folder",
            )
        tokenizer = load_tokenizer(self.tokenizer_folder)
        if tokenizer.vocab_size > self.shape.vocab_size:
            raise TokenizerError(
                "the tokenizer has more ids than the model's vocabulary",
                field=str(self.tokenizer_folder),
                got=tokenizer.vocab_size,
                allowed=f"at most {self.shape.vocab_size}",
            )
        return tokenizer

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the ids that end a text: the tokenizer's and the generation config's."""
        config_ids = (self.generation_config or {}).get("eos_token_id")
        ids = {tokenizer.eos_id, *(config_ids if isinstance(config_ids, list) else [config_ids])}
        return frozenset(index for index in ids if isinstance(index, int))


def open_model_source(path: str | Path, checkpoint: str = LATEST_NAME) -> ModelSource:
    """Open the model of a run folder's checkpoint, or of a Hugging Face folder.

    Reads headers, and hashes the files of checkpoints.

    Args:
        checkpoint: `latest`, `best`, or the number of a step.

    Raises:
        InputError: Neither kind of folder, no such checkpoint, damaged or mismatched content.
    """
    path = Path(path)
    if RunFolder(path).recipe_path.is_file():
        return _open_run(RunFolder.open_existing(path), checkpoint)
    if not (path / "config.json").is_file():
        adapters = (path / "adapter_config.json").is_file()
        raise InputError(
            "this folder has adapters but no model" if adapters else "no model in this folder",
            field="RUN",
            got=str(path),
            allowed="a run folder (recipe.yaml), or a Hugging Face folder (config.json)",
            remedy="Name the run that trained them, or the folder written by `export --merge`"
            if adapters
            else None,
        )
    if checkpoint != LATEST_NAME:
        raise InputError(
            "a Hugging Face folder has no checkpoints",
            field="--checkpoint",
            got=checkpoint,
            remedy="Remove it",
        )
    shape = read_model_shape(path, ModelSection(path=str(path), dropout="off"))
    weights = WeightsFolder(path)
    weights.check(shape)
    dtype = weights.dtype_of(weights.tensor_names[0])
    return ModelSource(
        name=str(path),
        shape=shape,
        read=weights.read,
        dtype=dtype,
        tokenizer_folder=path,
        generation_config=read_generation_config(path),
    )


def _open_run(folder: RunFolder, checkpoint: str) -> ModelSource:
    recipe = folder.load_recipe()
    shape = read_model_shape(folder.config_path, recipe.model.model_copy(update={"dropout": "off"}))
    opened = find_checkpoint(folder.checkpoints, checkpoint)
    run = read_run_values(opened).run
    shape = replace(shape, adapters=_read_adapters(run))
    base = (
        None
        if run.adapters is None or run.base is None
        else open_adapter_base(recipe, shape, run.base)
    )
    stored = {name for name in opened.manifest.tensors if name.startswith(MODEL_PREFIX)}
    specs = [
        spec for spec in shape.list_parameters() if base is None or spec.adapter_part is not None
    ]
    expected = {f"{MODEL_PREFIX}{spec.name}": spec.shape for spec in specs}
    wrong = sorted(stored ^ set(expected)) + [
        n for n in stored & set(expected) if opened.manifest.tensors[n].shape != expected[n]
    ]
    if wrong:
        raise CheckpointError(
            f"its weights do not match config.json: {', '.join(wrong[:20])}", field=str(opened.path)
        )

    def read(name: str) -> Tensor:
        stored_name = f"{MODEL_PREFIX}{name}"
        return (
            read_tensor(opened, stored_name)
            if base is None or stored_name in expected
            else base.read_stored(name)
        )

    def read_plain(name: str) -> Tensor:
        stored_name = f"{MODEL_PREFIX}{name}"
        return (
            read_tensor(opened, stored_name)
            if base is None or stored_name in expected
            else base.read_full_precision(name)
        )

    return ModelSource(
        name=str(folder.path),
        shape=shape,
        read=read,
        dtype=resolve_dtypes(recipe.precision).compute,
        tokenizer_folder=folder.tokenizer_path,
        step=opened.step,
        generation_config=read_generation_config(folder.path),
        base=recipe.model.path if recipe.model.is_pretrained else None,
        read_full_precision=read_plain,
        needs_tokenizer=recipe.tokenizer.kind != "huggingface" or recipe.tokenizer.path is not None,
    )


def _read_adapters(run: RunIdentity) -> AdapterShape | None:
    """Read the shape of adapters from a checkpoint, as their initial folder may be gone."""
    if run.adapters is None:
        return None
    return AdapterShape(
        **(run.adapters.model_dump() | {"modules": frozenset(run.adapters.modules)})
    )


class AdapterBase:
    """Frozen base weights under adapters: in full precision (`read_full_precision`), as trained
    (`read_stored`).
    """

    def __init__(
        self, shape: ModelShape, read: Callable[[str, Sequence[tuple[int, int]]], Tensor]
    ) -> None:
        self._specs = {spec.name: spec for spec in shape.list_parameters()}
        self._read = read

    def read_full_precision(self, name: str) -> Tensor:
        """Read a whole parameter in the precision of its file."""
        spec = self._specs[name].packed_matrix or self._specs[name]
        return self._read(name, [(0, size) for size in spec.shape])

    def read_stored(self, name: str) -> Tensor:
        """Read a whole parameter as stored in training, packed if it is quantised."""
        spec = self._specs[name]
        if spec.packed_matrix is None:
            return self.read_full_precision(name)
        return read_packed_slice(spec.packed_matrix, [(0, size) for size in spec.shape], self._read)


def open_adapter_base(recipe: Recipe, shape: ModelShape, fingerprint: str) -> AdapterBase:
    """Open the base model of a run that trains adapters.

    Raises:
        CheckpointError: There is no such folder, or its weights are not those of the training.
    """
    if not recipe.model.is_pretrained:
        specs = {spec.name: spec.packed_matrix or spec for spec in shape.list_parameters()}
        dtype = resolve_dtypes(recipe.precision).param
        return AdapterBase(
            shape,
            lambda name, narrow: initialise_parameter(
                specs[name], recipe.seed, dtype=dtype, narrow=narrow
            ),
        )
    assert recipe.model.path is not None
    if not Path(recipe.model.path).is_dir():
        raise CheckpointError(
            "the folder of the base model, which the adapters need, does not exist",
            field="model.path",
            got=recipe.model.path,
            remedy=f"Relative paths start at {Path.cwd()}. If the folder was moved, correct "
            "model.path in recipe.yaml of the run",
        )
    weights = WeightsFolder(recipe.model.path)
    weights.check(shape.base_shape)
    actual = weights.fingerprint()
    if actual != fingerprint:
        raise CheckpointError(
            "the base weights differ from those with which the adapters were trained",
            field=recipe.model.path,
            got=actual,
            allowed=fingerprint,
            remedy="Restore the base weights of the training in this folder",
        )
    return AdapterBase(shape, lambda name, narrow: weights.read(name, narrow=narrow))


def find_checkpoint(root: StoragePath, name: str) -> VerifiedCheckpoint:
    """Find a checkpoint of a run and verify the hashes of all its bytes.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    # Ascending, so that the last attempt remains of a step that was saved twice.
    steps = {folder.step: folder.path for folder in list_step_folders(root)}
    if name == LATEST_NAME:
        newest = find_newest_checkpoint(root)
        if newest is not None:
            return newest
    elif name == BEST_NAME:
        best = read_pointer(root, BEST_NAME)
        if best is not None:
            return open_checkpoint(best.path)
    elif name.isdecimal() and len(name) <= _MAX_STEP_DIGITS and int(name) in steps:
        return open_checkpoint(steps[int(name)])
    raise CheckpointError(
        "no such checkpoint",
        field="--checkpoint",
        got=name,
        allowed=", ".join(["latest", "best", *map(str, steps)]) if steps else None,
        remedy=None if steps else f"{root} has no checkpoint",
    )


def load_decoder(source: ModelSource, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load the model into memory, in evaluation mode, with the dtypes of a folder of `dtype`."""
    with torch.device("meta"):
        decoder = build_decoder(source.shape).to(dtype)
    specs = {spec.name: spec for spec in source.shape.list_parameters()}
    for name, parameter in decoder.named_parameters():
        if (stored_dtype := choose_stored_dtype(specs[name], dtype)) != dtype:
            parameter.data = parameter.data.to(stored_dtype)
    decoder = decoder.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(source.read(name))
    return decoder.eval().requires_grad_(False)


def parse_device(name: str) -> torch.device:
    """Parse a device name and check that the device exists; `auto` prefers CUDA.

    Raises:
        InputError: The device is unknown or not on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            "unknown device", field="--device", got=name, allowed="auto, cpu, cuda, cuda:0, ..."
        ) from error
    is_available = device.type == "cpu" or (
        device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    )
    if not is_available:
        raise InputError(
            "this machine has no such device",
            field="--device",
            got=name,
            allowed="auto or cpu",
        )
    return device


def parse_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """Parse the recipe's name of a precision; `auto` returns the default.

    Raises:
        InputError: The precision is unknown.
    """
    if name == "auto":
        return default
    if name not in DTYPE_OF_PRECISION:
        raise InputError(
            "unknown precision",
            field="--dtype",
            got=name,
            allowed=", ".join(["auto", *DTYPE_OF_PRECISION]),
        )
    return DTYPE_OF_PRECISION[name]
