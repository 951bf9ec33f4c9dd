"""Export of a model as a Hugging Face folder.

It contains config.json, weights, generation_config.json and the tokenizer.
`AutoModelForCausalLM.from_pretrained` loads the folder with equal logits;
`tests/reference/test_export_families.py` checks that for every family. One tensor is in memory
at a time: the header of a safetensors file needs only names, shapes and dtypes, and the
tensors' bytes follow one after another.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from shardwright.architecture import HFShape, ModelShape, ParameterSpec
from shardwright.errors import InputError, RunFailed, WeightsError
from shardwright.files import read_text
from shardwright.model.hf.export_folder import check_export_folder, replace_folder
from shardwright.model.hf.exported_tensors import (
    ExportedTensor,
    convert_parameter,
    list_exported_tensors,
    plan_shards,
)
from shardwright.model.hf.fp8_weights import FP8Weights
from shardwright.model.hf.hf_weights import INDEX_FILE_NAME, WEIGHTS_FILE_NAME

MAX_SHARD_BYTES = 5_000_000_000
"""Maximum bytes of tensors per file, unless a single tensor is larger; a decimal 5 GB."""

STORED_DTYPE_NAMES: dict[torch.dtype, tuple[str, str]] = {
    torch.float32: ("F32", "float32"),
    torch.bfloat16: ("BF16", "bfloat16"),
    torch.float16: ("F16", "float16"),
    torch.float64: ("F64", "float64"),
}
"""Names of a dtype of values: in a safetensors header, in config.json."""

_HEADER_NAME_OF_CODES = {torch.float8_e4m3fn: "F8_E4M3"}

HF_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Class name in config.json for each `model_type`."""

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_STALE_FIELDS = frozenset(
    {"torch_dtype", "auto_map", "_name_or_path", "_commit_hash", "transformers_version"}
)
"""Fields of the original config.json that are wrong for the exported folder."""


