"""`shardwright export`: write a trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import CheckpointChoice, JsonOutput, ModelPath, enable_log
from shardwright.units import format_bytes, format_count

if TYPE_CHECKING:
    from shardwright.inference.adapter_export import ExportedAdapters
    from shardwright.inference.model_source import ModelSource
    from shardwright.model.hf_folder import ExportedFolder

SCHEMA_VERSION = 1


def export_command(
    source: ModelPath,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default=False)
    ],
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="fp32, bf16, fp16 or fp64; auto is the training precision."),
    ] = "auto",
    checkpoint: CheckpointChoice = "latest",
    max_shard_gb: Annotated[
        float,
        typer.Option(
            "--max-shard-gb",
            min=0.001,
            max=1e6,
            help="Maximum size of one weights file in GB (1e9 bytes).",
        ),
    ] = 5.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder that is not empty.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help=(
                "Load the folder with transformers and compare logits, "
                "or only read the tensors back."
            ),
        ),
    ] = True,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="For a run with adapters: merge them into the base weights."),
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Write config.json, safetensors and tokenizer for AutoModelForCausalLM.from_pretrained.

    For a run with adapters: write the adapter folder for peft, or with --merge the whole model.
    """
    # Torch is imported here, so that --help stays fast.
    from shardwright.inference.adapter_export import check_merged_logits, merge_adapters
    from shardwright.inference.export import export_hf_folder
    from shardwright.inference.model_source import (
        DTYPE_OF_PRECISION,
        open_model_source,
        parse_dtype,
    )

    enable_log()
    model = open_model_source(source, checkpoint)
    if model.shape.adapters is not None and not merge:
        _export_adapters(
            model, out, dtype, overwrite=overwrite, check=check, json_output=json_output
        )
        return
    if merge:
        unmerged = model
        model = merge_adapters(model)
        if check:
            check_merged_logits(unmerged, model)
    stored = parse_dtype(dtype, model.dtype)
    written = export_hf_folder(
        model,
        out,
        dtype=stored,
        max_shard_bytes=round(max_shard_gb * 1e9),
        overwrite=overwrite,
        check=check,
    )
    dtype_name = next(
        dtype_name
        for dtype_name, torch_dtype in DTYPE_OF_PRECISION.items()
        if torch_dtype == stored
    )
    num_files = len(written.weight_files)
    outcome = (
        "loaded with transformers, logits agree" if check else "all tensors read back, identical"
    )
    sys.stderr.write(
        f"{model.name} -> {out}: {format_count(written.num_parameters)} parameters in "
        f"{dtype_name}, "
        f"{format_bytes(written.weights_bytes)} in {num_files} "
        f"file{'s' if num_files > 1 else ''}; "
        f"{outcome}\n"
    )
    if json_output:
        _print_json(
            model, out, dtype_name, written, weight_files=written.weight_files, checked=check
        )


def _export_adapters(
    model: ModelSource, out: Path, dtype: str, *, overwrite: bool, check: bool, json_output: bool
) -> None:
    import torch

    from shardwright.inference.adapter_export import export_adapters
    from shardwright.inference.model_source import DTYPE_OF_PRECISION, parse_dtype

    stored = parse_dtype(dtype, torch.float32)
    written = export_adapters(model, out, dtype=stored, overwrite=overwrite, check=check)
    dtype_name = next(
        dtype_name
        for dtype_name, torch_dtype in DTYPE_OF_PRECISION.items()
        if torch_dtype == stored
    )
    outcomes = {
        "peft": "loaded with peft, logits agree",
        "itself": "read back, identical (peft is not installed)",
    }
    outcome = "not verified" if written.checked_with is None else outcomes[written.checked_with]
    sys.stderr.write(
        f"{model.name} -> {out}: adapters of {format_count(written.num_parameters)} "
        f"parameters in {dtype_name}, "
        f"{format_bytes(written.weights_bytes)}; {outcome}\n"
    )
    if json_output:
        files = ["adapter_model.safetensors"]
        _print_json(
            model,
            out,
            dtype_name,
            written,
            weight_files=files,
            checked=check,
            held_against=written.checked_with,
        )


def _print_json(
    model: ModelSource,
    out: Path,
    dtype: str,
    written: ExportedFolder | ExportedAdapters,
    **extra: Any,
) -> None:
    """Print a summary as a JSON object on standard output."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "source": model.name,
        "step": model.step,
        "path": str(out),
        "dtype": dtype,
        "num_parameters": written.num_parameters,
        "weights_bytes": written.weights_bytes,
    }
    sys.stdout.write(json.dumps(content | extra) + "\n")
