"""One rank that trains a small layer through DeepSpeed with a configuration file: python -m
torch.distributed.run ... FILE.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch


def main(path: str) -> None:
    """Run three accumulated steps; rank 0 prints how the engine interprets the file."""
    # Kernels for ranks of one host take a minute to compile; gloo has the same result.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    engine, _, _, scheduler = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=path)
    rows = torch.randn(
        engine.train_micro_batch_size_per_gpu(), 8, dtype=next(engine.module.parameters()).dtype
    )
    rates = []
    for _ in range(3):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(rows).square().mean())
            engine.step()
        rates.append(engine.get_lr()[0])
    report = {
        "stage": engine.zero_optimization_stage(),
        "batch": [
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.train_batch_size(),
        ],
        "clipping": engine.gradient_clipping(),
        "dtype": str(rows.dtype),
        "optimizer": type(engine.optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "steps": engine.global_steps,
        "rates": rates,
    }
    if engine.global_rank == 0:
        sys.stdout.write("REPORT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[-1])
