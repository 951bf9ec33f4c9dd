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
from shardwright.architecture.adapter_shape import build_part_name, get_module_name
from shardwright.architecture.nf4_layout import BLOCK_ELEMENTS
from shardwright.architecture.parameter_spec import AdapterPart
from shardwright.errors import CheckFailed, InputError
from shardwright.inference.export import LOGIT_TOLERANCE, build_probe_ids, compute_expected_logits
from shardwright.inference.model_source import ModelSource
from shardwright.model.hf.hf_module import load_quietly
from shardwright.model.hf.peft_folder import PeftFolder, write_peft_folder
from shardwright.model.lora import merge_adapter
from shardwright.model.products.nf4 import unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedAdapters:
    """Written adapter folder.

    `checked_with` names the program that reproduced the logits or bits from the folder ("peft",
    "itself"), None if there was no check.
    """

    path: Path
    num_parameters: int
    weights_bytes: int
    checked_with: str | None


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
        InputError: The source has no adapters, the base has no folder, or `out` must not
            be written.
        CheckFailed: The logits or the bits differ.
    """
    adapters = _require_adapters(source)
    if source.base is None:
        raise InputError(
            "the base was initialised from a seed, so there is no folder that peft could load",
            field="RUN",
            got=source.name,
            remedy="Export the merged model: --merge",
        )
    with_peft = find_spec("peft") is not None
    if check and not with_peft:
        logger.info(
            "peft is not installed: the folder is read back bit by bit, without a logit check"
        )
    plain = to_full_precision(source)

    def agree(folder: Path) -> None:
        if with_peft:
            check_with_peft(folder, compute_expected_logits(plain, torch.float32))
        else:
            _check_round_trip(folder, plain, dtype)

    size = write_peft_folder(
        out,
        plain.shape,
        plain.read,
        base=source.base,
        dtype=dtype,
        overwrite=overwrite,
        check=agree if check else None,
    )
    num = sum(
        spec.num_elements
        for spec in source.shape.list_parameters()
        if spec.adapter_part is not None
    )
    logger.info("%d adapters of rank %d", len(adapters.modules), adapters.rank)
    if adapters.quantize is not None:
        logger.info(_describe_quantised_base(source))
    return ExportedAdapters(
        Path(out), num, size, ("peft" if with_peft else "itself") if check else None
    )


def _describe_quantised_base(source: ModelSource) -> str:
    """Return on which base the adapters give the results of training."""
    uneven = next(
        (
            spec.name
            for spec in source.shape.list_parameters()
            if spec.packed_matrix is not None and spec.packed_matrix.shape[-1] % BLOCK_ELEMENTS
        ),
        None,
    )
    start = "the adapters fit the base in 4 bits that they were trained on, not the original one: "
    if uneven is not None:
        return (
            f"{start}export with --merge, because the base of bitsandbytes differs where rows are "
            f"not multiples of {BLOCK_ELEMENTS} elements ({uneven})"
        )
    return (
        f"{start}load it with BitsAndBytesConfig(load_in_4bit=True, "
        'bnb_4bit_quant_type="nf4"), or export with --merge'
    )


def to_full_precision(source: ModelSource) -> ModelSource:
    """Return the source with its base in the base folder's precision, without quantisation."""
    adapters = _require_adapters(source)
    if adapters.quantize is None:
        return source
    assert source.read_full_precision is not None, "a run has it"
    return replace(
        source,
        shape=replace(source.shape, adapters=replace(adapters, quantize=None)),
        read=source.read_full_precision,
    )


def dequantise_source(source: ModelSource) -> ModelSource:
    """Return the source with its 4-bit base dequantised to the values used in training."""
    adapters = _require_adapters(source)
    if adapters.quantize is None:
        return source
    columns = {
        spec.name: spec.packed_matrix.shape[-1]
        for spec in source.shape.list_parameters()
        if spec.packed_matrix is not None
    }

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        return unpack(tensor, columns[name], torch.float32) if name in columns else tensor

    return replace(
        source, shape=replace(source.shape, adapters=replace(adapters, quantize=None)), read=read
    )


def refuse_quantised_adapters(quantise: str | None) -> None:
    """Raise an InputError if adapters alone are to be stored in 8 bits."""
    if quantise is not None:
        raise InputError(
            "adapters are not stored in 8 bits",
            field="quantise",
            got=quantise,
            remedy="Use --merge to export the whole model",
        )


