"""A trained model written as a Hugging Face folder, and held against transformers before it is called done."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from torch import Tensor

from shardwright.architecture import ForeignShape
from shardwright.errors import CheckFailed
from shardwright.model.export import MAX_SHARD_BYTES, ExportedFolder, write_folder
from shardwright.model.load import WeightsFolder
from shardwright.model.theirs import load_folder
from shardwright.train.source import ModelSource, load_decoder

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of two logits, as a share of the largest logit. Two float32 forward passes of a deep model, summed in
different orders, stay below a tenth of this; a tensor in the wrong place is thousands of times above."""

_CHECKED_TOKENS = 64


def export_source(
    source: ModelSource,
    out: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: bool = True,
) -> ExportedFolder:
    """Write the folder and load it back; nothing is left of it where it is not what it should be.

    With `check`, transformers must load it and agree with our own decoder, which holds the model once, in float32. Without, every
    tensor is read back and compared with what was to be written: like the writing, that holds one in memory at a time.

    Raises:
        InputError: `out` is taken, or a tensor does not fit the dtype. CheckFailed: the folder holds, or transformers computes,
            something else. RunFailed: the folder cannot be written.
    """

    def agree(folder: Path) -> None:
        own_code = isinstance(source.shape, ForeignShape) and source.shape.code is not None
        check_with_transformers(folder, expected_logits(source, dtype), trust_remote_code=own_code)

    if not source.has_tokenizer:
        logger.info("%s has no tokenizer: the folder is written without one", source.name)
    return write_folder(
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
    """Read a folder's parameters back, one at a time, and compare each with the source's, rounded to what is stored.

    Raises:
        CheckFailed: names the first that differs. WeightsError: they cannot be read, or are not those of the model.
    """
    weights = WeightsFolder(folder)
    weights.check(source.shape)
    for spec in source.shape.parameters():
        wanted = source.read(spec.name).to(device="cpu", dtype=dtype if spec.trained else torch.float32)
        if not torch.equal(weights.read(spec.name), wanted):
            raise CheckFailed(f"{spec.name} reads back as something else than was written")


def probe_ids(vocab_size: int, max_positions: int) -> Tensor:
    """Token ids of two rows, always the same ones, over all of the vocabulary."""
    size = (2, min(_CHECKED_TOKENS, max_positions))
    return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(0))


def expected_logits(source: ModelSource, dtype: torch.dtype) -> Tensor:
    """Logits of our decoder in float32, its weights rounded to the dtype that is stored."""
    decoder = load_decoder(source, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.to(dtype))
        logits_BTV: Tensor = decoder(probe_ids(source.shape.vocab_size, source.shape.max_position_embeddings))
    return logits_BTV


def check_with_transformers(folder: Path, expected_BTV: Tensor, *, trust_remote_code: bool = False) -> float:
    """Load a folder as its users will, and compare logits; returns the largest difference as a share of the largest logit.

    Raises:
        CheckFailed: transformers misses a tensor, finds one too many, or computes other logits.
    """
    gc.collect()  # our decoder goes before theirs comes: a model in memory once, not twice
    try:
        model, loading = load_folder(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever their constructors and validators raise, the folder is not what its users need
        raise CheckFailed(f"transformers cannot load the folder: {error}") from error
    faults = [f"{kind}: {', '.join(map(str, found))}" for kind, found in loading.items() if found]
    if faults:
        raise CheckFailed(f"transformers does not find the tensors that it wants: {'; '.join(faults)}")
    shape = model.config.get_text_config()
    with torch.inference_mode():
        got_BTV = model.eval()(probe_ids(shape.vocab_size, expected_BTV.shape[1])).logits
    if got_BTV.shape != expected_BTV.shape:
        raise CheckFailed(f"transformers computes logits of shape {tuple(got_BTV.shape)}, ours are {tuple(expected_BTV.shape)}")
    difference = float((got_BTV - expected_BTV).abs().max() / expected_BTV.abs().max().clamp(min=1e-30))
    logger.info("logits of transformers differ by %.1e of the largest", difference)
    if not difference <= TOLERANCE:
        raise CheckFailed(
            f"transformers' logits differ from ours by {difference:.1e} of the largest; at most {TOLERANCE:g} is rounding"
        )
    return difference
