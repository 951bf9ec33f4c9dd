"""Cost of `shardwright.audit.Recorder`: processor time of a step, and bytes written.

    python -m benchmarks.audit_recorder [--rounds 7]

A Llama of 21.6 million parameters (8 layers) takes steps of 512 tokens with AdamW in fp32 on one
thread. Steps that are not recorded, recorded, and recorded with projections alternate, so that
other load on the machine meets all of them; the smallest and the median time of each are printed,
and the median of the ratios within a round. Processor time leaves out waits for the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.audit import Recorder

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1152,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=6,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
KINDS: dict[str, dict[str, Any] | None] = {
    "not recorded": None,
    "recorded": {},
    "recorded with projections=256": {"projections": 256},
}


def take_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_step(
    kind: str, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> tuple[float, float, int]:
    """Return processor seconds, elapsed seconds and bytes written of one step."""
    options = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        elapsed = time.perf_counter()
        if options is None:
            take_step(model, optimizer, ids)
        else:
            with Recorder(folder, **options).record_step(model):
                take_step(model, optimizer, ids)
        used = time.process_time() - start
        elapsed = time.perf_counter() - elapsed
        return used, elapsed, sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def main() -> None:
    """Print one line for each kind of step."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, CONFIG.vocab_size, (1, 512))
    take_step(model, optimizer, ids)
    results = [
        {kind: measure_step(kind, model, optimizer, ids) for kind in KINDS} for _ in range(rounds)
    ]
    print(f"{num_parameters} parameters, {rounds} rounds")
    for kind in KINDS:
        used = [each[kind][0] for each in results]
        elapsed = [each[kind][1] for each in results]
        ratios = [each[kind][0] / each["not recorded"][0] for each in results]
        written = results[-1][kind][2]
        print(
            f"{kind}: processor {min(used):.2f} s smallest, {statistics.median(used):.2f} s median,"
            f" ratio {statistics.median(ratios):.2f}; elapsed {min(elapsed):.2f} s smallest, "
            f"{statistics.median(elapsed):.2f} s median; {written} bytes, "
            f"{written / num_parameters:.2f} a parameter"
        )


if __name__ == "__main__":
    main()