class ExportableTokenizer(Protocol):
    """Tokenizer interface that an export needs."""

    @property
    def eos_id(self) -> int | None:
        """Id at the end of a document."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids at the start of a document."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        ...


@dataclass(frozen=True)
class ExportedFolder:
    """Result of an export."""

    path: Path
    weight_files: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    weights_bytes: int


def write_hf_folder(
    out: str | Path,
    shape: ModelShape,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantisation: FP8Weights | None = None,
    tokenizer: ExportableTokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> ExportedFolder:
    """Write the model's folder, under a temporary name first, so that `out` is always complete.

    Args:
        out: the folder to create. A folder that is not empty is refused; with `overwrite` it is
            replaced if it contains nothing but a model.
        read: returns a parameter's whole tensor by name; called in the decoder's order, once
            per file with a part of it.
        dtype: dtype of the stored weights.
        quantisation: matrices that are stored in 8 bits, after rounding to `dtype`.
        tokenizer: saved into the folder. Its ids, or null without a tokenizer, fill bos, eos
            and pad if the config does not set them: transformers would otherwise assume those
            of the family's best-known vocabulary.
        generation_config: content of generation_config.json; by default the special ids of the
            config.
        check: called with the complete temporary folder; if it raises, nothing is left on disk.

    Raises:
        InputError: `out` must not be written.
        WeightsError: a tensor has the wrong shape, or values that are not finite in `dtype`.
        RunFailed: the disk is full, or the folder cannot be written.
    """
    out = check_export_folder(out, should_overwrite=overwrite)
    if dtype not in STORED_DTYPE_NAMES:
        allowed = ", ".join(name for _, name in STORED_DTYPE_NAMES.values())
        raise InputError(
            "weights cannot be stored in this dtype", field="dtype", got=dtype, allowed=allowed
        )
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        tensors = list_exported_tensors(shape.list_parameters(), dtype, quantisation)
        files = _write_weights(partial, tensors, read, max_shard_bytes, quantisation)
        config = _build_config(shape, dtype, tokenizer)
        if quantisation is not None:
            config["quantization_config"] = quantisation.build_config()
        _write_json(partial / "config.json", config)
        if generation_config is None:
            generation_config = {
                key: config[key] for key in _SPECIAL_IDS if config.get(key) is not None
            }
        _write_json(partial / "generation_config.json", generation_config)
        if tokenizer is not None:
            tokenizer.save(partial)
        if isinstance(shape, HFShape) and shape.code_folder is not None:
            _copy_code(Path(shape.code_folder), partial)
        if check is not None:
            check(partial)
        replace_folder(partial, out)
    except OSError as error:
        raise RunFailed(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    weights_bytes = sum(tensor.size_bytes for tensor in tensors)
    return ExportedFolder(out, tuple(files), len(tensors), shape.num_parameters, weights_bytes)


def _write_weights(
    folder: Path,
    tensors: Sequence[ExportedTensor],
    read: Callable[[str], Tensor],
    max_shard_bytes: int,
    quantisation: FP8Weights | None,
) -> list[str]:
    shards = plan_shards(tensors, max_shard_bytes)
    names = [WEIGHTS_FILE_NAME]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, read, quantisation)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        metadata = {
            "total_parameters": sum(
                tensor.piece.num_elements for tensor in tensors if tensor.part != "scales"
            ),
            "total_size": sum(tensor.size_bytes for tensor in tensors),
        }
        _write_json(
            folder / INDEX_FILE_NAME,
            {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))},
        )
    return names


def _write_shard(
    file: BinaryIO,
    tensors: Sequence[ExportedTensor],
    read: Callable[[str], Tensor],
    quantisation: FP8Weights | None,
) -> None:
    header_names = {dtype: name for dtype, (name, _) in STORED_DTYPE_NAMES.items()}
    header_names |= _HEADER_NAME_OF_CODES
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {
            "dtype": header_names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes, for mapping
    file.write(len(text).to_bytes(8, "little") + text)
    for spec, group in groupby(tensors, key=lambda tensor: tensor.spec):
        members = list(group)
        whole = _to_stored_dtype(spec, read(spec.name), members[0].values_dtype)
        for part in convert_parameter(whole, members, quantisation):
            file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        del whole, part  # free each parameter before the next is read


def _to_stored_dtype(spec: ParameterSpec, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tuple(tensor.shape) != spec.shape:
        raise WeightsError(
            "the tensor and the model's parameter have different shapes",
            field=spec.name,
            got=list(tensor.shape),
            allowed=str(list(spec.shape)),
        )
    converted = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not converted.isfinite().all():
        was_finite = bool(tensor.isfinite().all())
        raise WeightsError(
            "has values too large for this dtype"
            if was_finite
            else "has values that are not finite",
            field=spec.name,
            got=STORED_DTYPE_NAMES[dtype][1],
            remedy="Export as bf16 or fp32" if was_finite else "Export an earlier checkpoint",
        )
    return converted


def _build_config(
    shape: ModelShape, dtype: torch.dtype, tokenizer: ExportableTokenizer | None
) -> dict[str, Any]:
    """Build config.json from the original one and the properties of this export."""
    config = {key: value for key, value in shape.to_config().items() if key not in _STALE_FIELDS}
    class_name = shape.class_name if isinstance(shape, HFShape) else HF_CLASS_NAMES[shape.family]
    config |= {
        "architectures": [class_name],
        "model_type": shape.family,
        "dtype": STORED_DTYPE_NAMES[dtype][1],
    }
    config["vocab_size"] = shape.vocab_size
    if isinstance(shape, HFShape) and shape.code_folder is not None:
        config["auto_map"] = shape.config["auto_map"]
    bos = tokenizer.prefix_ids[0] if tokenizer is not None and tokenizer.prefix_ids else None
    eos = None if tokenizer is None else tokenizer.eos_id
    for key, value in zip(_SPECIAL_IDS, (bos, eos, None), strict=True):
        config.setdefault(key, value)
    return dict(sorted(config.items()))


def _copy_code(code: Path, folder: Path) -> None:
    """Copy the Python code of the model's class from the folder of its original weights."""
    for file in sorted(code.glob("*.py")):
        shutil.copyfile(file, folder / file.name)


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """Read generation_config.json; None if the folder has none.

    Raises:
        InputError: It cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", field=str(path)) from error
    return content if isinstance(content, dict) else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
