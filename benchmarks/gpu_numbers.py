"""Compare a small decoder on the device with float64 on the CPU, and name the kernels that it took.

    python -m benchmarks.gpu_numbers cuda RESULT.json

Writes the relative error of logits, loss and every gradient for fp32 and bf16. The same weights and
tokens are used everywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention_operators import select_attention
from benchmarks.gpu_kernels import summarise_kernels
from shardwright.architecture import read_config
from shardwright.model.decoder import Decoder
from shardwright.numerics.loss import chunked_cross_entropy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 509,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
LIMITS = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest relative error of the logits and of a gradient; bf16 has 8 bits of precision."""
_BATCH_SHAPE = (2, 96)


def main() -> None:
    """Compare both precisions and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_numbers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("result", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    exact = compute(torch.device("cpu"), torch.float64)
    result: dict[str, Any] = {"config": CONFIG, "precisions": {}}
    for precision, compute_dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        compute(device, compute_dtype)  # loads the kernels
        with profile(activities=activities, acc_events=True) as recorded:
            found = compute(device, compute_dtype)
        errors = {name: measure_error(found[name], exact[name]) for name in exact}
        worst = max((name for name in errors if name not in ("logits", "loss")), key=errors.get)
        result["precisions"][precision] = {
            "logits_error": errors["logits"],
            "loss_error": errors["loss"],
            "worst_gradient": worst,
            "worst_gradient_error": errors[worst],
            "limit": LIMITS[precision],
            "is_within_limit": max(errors.values()) <= LIMITS[precision],
            "attention": select_attention(event.key for event in recorded.key_averages()),
            "kernels": summarise_kernels(recorded, device)[:12],
        }
    result["float32_products"] = torch.get_float32_matmul_precision()
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    if not all(each["is_within_limit"] for each in result["precisions"].values()):
        sys.exit("an error is over its limit")


def compute(device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return logits, loss and gradients by name, on the CPU in float64.

    Args:
        dtype: float64 for all values, bf16 for products with fp32 weights, or None for fp32.
    """
    loss_function = partial(chunked_cross_entropy, chunk_tokens=128)
    compute_dtype = dtype if dtype == torch.bfloat16 else None
    decoder = Decoder(read_config(CONFIG), loss_function=loss_function, compute_dtype=compute_dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            if parameter.ndim == 1:  # scale of a norm
                parameter.add_(1.0)
    decoder.to(device)
    if dtype == torch.float64:
        decoder.double()
    ids_BT = torch.randint(0, CONFIG["vocab_size"], _BATCH_SHAPE, generator=generator).to(device)
    labels_BT = torch.nn.functional.pad(ids_BT[:, 1:], (0, 1), value=-100)
    logits = decoder(ids_BT)
    loss = decoder(ids_BT, labels_BT=labels_BT) / (labels_BT != -100).sum()
    loss.backward()
    values = {"logits": logits, "loss": loss}
    values |= {
        name: parameter.grad
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    return {name: value.detach().cpu().double() for name, value in values.items()}


def measure_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact values."""
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
