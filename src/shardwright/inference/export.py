"""Export of a trained model as a Hugging Face folder, checked against transformers."""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardwright.architecture import HFShape
from shardwright.data.tokens.tokenizer_loading import describe_tokenizer_difference
from shardwright.errors import CheckFailed, InputError
from shardwright.inference.model_source import ModelSource, load_decoder
from shardwright.model.hf.exported_tensors import (
    choose_stored_dtype,
    convert_parameter,
    list_exported_tensors,
)
from shardwright.model.hf.fp8_weights import WEIGHT_FORMATS, FP8Weights, select_fp8_weights
from shardwright.model.hf.hf_folder import MAX_SHARD_BYTES, ExportedFolder, write_hf_folder
from shardwright.model.hf.hf_module import load_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder

logger = logging.getLogger(__name__)

LOGIT_TOLERANCE = 1e-4
"""Largest allowed difference of two logits, as a share of the largest logit.

Two float32 forward passes of a deep model that sum in different orders differ by less than a
tenth of this; a tensor in the wrong place differs thousands of times more."""

_NUM_CHECKED_TOKENS = 64
_READER_PACKAGES = {"fp8-block": "accelerate", "fp8-row": "compressed_tensors"}
"""Packages that transformers needs to read 8-bit weights."""


def export_hf_folder(
    source: ModelSource,
    out: str | Path,
    *,
    dtype: torch.dtype,
    quantisation: FP8Weights | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: bool = True,
) -> ExportedFolder:
    """Write the folder, check it, and remove it if the check fails.

    With `check`, transformers must load the folder and agree with our decoder, which needs the
    model in memory in float32; it dequantises 8-bit weights. A warning says if its tokenizer gives
    other ids than ours. Without, each tensor is read back
    and compared, one at a time.

    Args:
        quantisation: matrices that are stored in 8 bits, after rounding to `dtype`.

    Raises:
        InputError: `out` must not be written, a tensor does not fit the dtype, or the check needs
            a package that is not installed.
        CheckFailed: The folder's tensors or transformers' logits differ.
        RunFailed: The folder cannot be written.
    """

    tokenizer = source.load_tokenizer() if source.has_tokenizer else None

    def agree(folder: Path) -> None:
        own_code = isinstance(source.shape, HFShape) and source.shape.code_folder is not None
        check_with_transformers(
            folder, compute_expected_logits(source, dtype, quantisation), trust_remote_code=own_code
        )
        if tokenizer is not None and (
            difference := describe_tokenizer_difference(folder, tokenizer)
        ):
            logger.warning("%s", difference)

    if check and quantisation is not None:
        _check_reader(quantisation)
    if tokenizer is None:
        logger.info("%s has no tokenizer: the folder is written without one", source.name)
    return write_hf_folder(
        out,
        source.shape,
        source.read,
        dtype=dtype,
        quantisation=quantisation,
        tokenizer=tokenizer,
        generation_config=source.generation_config,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        check=agree if check else lambda folder: check_tensors(folder, source, dtype, quantisation),
    )


def select_quantisation(
    source: ModelSource, quantise: str | None, exclude: Sequence[str]
) -> FP8Weights | None:
    """Select the matrices that a folder stores in 8 bits; None without `quantise`.

    Raises:
        InputError: the format, the model, a width or a pattern does not fit.
    """
    if quantise is not None:
        return select_fp8_weights(source.shape, quantise, exclude)
    if exclude:
        raise InputError(
            "nothing is quantised",
            field="quantise-exclude",
            got=", ".join(exclude),
            remedy=f"Add --quantise {WEIGHT_FORMATS[0]} or {WEIGHT_FORMATS[1]}",
        )
    return None


def _check_reader(quantisation: FP8Weights) -> None:
    """Check, before any file is written, that transformers can read the 8-bit layout."""
    package = _READER_PACKAGES[quantisation.format]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"the check loads {quantisation.format} weights with {package.replace('_', '-')}, "
            "which is not installed",
            field="check",
            remedy=f"pip install {package.replace('_', '-')}, or use --no-check to only read "
            "the tensors back",
        )


