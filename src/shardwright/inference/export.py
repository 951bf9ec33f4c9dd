"""Export of a trained model as a Hugging Face folder, checked against transformers."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from torch import Tensor

from shardwright.architecture import HFShape
from shardwright.errors import CheckFailed
from shardwright.inference.model_source import ModelSource, load_decoder
from shardwright.model.hf.hf_folder import MAX_SHARD_BYTES, ExportedFolder, write_hf_folder
from shardwright.model.hf.hf_module import load_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder

logger = logging.getLogger(__name__)

LOGIT_TOLERANCE = 1e-4
"""Largest allowed difference of two logits, as a share of the largest logit.

Two float32 forward passes of a deep model that sum in different orders differ by less than a
tenth of this; a tensor in the wrong place differs thousands of times more."""

_NUM_CHECKED_TOKENS = 64


def export_hf_folder(
    source: ModelSource,
    out: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: bool = True,
) -> ExportedFolder:
    """Write the folder, check it, and remove it if the check fails.

    With `check`, transformers must load the folder and agree with our decoder, which needs the
    model in memory in float32. Without, each tensor is read back and compared, one at a time.

    Raises:
        InputError: `out` exists, or a tensor does not fit the dtype.
        CheckFailed: The folder's tensors or transformers' logits differ.
        RunFailed: The folder cannot be written.
    """

    def agree(folder: Path) -> None:
        own_code = isinstance(source.shape, HFShape) and source.shape.code_folder is not None
        check_with_transformers(
            folder, compute_expected_logits(source, dtype), trust_remote_code=own_code
        )

    if not source.has_tokenizer:
        logger.info("%s has no tokenizer: the folder is written without one", source.name)
    return write_hf_folder(
        out,
        source.shape,
        source.read,
        dtype=dtype,
        tokenizer=source.load_tokenizer() if source.has_tokenizer else None,
        generation_config=source.generation_config,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        check=agree if check else lambda folder: check_tensors(folder, source, dtype),
    )


def check_tensors(folder: Path, source: ModelSource, dtype: torch.dtype) -> None:
    """Read a folder's parameters one at a time and compare each with the source's, as rounded.

    Raises:
        CheckFailed: A parameter differs; names the first one.
        WeightsError: A parameter cannot be read, or the names are not those of the model.
    """
    weights = WeightsFolder(folder)
    weights.check(source.shape)
    for spec in source.shape.list_parameters():
        expected = source.read(spec.name).to(
            device="cpu", dtype=dtype if spec.is_trained else torch.float32
        )
        if not torch.equal(weights.read(spec.name), expected):
            raise CheckFailed(f"{spec.name} differs when read back from the written folder")


def build_probe_ids(vocab_size: int, max_positions: int) -> Tensor:
    """Return two rows of token ids over the whole vocabulary, always the same."""
    size = (2, min(_NUM_CHECKED_TOKENS, max_positions))
    return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(0))


def compute_expected_logits(source: ModelSource, dtype: torch.dtype) -> Tensor:
    """Compute our decoder's logits in float32, from weights rounded to the stored dtype."""
    decoder = load_decoder(source, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.to(dtype))
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
