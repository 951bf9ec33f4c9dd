"""Adapters of a run beside their base: read together, written in peft's files, or merged into the base's weights."""

from __future__ import annotations

import gc
import logging
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import AdapterShape
from shardwright.architecture.adapters import module_of, part_name
from shardwright.architecture.parameters import AdapterPart
from shardwright.errors import CheckFailed, InputError
from shardwright.model.adapters import merged_weight
from shardwright.model.nf4 import unpack
from shardwright.model.peft import PeftFolder, write_peft_folder
from shardwright.train.export import TOLERANCE, expected_logits, probe_ids
from shardwright.train.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedAdapters:
    """What was written; `held_against` says what has computed equal logits from the folder, if anything has."""

    path: Path
    num_parameters: int
    weights_bytes: int
    held_against: str | None


def export_adapters(
    source: ModelSource, out: str | Path, *, dtype: torch.dtype = torch.float32, overwrite: bool = False, check: bool = True
) -> ExportedAdapters:
    """Write the folder that peft loads beside the base; with `check`, peft's logits must be ours first, or nothing is left.

    Without peft installed, the folder is read back by ourselves, bit by bit.

    Raises:
        InputError: no adapters in the source, no folder of the base, or `out` is taken. CheckFailed: other logits.
    """
    adapters = _adapters_of(source)
    if source.base is None:
        raise InputError(
            "the base began from a seed and lies in no folder that peft could load",
            field="SOURCE",
            got=source.name,
            remedy="Export the merged model: --merge",
        )
    with_peft = find_spec("peft") is not None
    if check and not with_peft:
        logger.info("peft is not installed: the folder is read back by ourselves, and its logits are not compared")
    plain = full_precision(source)

    def agree(folder: Path) -> None:
        if with_peft:
            check_with_peft(folder, expected_logits(plain, torch.float32))
        else:
            _check_bits(folder, plain, dtype)

    size = write_peft_folder(
        out, plain.shape, plain.read, base=source.base, dtype=dtype, overwrite=overwrite, check=agree if check else None
    )
    num = sum(spec.num_elements for spec in source.shape.parameters() if spec.part is not None)
    logger.info("%d adapters of rank %d", len(adapters.modules), adapters.rank)
    return ExportedAdapters(Path(out), num, size, ("peft" if with_peft else "itself") if check else None)


def full_precision(source: ModelSource) -> ModelSource:
    """The source with its base as the folder has it, whatever held it while training."""
    adapters = _adapters_of(source)
    if adapters.quantize is None:
        return source
    assert source.read_plain is not None, "a run has it"
    return replace(source, shape=replace(source.shape, adapters=replace(adapters, quantize=None)), read=source.read_plain)


def dequantised(source: ModelSource) -> ModelSource:
    """The source with its base in full precision, with the values that training saw."""
    adapters = _adapters_of(source)
    if adapters.quantize is None:
        return source
    columns = {spec.name: spec.packed.shape[-1] for spec in source.shape.parameters() if spec.packed is not None}

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        return unpack(tensor, columns[name], torch.float32) if name in columns else tensor

    return replace(source, shape=replace(source.shape, adapters=replace(adapters, quantize=None)), read=read)


def merged_source(source: ModelSource) -> ModelSource:
    """The source's model without adapters: they are put into its matrices, in fp32, one matrix at a time as it is read.

    A base that was held in 4 bits is the one that the adapters fit: its values, dequantised, are what they are put into.
    """
    if _adapters_of(source).quantize is not None:
        logger.info("the base was held in 4 bits: its values are dequantised into full precision, and merged")
    source = dequantised(source)
    shape, adapters = source.shape, _adapters_of(source)
    matrices = {spec.name: spec for spec in shape.base.parameters() if module_of(spec) in adapters.modules and not spec.is_bias}

    def read(name: str) -> Tensor:
        spec = matrices.get(name)
        if spec is None:
            return source.read(name)

        def read_part(part: AdapterPart) -> Tensor:
            return source.read(part_name(spec, part))

        return merged_weight(source.read(name), read_part, adapters, in_out=shape.lies_in_out(spec))

    return replace(source, shape=shape.base, read=read)


def check_merge(source: ModelSource, merged: ModelSource) -> float:
    """Hold a merged model against the unmerged one, both in float32; the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: they compute different logits.
    """
    wanted_BTV = expected_logits(source, torch.float32)
    gc.collect()  # one model in memory at a time
    difference = _difference(expected_logits(merged, torch.float32), wanted_BTV)
    logger.info("logits of the merged model differ from the unmerged one's by %.1e of the largest", difference)
    if not difference <= TOLERANCE:
        raise CheckFailed(
            f"the merged model's logits differ from the unmerged one's by {difference:.1e} of the largest; "
            f"at most {TOLERANCE:g} is rounding"
        )
    return difference


def check_with_peft(folder: Path, expected_BTV: Tensor) -> float:
    """Load a folder as peft's users will, and compare logits; the largest difference as a share of the largest.

    Raises:
        CheckFailed: peft cannot load it, or computes other logits.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft and transformers deprecate of each other
        import peft  # an optional extra, and slow to import

        try:
            model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # whatever peft and transformers raise, the folder is not what their users need
            raise CheckFailed(f"peft cannot load the folder: {error}") from error
    shape = model.config.get_text_config()
    with torch.inference_mode():
        got_BTV = model.eval()(probe_ids(shape.vocab_size, expected_BTV.shape[1])).logits
    difference = _difference(got_BTV, expected_BTV)
    logger.info("logits of peft differ by %.1e of the largest", difference)
    if not difference <= TOLERANCE:
        raise CheckFailed(f"peft's logits differ from ours by {difference:.1e} of the largest; at most {TOLERANCE:g} is rounding")
    return difference


def _difference(got_BTV: Tensor, wanted_BTV: Tensor) -> float:
    if got_BTV.shape != wanted_BTV.shape:
        raise CheckFailed(f"logits of shape {tuple(got_BTV.shape)}, where {tuple(wanted_BTV.shape)} were wanted")
    return float((got_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max().clamp(min=1e-30))


def _check_bits(folder: Path, source: ModelSource, dtype: torch.dtype) -> None:
    written = PeftFolder(folder, source.shape)
    for spec in source.shape.parameters():
        if spec.part is not None:
            whole = [(0, size) for size in spec.shape]
            if not torch.equal(written.read(spec.name, whole, dtype), source.read(spec.name).to(dtype)):
                raise CheckFailed(f"{spec.name} does not read back as it was written")


def _adapters_of(source: ModelSource) -> AdapterShape:
    if source.shape.adapters is None:
        raise InputError(
            "this model has no adapters",
            field="SOURCE",
            got=source.name,
            allowed="a run of a recipe with `adapters:`",
            remedy="Leave --merge out",
        )
    return source.shape.adapters