def merge_adapters(source: ModelSource) -> ModelSource:
    """Return the source's model with its adapters merged into the base matrices.

    Each matrix is merged in fp32 when it is read, one at a time. A 4-bit base is dequantised
    first: the adapters were trained on those values.
    """
    if _require_adapters(source).quantize is not None:
        logger.info(
            "the base was trained in 4 bits: its dequantised values are merged, in full precision"
        )
    source = dequantise_source(source)
    shape = source.shape
    adapters = _require_adapters(source)
    matrices = {
        spec.name: spec
        for spec in shape.base_shape.list_parameters()
        if get_module_name(spec) in adapters.modules and not spec.is_bias
    }

    def read(name: str) -> Tensor:
        spec = matrices.get(name)
        if spec is None:
            return source.read(name)

        def read_part(part: AdapterPart) -> Tensor:
            return source.read(build_part_name(spec, part))

        return merge_adapter(source.read(name), read_part, adapters, in_out=shape.is_in_out(spec))

    return replace(source, shape=shape.base_shape, read=read)


def check_merged_logits(source: ModelSource, merged: ModelSource) -> float:
    """Compare the logits of a merged model with those of the unmerged one, both in float32.

    Returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: The logits differ by more than rounding.
    """
    wanted_BTV = compute_expected_logits(source, torch.float32)
    gc.collect()  # one model in memory at a time
    difference = _compute_relative_difference(
        compute_expected_logits(merged, torch.float32), wanted_BTV
    )
    logger.info(
        "logits of the merged model differ from the unmerged one by %.1e of the largest logit",
        difference,
    )
    if not difference <= LOGIT_TOLERANCE:
        raise CheckFailed(
            f"the merged model's logits differ from the unmerged one's by {difference:.1e} of the "
            f"largest logit; at most {LOGIT_TOLERANCE:g} is expected from rounding"
        )
    return difference


def check_with_peft(folder: Path, expected_BTV: Tensor) -> float:
    """Load a folder with peft and compare its logits with the expected ones.

    Returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: peft cannot load the folder, or computes different logits.
    """
    gc.collect()
    with load_quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations between peft and transformers
        import peft  # an optional extra, and slow to import

        try:
            model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, experts_implementation="eager"
            )
        except Exception as error:  # many types; each of them means a bad folder
            raise CheckFailed(f"peft cannot load the folder: {error}") from error
    shape = model.config.get_text_config()
    with torch.inference_mode():
        got_BTV = model.eval()(build_probe_ids(shape.vocab_size, expected_BTV.shape[1])).logits
    difference = _compute_relative_difference(got_BTV, expected_BTV)
    logger.info("logits of peft differ by %.1e of the largest logit", difference)
    if not difference <= LOGIT_TOLERANCE:
        raise CheckFailed(
            f"peft's logits differ from ours by {difference:.1e} of the largest logit; "
            f"at most {LOGIT_TOLERANCE:g} is expected from rounding"
        )
    return difference


def _compute_relative_difference(got_BTV: Tensor, expected_BTV: Tensor) -> float:
    if got_BTV.shape != expected_BTV.shape:
        raise CheckFailed(
            f"logits have shape {tuple(got_BTV.shape)}; expected {tuple(expected_BTV.shape)}"
        )
    return float((got_BTV - expected_BTV).abs().max() / expected_BTV.abs().max().clamp(min=1e-30))


def _check_round_trip(folder: Path, source: ModelSource, dtype: torch.dtype) -> None:
    written = PeftFolder(folder, source.shape)
    for spec in source.shape.list_parameters():
        if spec.adapter_part is not None:
            whole = [(0, size) for size in spec.shape]
            if not torch.equal(
                written.read(spec.name, whole, dtype), source.read(spec.name).to(dtype)
            ):
                raise CheckFailed(f"{spec.name} differs when read back from the written folder")


def _require_adapters(source: ModelSource) -> AdapterShape:
    if source.shape.adapters is None:
        raise InputError(
            "this model has no adapters",
            field="RUN",
            got=source.name,
            allowed="a run of a recipe with `adapters:`",
            remedy="Remove --merge",
        )
    return source.shape.adapters
