"""Where a trained model is read from: a run folder with its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import ModelShape, read_config
from shardwright.checkpoint.commit import BEST, LATEST, read_pointer, step_folders
from shardwright.checkpoint.load import newest_checkpoint, open_checkpoint, read_tensor
from shardwright.checkpoint.place import Place
from shardwright.checkpoint.verify import WholeCheckpoint
from shardwright.data.tokenize import load_tokenizer
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import CheckpointError, InputError, TokenizerError
from shardwright.model.decoder import Decoder
from shardwright.model.load import WeightsFolder
from shardwright.train.folder import RunFolder

MODEL_PREFIX = "model."
"""What a run's checkpoints put before the names of its weights."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes by the recipe's words."""


@dataclass(frozen=True)
class ModelSource:
    """A trained model, not yet in memory.

    `read` gives one whole parameter by name, as it is stored. `dtype` is the precision that it was trained in (a run) or is
    stored in (a folder). `generation_config` is that of the folder, or of the folder that the run began from.
    """

    name: str
    shape: ModelShape
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    tokenizer_folder: Path
    step: int | None = None
    generation_config: dict[str, Any] | None = None

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with.

        Raises:
            TokenizerError: it is absent, or has ids that the model does not.
        """
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
        """Ids that end a text: the tokenizer's, and those of the generation config."""
        named = (self.generation_config or {}).get("eos_token_id")
        ids = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
        return frozenset(index for index in ids if isinstance(index, int))


def open_source(path: str | Path, checkpoint: str = LATEST) -> ModelSource:
    """The model of a run folder, at a checkpoint, or of a Hugging Face folder; headers are read, and hashes of checkpoints.

    Args:
        checkpoint: `latest`, `best`, or the number of a step.

    Raises:
        InputError: neither kind of folder, no such checkpoint, or what it holds is damaged or does not fit.
    """
    path = Path(path)
    if RunFolder(path).recipe.is_file():
        return _open_run(RunFolder.existing(path), checkpoint)
    if not (path / "config.json").is_file():
        raise InputError(
            "no model here",
            field="SOURCE",
            got=str(path),
            allowed="a run folder (recipe.yaml), or a Hugging Face folder (config.json)",
        )
    if checkpoint != LATEST:
        raise InputError("a Hugging Face folder has no checkpoints", field="--checkpoint", got=checkpoint, remedy="Leave it out")
    shape, weights = read_config(path), WeightsFolder(path)
    weights.check(shape)
    dtype = weights.dtype_of(weights.tensor_names[0])
    return ModelSource(
        name=str(path),
        shape=shape,
        read=weights.read,
        dtype=dtype,
        tokenizer_folder=path,
        generation_config=_read_generation_config(path),
    )


def _open_run(folder: RunFolder, checkpoint: str) -> ModelSource:
    recipe, shape = folder.load_recipe(), read_config(folder.config)
    found = find_checkpoint(folder.checkpoints, checkpoint)
    stored = {name for name in found.manifest.tensors if name.startswith(MODEL_PREFIX)}
    wanted = {f"{MODEL_PREFIX}{spec.name}": spec.shape for spec in shape.parameters()}
    wrong = sorted(stored ^ set(wanted)) + [n for n in stored & set(wanted) if found.manifest.tensors[n].shape != wanted[n]]
    if wrong:
        raise CheckpointError(f"its weights are not those of config.json: {', '.join(wrong[:20])}", field=str(found.path))
    return ModelSource(
        name=str(folder.path),
        shape=shape,
        read=lambda name: read_tensor(found, f"{MODEL_PREFIX}{name}"),
        dtype=DTYPES[recipe.precision.kind],
        tokenizer_folder=folder.tokenizer,
        step=found.step,
        generation_config=_read_generation_config(Path(recipe.model.path)) if recipe.model.path else None,
    )


def find_checkpoint(root: Place, wanted: str) -> WholeCheckpoint:
    """A checkpoint of a run, every byte hashed.

    Raises:
        CheckpointError: there is none of that name, or it is damaged.
    """
    steps = {folder.step: folder.path for folder in step_folders(root)}  # ascending: of a step saved twice the last attempt
    if wanted == LATEST:
        newest = newest_checkpoint(root)
        if newest is not None:
            return newest
    elif wanted == BEST:
        best = read_pointer(root, BEST)
        if best is not None:
            return open_checkpoint(best.path)
    elif wanted.isdecimal() and int(wanted) in steps:
        return open_checkpoint(steps[int(wanted)])
    raise CheckpointError(
        "no such checkpoint",
        field="--checkpoint",
        got=wanted,
        allowed=", ".join(["latest", "best", *map(str, steps)]) if steps else None,
        remedy=None if steps else f"{root} holds no checkpoint",
    )


def load_decoder(source: ModelSource, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The model in memory, in one dtype throughout, ready for evaluation."""
    with torch.device("meta"):
        decoder = Decoder(source.shape).to(dtype)
    decoder = decoder.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(source.read(name))
    return decoder.eval().requires_grad_(False)


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("no such device", field="--device", got=name, allowed="auto, cpu, cuda, cuda:0, ...") from error
    there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if not there:
        raise InputError("this machine has no such device", field="--device", got=name, allowed="auto or cpu")
    return device


def choose_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """A dtype by the recipe's word; `auto` takes the default."""
    if name == "auto":
        return default
    if name not in DTYPES:
        raise InputError("no such precision", field="--dtype", got=name, allowed=", ".join(["auto", *DTYPES]))
    return DTYPES[name]


def _read_generation_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", field=str(path)) from error
    return content if isinstance(content, dict) else None
