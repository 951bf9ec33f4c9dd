"""One rank under `accelerate launch`; prints how accelerate interprets a configuration file."""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator


def main() -> None:
    """Run one step, whose gradient is the mean over the ranks."""
    accelerator = Accelerator()
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    gradient = float(next(model.parameters()).grad.sum())
    optimizer.step()
    report = {
        "kind": str(accelerator.distributed_type),
        "ranks": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "wrapped": type(model).__name__,
        "gradient": gradient,
    }
    if accelerator.is_main_process:
        sys.stdout.write("REPORT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
