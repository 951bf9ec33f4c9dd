"""`shardwright export`: write a trained model as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.options import CheckpointChoice, JsonOutput, ModelPath, enable_log
from shardwright.cli.output.json_output import print_json
from shardwright.units import format_bytes, format_count, format_items

if TYPE_CHECKING:
    from shardwright.inference.adapter_export import ExportedAdapters
    from shardwright.inference.model_source import ModelSource
    from shardwright.model.hf.hf_folder import ExportedFolder


def export_command(
    source: ModelPath,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.")],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="fp32, bf16, fp16 or fp64; auto is the training precision, "
            "for an adapter folder fp32.",
        ),
    ] = "auto",
    quantise: Annotated[
        str | None,
        typer.Option(
            "--quantise",
            metavar="FORMAT",
            help=(
                "Store the matrices of the blocks in 8 bits for inference servers: fp8-block "
                "(128 x 128 blocks, as in DeepSeek-V3) or fp8-row (compressed-tensors)."
            ),
        ),
    ] = None,
    quantise_exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--quantise-exclude",
            metavar="PATTERN",
            help="Weights to keep in --dtype, e.g. 'model.layers.0.*'. Repeatable.",
        ),
    ] = None,
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
        bool,
        typer.Option("--overwrite", help="Replace a folder that contains nothing but a model."),
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
    import torch

    from shardwright import api
    from shardwright.inference.adapter_export import ExportedAdapters
    from shardwright.inference.model_source import DTYPE_OF_PRECISION, parse_dtype

    loaded: list[ModelSource] = []
    enable_log()
    written = api.export(
        source,
        out,
        dtype=dtype,
        quantise=quantise,
        quantise_exclude=tuple(quantise_exclude or ()),
        checkpoint=checkpoint,
        max_shard_bytes=round(max_shard_gb * 1e9),
        should_overwrite=overwrite,
        should_check=check,
        should_merge=merge,
        on_load=loaded.append,
    )
    (model,) = loaded
    is_adapter = isinstance(written, ExportedAdapters)
    stored = parse_dtype(dtype, torch.float32 if is_adapter else model.dtype)
    dtype_name = next(name for name, known in DTYPE_OF_PRECISION.items() if known == stored)
    formats = dtype_name if quantise is None else f"{dtype_name} and {quantise}"
    parameters, outcome = (
        _describe_adapters(written)
        if isinstance(written, ExportedAdapters)
        else _describe_folder(written, check)
    )
    sys.stderr.write(
        f"{model.name} -> {out}: {parameters} in {formats}, "
        f"{format_bytes(written.weights_bytes)}{outcome}\n"
    )
    if json_output:
        extra = (
            {
                "weight_files": ["adapter_model.safetensors"],
                "checked": check,
                "checked_with": written.checked_with,
            }
            if isinstance(written, ExportedAdapters)
            else {"weight_files": written.weight_files, "checked": check, "quantised": quantise}
        )
        _print_json(model, out, dtype_name, written, **extra)


def _describe_folder(written: ExportedFolder, is_checked: bool) -> tuple[str, str]:
    """Return number of parameters, and number of files and result of the check."""
    num_files = len(written.weight_files)
    outcome = (
        "loaded with transformers, logits agree"
        if is_checked
        else "all tensors read back, identical"
    )
    return (
        f"{format_count(written.num_parameters)} parameters",
        f" in {format_items(num_files, 'file')}; {outcome}",
    )


def _describe_adapters(written: ExportedAdapters) -> tuple[str, str]:
    """Return number of parameters, and result of the check."""
    outcomes = {
        "peft": "loaded with peft, logits agree",
        "itself": "read back, identical (peft is not installed)",
    }
    outcome = "not verified" if written.checked_with is None else outcomes[written.checked_with]
    return f"adapters of {format_count(written.num_parameters)} parameters", f"; {outcome}"


def _print_json(
    model: ModelSource,
    out: Path,
    dtype: str,
    written: ExportedFolder | ExportedAdapters,
    **extra: Any,
) -> None:
    """Print a summary as a JSON object on standard output."""
    content = {
        "source": model.name,
        "step": model.step,
        "path": str(out),
        "dtype": dtype,
        "num_parameters": written.num_parameters,
        "weights_bytes": written.weights_bytes,
    }
    print_json(content | extra)
