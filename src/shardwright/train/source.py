"""Where a trained model is read from: a run folder with its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import AdapterShape, ModelShape
from shardwright.checkpoint.commit import BEST, LATEST, read_pointer, step_folders
from shardwright.checkpoint.load import newest_checkpoint, open_checkpoint, read_run_values, read_tensor
from shardwright.checkpoint.place import Place
from shardwright.checkpoint.values import RunIdentity
from shardwright.checkpoint.verify import WholeCheckpoint
from shardwright.config import Recipe
from shardwright.config.model import ModelSection
from shardwright.data.tokenize import has_tokenizer, load_tokenizer
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import CheckpointError, InputError, TokenizerError
from shardwright.files import read_text
from shardwright.model.decoder import Decoder
from shardwright.model.foreign import build_decoder
from shardwright.model.init import initialise
from shardwright.model.load import WeightsFolder
from shardwright.model.nf4 import packed_slice
from shardwright.model.theirs import read_shape
from shardwright.train.folder import RunFolder

MODEL_PREFIX = "model."
"""What a run's checkpoints put before the names of its weights."""

_MOST_DIGITS = 18
"""Of a step in a command; int() refuses more than 4,300."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes by the recipe's words."""


@dataclass(frozen=True)
class ModelSource:
    """A trained model, not yet in memory.

    `read` gives one whole parameter by name, as it is stored. `dtype` is the precision that it was trained in (a run) or is
    stored in (a folder). `generation_config` is that of the folder, or of the folder that the run began from. Where adapters were
    trained, `base` is the folder that they stand beside, None for a base that began from a seed, and `read_plain` gives what
    training may have held in fewer bits as it was before. `needs_tokenizer`: it was trained with one.
    """

    name: str
    shape: ModelShape
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    tokenizer_folder: Path
    step: int | None = None
    generation_config: dict[str, Any] | None = None
    base: str | None = None
    read_plain: Callable[[str], Tensor] | None = None
    needs_tokenizer: bool = False

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer. A model that was trained on token ids may have none."""
        return self.needs_tokenizer or has_tokenizer(self.tokenizer_folder)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with.

        Raises:
            TokenizerError: it is absent, or has ids that the model does not.
        """
        if not self.has_tokenizer:
            raise TokenizerError(
                "this model has no tokenizer, and text needs one",
                field="SOURCE",
                got=f"nothing in {self.tokenizer_folder}",
                allowed="tokenizer.json, or vocab.json and merges.txt",
                remedy="Put the tokenizer there that its token ids were made with",
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
        adapters = (path / "adapter_config.json").is_file()
        raise InputError(
            "adapters alone are no model" if adapters else "no model here",
            field="SOURCE",
            got=str(path),
            allowed="a run folder (recipe.yaml), or a Hugging Face folder (config.json)",
            remedy="Name the run that trained them, or the folder that `export --merge` made of it" if adapters else None,
        )
    if checkpoint != LATEST:
        raise InputError("a Hugging Face folder has no checkpoints", field="--checkpoint", got=checkpoint, remedy="Leave it out")
    shape, weights = read_shape(path, ModelSection(path=str(path), dropout="off")), WeightsFolder(path)
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
    recipe = folder.load_recipe()
    shape = read_shape(folder.config, recipe.model.model_copy(update={"dropout": "off"}))
    found = find_checkpoint(folder.checkpoints, checkpoint)
    run = read_run_values(found).run
    shape = replace(shape, adapters=_adapters_of(run))
    base = None if run.adapters is None or run.base is None else open_base(recipe, shape, run.base)
    stored = {name for name in found.manifest.tensors if name.startswith(MODEL_PREFIX)}
    specs = [spec for spec in shape.parameters() if base is None or spec.part is not None]
    wanted = {f"{MODEL_PREFIX}{spec.name}": spec.shape for spec in specs}
    wrong = sorted(stored ^ set(wanted)) + [n for n in stored & set(wanted) if found.manifest.tensors[n].shape != wanted[n]]
    if wrong:
        raise CheckpointError(f"its weights are not those of config.json: {', '.join(wrong[:20])}", field=str(found.path))

    def read(name: str) -> Tensor:
        stored_name = f"{MODEL_PREFIX}{name}"
        return read_tensor(found, stored_name) if base is None or stored_name in wanted else base.held(name)

    def read_plain(name: str) -> Tensor:
        stored_name = f"{MODEL_PREFIX}{name}"
        return read_tensor(found, stored_name) if base is None or stored_name in wanted else base.plain(name)

    return ModelSource(
        name=str(folder.path),
        shape=shape,
        read=read,
        dtype=DTYPES[recipe.precision.kind],
        tokenizer_folder=folder.tokenizer,
        step=found.step,
        generation_config=_read_generation_config(Path(recipe.model.path)) if recipe.model.path else None,
        base=recipe.model.path if recipe.model.pretrained else None,
        read_plain=read_plain,
        needs_tokenizer=recipe.tokenizer.kind != "huggingface" or recipe.tokenizer.path is not None,
    )


def _adapters_of(run: RunIdentity) -> AdapterShape | None:
    """The adapters that a checkpoint holds, by its own words: the folder that they may have begun from need not be there still."""
    if run.adapters is None:
        return None
    return AdapterShape(**(run.adapters.model_dump() | {"modules": frozenset(run.adapters.modules)}))


class Base:
    """The frozen weights beside which adapters were trained: `plain` as they began, `held` as training held them."""

    def __init__(self, shape: ModelShape, read: Callable[[str, Sequence[tuple[int, int]]], Tensor]) -> None:
        self._specs = {spec.name: spec for spec in shape.parameters()}
        self._read = read

    def plain(self, name: str) -> Tensor:
        """A whole parameter."""
        spec = self._specs[name].packed or self._specs[name]
        return self._read(name, [(0, size) for size in spec.shape])

    def held(self, name: str) -> Tensor:
        """A whole parameter, or the bytes that hold it."""
        spec = self._specs[name]
        if spec.packed is None:
            return self.plain(name)
        return packed_slice(spec.packed, [(0, size) for size in spec.shape], self._read)


def open_base(recipe: Recipe, shape: ModelShape, fingerprint: str) -> Base:
    """The base of a run that trains adapters.

    Raises:
        CheckpointError: the folder no longer holds the weights that the adapters were trained beside.
    """
    if not recipe.model.pretrained:
        specs = {spec.name: spec.packed or spec for spec in shape.parameters()}
        dtype = torch.float64 if recipe.precision.kind == "fp64" else torch.float32
        return Base(shape, lambda name, narrow: initialise(specs[name], recipe.seed, dtype=dtype, narrow=narrow))
    assert recipe.model.path is not None
    weights = WeightsFolder(recipe.model.path)
    weights.check(shape.base)
    found = weights.fingerprint()
    if found != fingerprint:
        raise CheckpointError(
            "these are not the weights that the adapters were trained beside",
            field=recipe.model.path,
            got=found,
            allowed=fingerprint,
            remedy="Put the base back where it was",
        )
    return Base(shape, lambda name, narrow: weights.read(name, narrow=narrow))


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
    elif wanted.isdecimal() and len(wanted) <= _MOST_DIGITS and int(wanted) in steps:
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
        decoder = build_decoder(source.shape).to(dtype)
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
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", field=str(path)) from error
    return content if isinstance(content, dict) else None