def check_tensors(
    folder: Path, source: ModelSource, dtype: torch.dtype, quantisation: FP8Weights | None = None
) -> None:
    """Read a folder's parameters one at a time and compare each with the source's, as rounded.

    Raises:
        CheckFailed: A parameter differs; names the first one.
        WeightsError: A parameter cannot be read, or the names are not those of the model.
    """
    weights = WeightsFolder(folder)
    if quantisation is not None:
        _check_quantised_tensors(weights, source, dtype, quantisation)
        return
    weights.check(source.shape)
    for spec in source.shape.list_parameters():
        expected = source.read(spec.name).to(device="cpu", dtype=choose_stored_dtype(spec, dtype))
        if not torch.equal(weights.read(spec.name), expected):
            raise CheckFailed(f"{spec.name} differs when read back from the written folder")


def _check_quantised_tensors(
    weights: WeightsFolder, source: ModelSource, dtype: torch.dtype, quantisation: FP8Weights
) -> None:
    """Compare names, dtypes and bytes of codes, scales and other tensors with the source's."""
    tensors = list_exported_tensors(source.shape.list_parameters(), dtype, quantisation)
    expected_names = sorted(tensor.name for tensor in tensors)
    if list(weights.tensor_names) != expected_names:
        raise CheckFailed("the written folder has other tensors than the model")
    for spec, group in groupby(tensors, key=lambda tensor: tensor.spec):
        members = list(group)
        whole = source.read(spec.name).to(device="cpu", dtype=members[0].values_dtype)
        parts = convert_parameter(whole, members, quantisation)
        for tensor, expected in zip(members, parts, strict=True):
            path, stored_name = weights.find_file(tensor.name)
            with safe_open(str(path), framework="pt") as file:
                got = file.get_tensor(stored_name)
            is_equal = got.dtype == expected.dtype and got.shape == expected.shape
            if not is_equal or not torch.equal(
                got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
            ):
                raise CheckFailed(f"{tensor.name} differs when read back from the written folder")


def build_probe_ids(vocab_size: int, max_positions: int) -> Tensor:
    """Return two rows of token ids over the whole vocabulary, always the same."""
    size = (2, min(_NUM_CHECKED_TOKENS, max_positions))
    return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(0))


def compute_expected_logits(
    source: ModelSource, dtype: torch.dtype, quantisation: FP8Weights | None = None
) -> Tensor:
    """Compute our decoder's logits in float32, from weights as a reader of the folder has them."""
    decoder = load_decoder(source, device=torch.device("cpu"), dtype=torch.float32)
    specs = {spec.name: spec for spec in source.shape.list_parameters()}
    with torch.inference_mode():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(parameter.to(choose_stored_dtype(specs[name], dtype)))
            for piece in () if quantisation is None else specs[name].file_slices:
                if quantisation is not None and piece.name in quantisation.names:
                    part = parameter[tuple(slice(start, stop) for start, stop in piece.box)]
                    part.copy_(quantisation.round(part.reshape(piece.shape)).view_as(part))
        logits_BTV: Tensor = decoder(
            build_probe_ids(source.shape.vocab_size, source.shape.max_position_embeddings)
        )
    return logits_BTV


def check_with_transformers(
    folder: Path, expected_BTV: Tensor, *, trust_remote_code: bool = False
) -> float:
    """Load a folder with transformers and compare its logits with the expected ones.

    Returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: Tensors are missing or unexpected, or the logits differ.
    """
    gc.collect()  # free our decoder first, so that only one model is in memory
    try:
        model, loading = load_hf_folder(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types; any means a bad folder
        raise CheckFailed(f"transformers cannot load the folder: {error}") from error
    faults = [f"{kind}: {', '.join(map(str, names))}" for kind, names in loading.items() if names]
    if faults:
        raise CheckFailed(
            f"transformers reports missing or unexpected tensors: {'; '.join(faults)}"
        )
    shape = model.config.get_text_config()
    with torch.inference_mode():
        got_BTV = model.eval()(build_probe_ids(shape.vocab_size, expected_BTV.shape[1])).logits
    if got_BTV.shape != expected_BTV.shape:
        raise CheckFailed(
            f"transformers computes logits of shape {tuple(got_BTV.shape)}; "
            f"expected {tuple(expected_BTV.shape)}"
        )
    difference = float(
        (got_BTV - expected_BTV).abs().max() / expected_BTV.abs().max().clamp(min=1e-30)
    )
    logger.info("logits of transformers differ by %.1e of the largest logit", difference)
    if not difference <= LOGIT_TOLERANCE:
        raise CheckFailed(
            f"transformers' logits differ from ours by {difference:.1e} of the largest logit; "
            f"at most {LOGIT_TOLERANCE:g} is expected from rounding"
        )
    return difference
