"""Measure the attention kernels that `model.attention: auto` takes against those without them.

    python -m benchmarks.gpu_attention cuda bf16 real RESULT.json

Forward and backward passes of a few layers of three models: packed documents against a dense mask,
windows with soft caps and windows with sinks against explicit products. Writes seconds, peak bytes,
the kernels' log line, the operators that ran, the host's waits and the distance between the
gradients of both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_log import record_attention
from benchmarks.gpu_kernels import wait
from benchmarks.gpu_step_figures import count_steps
from shardwright.architecture import NormalInit, read_config
from shardwright.config.model import AttentionSetting
from shardwright.config.training import PrecisionSection
from shardwright.model.decoder import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.numerics.precision import resolve_dtypes

_SIZES: dict[str, Any] = {"vocab_size": 8192, "num_hidden_layers": 4, "pad_token_id": None}
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_NUM_STEPS = 5
_WARMUP_STEPS = 3


class AttentionCase(NamedTuple):
    """A model, the setting that switches the kernels off, and whether rows hold documents."""

    config: dict[str, Any]
    off: AttentionSetting
    has_documents: bool


CASES = {
    "packed documents (Llama 3 8B)": AttentionCase(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "sdpa",
        has_documents=True,
    ),
    "windows and soft caps (Gemma 2 9B)": AttentionCase(
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        "explicit",
        has_documents=False,
    ),
    "windows and sinks (gpt-oss 20B, 4 experts)": AttentionCase(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
        "explicit",
        has_documents=False,
    ),
}


def main() -> None:
    """Measure every case with the kernels on and off and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("precision", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("shapes", choices=("real", "tiny"))
    parser.add_argument("result", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_tiny = arguments.shapes == "tiny"
    result: dict[str, Any] = {"num_tokens": 256 if is_tiny else 8192, "attention": {}}
    for name, case in CASES.items():
        sizes = _SIZES | {"max_position_embeddings": result["num_tokens"]}
        config = {**case.config, **sizes, **(_TINY if is_tiny else {})}
        gradients: dict[str, list[Tensor]] = {}
        row: dict[str, Any] = {}
        for side, attention in (("off", case.off), ("on", "auto")):
            try:
                row[side], gradients[side] = measure(
                    device, arguments.precision, config, attention, case.has_documents
                )
            except torch.OutOfMemoryError:
                row[side] = {"failed": "out of memory"}
        if len(gradients) == 2:
            row["distance"] = compute_distance(gradients["on"], gradients["off"], device)
        result["attention"][name] = row
        arguments.result.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    device: torch.device,
    precision: str,
    config: dict[str, Any],
    attention: AttentionSetting,
    has_documents: bool,
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return seconds and peak bytes of a forward and backward pass, and the gradients."""
    run, decoder = _build_pass(device, precision, config, attention, has_documents)
    with record_attention() as kernels:
        for _ in range(_WARMUP_STEPS):
            run()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start_seconds = time.perf_counter()
    for _ in range(_NUM_STEPS):
        run()
    wait(device)
    measured = {
        "seconds": (time.perf_counter() - start_seconds) / _NUM_STEPS,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "kernels": kernels,
    } | count_steps(run, device)
    return measured, [p.grad.cpu() for p in decoder.parameters() if p.grad is not None]


def _build_pass(
    device: torch.device,
    precision: str,
    config: dict[str, Any],
    attention: AttentionSetting,
    has_documents: bool,
) -> tuple[Callable[[], None], Decoder]:
    """Build a decoder; return a function that runs a forward and a backward pass."""
    shape = read_config(config)
    section = PrecisionSection(kind=precision)  # type: ignore[arg-type]
    with device:
        decoder = Decoder(
            shape,
            attention=attention,
            loss_function=ChunkedLoss(1024),
            compute_dtype=resolve_dtypes(section).compute,
        )
    parameters = dict(decoder.named_parameters())
    torch.manual_seed(0)
    with torch.no_grad():
        for spec in shape.list_parameters():
            if isinstance(spec.init, NormalInit):  # a core takes seconds for so many
                parameters[spec.name].normal_(std=spec.init.std)
            else:
                parameters[spec.name].copy_(initialise_parameter(spec, 0, dtype=torch.float32))
    num_tokens = shape.max_position_embeddings
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, shape.vocab_size, (1, num_tokens), generator=generator).to(device)
    # Documents of 64, 192, 320... tokens: as uneven as in a packed row.
    ends = np.cumsum(np.arange(64, num_tokens, 128))
    documents_BT = np.searchsorted(ends, np.arange(num_tokens), side="right")[None]
    documents = {
        "document_ids_BT": torch.from_numpy(documents_BT).to(device),
        "host_document_ids_BT": documents_BT,
    }

    def run() -> None:
        decoder.zero_grad()
        options = documents if has_documents else {}
        (decoder(ids_BT, labels_BT=ids_BT, **options) / num_tokens).backward()

    return run, decoder


def compute_distance(found: list[Tensor], expected: list[Tensor], device: torch.device) -> float:
    """Return the norm of the difference of all gradients over the norm of the expected ones."""
    difference = total = 0.0
    for a, b in zip(found, expected, strict=True):
        exact = b.to(device).double()
        difference += float((a.to(device).double() - exact).square().sum())
        total += float(exact.square().sum())
    return float((difference / total) ** 0.5)


if __name__ == "__main__":
    main()
