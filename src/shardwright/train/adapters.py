"""Adapters of a run: writing in peft's format, merging into the base, logit checks."""

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
    """Written adapter folder.

    `held_against` names the program that reproduced the logits or bits from the folder ("peft",
    "itself"), None if there was no check.
    """

    path: Path
    num_parameters: int
    weights_bytes: int
    held_against: str | None


def export_adapters(
    source: ModelSource,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    check: bool = True,
) -> ExportedAdapters:
    """Write a folder that peft can load on top of the base model.

    With `check`, peft must compute our logits from the folder; otherwise the folder is removed.
    Without peft installed, the check reads the folder back and compares bits.

    Raises:
        InputError: The source has no adapters, the base has no folder, or `out` exists.
        CheckFailed: The logits or the bits differ.
    """
    adapters = _adapters_of(source)
    if source.base is None:
        raise InputError(
            "the base was initialised from a seed, so there is no folder that peft could load",
            field="SOURCE",
            got=source.name,
            remedy="Export the merged model: --merge",
        )
    with_peft = find_spec("peft") is not None
    if check and not with_peft:
        logger.info(
            "peft is not installed: the folder is read back bit by bit, without a logit check"
        )
    plain = full_precision(source)

    def agree(folder: Path) -> None:
        if with_peft:
            check_with_peft(folder, expected_logits(plain, torch.float32))
        else:
            _check_bits(folder, plain, dtype)

    size = write_peft_folder(
        out,
        plain.shape,
        plain.read,
        base=source.base,
        dtype=dtype,
        overwrite=overwrite,
        check=agree if check else None,
    )
    num = sum(spec.num_elements for spec in source.shape.parameters() if spec.part is not None)
    logger.info("%d adapters of rank %d", len(adapters.modules), adapters.rank)
    return ExportedAdapters(
        Path(out), num, size, ("peft" if with_peft else "itself") if check else None
    )


def full_precision(source: ModelSource) -> ModelSource:
    """Return the source with its base in the base folder's precision, without quantisation."""
    adapters = _adapters_of(source)
    if adapters.quantize is None:
        return source
    assert source.read_plain is not None, "a run has it"
    return replace(
        source,
        shape=replace(source.shape, adapters=replace(adapters, quantize=None)),
        read=source.read_plain,
    )


def dequantised(source: ModelSource) -> ModelSource:
    """Return the source with its 4-bit base dequantised to the values used in training."""
    adapters = _adapters_of(source)
    if adapters.quantize is None:
        return source
    columns = {
        spec.name: spec.packed.shape[-1]
        for spec in source.shape.parameters()
        if spec.packed is not None
    }

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        return unpack(tensor, columns[name], torch.float32) if name in columns else tensor

    return replace(
        source, shape=replace(source.shape, adapters=replace(adapters, quantize=None)), read=read
    )


def merged_source(source: ModelSource) -> ModelSource:
    """Return the source's model with its adapters merged into the base matrices.

    Each matrix is merged in fp32 when it is read, one at a time. A 4-bit base is dequantised
    first: the adapters were trained on those values.
    """
    if _adapters_of(source).quantize is not None:
        logger.info(
            "the base was trained in 4 bits: its dequantised values are merged, in full precision"
        )
    source = dequantised(source)
    shape = source.shape
    adapters = _adapters_of(source)
    matrices = {
        spec.name: spec
        for spec in shape.base.parameters()
        if module_of(spec) in adapters.modules and not spec.is_bias
    }

    def read(name: str) -> Tensor:
        spec = matrices.get(name)
        if spec is None:
            return source.read(name)

        def read_part(part: AdapterPart) -> Tensor:
            return source.read(part_name(spec, part))

        return merged_weight(source.read(name), read_part, adapters, in_out=shape.lies_in_out(spec))

    return replace(source, shape=shape.base, read=read)


def check_merge(source: ModelSource, merged: ModelSource) -> float:
    """Compare the logits of a merged model with those of the unmerged one, both in float32.

    Returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: The logits differ by more than rounding.
    """
    wanted_BTV = expected_logits(source, torch.float32)
    gc.collect()  # one model in memory at a time
    difference = _difference(expected_logits(merged, torch.float32), wanted_BTV)
    logger.info(
        "logits of the merged model differ from the unmerged one by %.1e of the largest logit",
        difference,
    )
    if not difference <= TOLERANCE:
        raise CheckFailed(
            f"the merged model's logits differ from the unmerged one's by {difference:.1e} of the "
            f"largest logit; at most {TOLERANCE:g} is expected from rounding"
        )
    return difference


def check_with_peft(folder: Path, expected_BTV: Tensor) -> float:
    """Load a folder with peft and compare its logits with the expected ones.

    Returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: peft cannot load the folder, or computes different logits.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between peft and transformers
        import peft  # an optional extra, and slow to import

        try:
            model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # many types; each of them means a bad folder
            raise CheckFailed(f"peft cannot load the folder: {error}") from error
    shape = model.config.get_text_config()
    with torch.inference_mode():
        got_BTV = model.eval()(probe_ids(shape.vocab_size, expected_BTV.shape[1])).logits
    difference = _difference(got_BTV, expected_BTV)
    logger.info("logits of peft differ by %.1e of the largest logit", difference)
    if not difference <= TOLERANCE:
        raise CheckFailed(
            f"peft's logits differ from ours by {difference:.1e} of the largest logit; "
            f"at most {TOLERANCE:g} is expected from rounding"
        )
    return difference


def _difference(got_BTV: Tensor, wanted_BTV: Tensor) -> float:
    if got_BTV.shape != wanted_BTV.shape:
        raise CheckFailed(
            f"logits have shape {tuple(got_BTV.shape)}; expected {tuple(wanted_BTV.shape)}"
        )
    return float((got_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max().clamp(min=1e-30))


def _check_bits(folder: Path, source: ModelSource, dtype: torch.dtype) -> None:
    written = PeftFolder(folder, source.shape)
    for spec in source.shape.parameters():
        if spec.part is not None:
            whole = [(0, size) for size in spec.shape]
            if not torch.equal(
                written.read(spec.name, whole, dtype), source.read(spec.name).to(dtype)
            ):
                raise CheckFailed(f"{spec.name} differs when read back from the written folder")


def _adapters_of(source: ModelSource) -> AdapterShape:
    if source.shape.adapters is None:
        raise InputError(
            "this model has no adapters",
            field="SOURCE",
            got=source.name,
            allowed="a run of a recipe with `adapters:`",
            remedy="Remove --merge",
        )
    return source.shape.adapters
