"""Program: AdamW steps under a limit of the process's memory; prints a hash of the weights.

`python -m tests.multiprocess.limited_update TIER FOLDER LIMIT`: the limit is in bytes beyond the
memory at the first step, 0 for none.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
from pathlib import Path

import torch

from shardwright.config.offload import OffloadSection
from shardwright.config.training import OptimizerSection
from shardwright.layout import ParameterLayout
from shardwright.offload import OffloadedOptimizer, offload_optimizer
from shardwright.optim import build_optimizer

SHAPES = {"layers.0.up": (2048, 2048), "layers.0.down": (2048, 2048), "embedding": (4096, 2048)}
MOMENT_BYTES = 8 * 4 * 2**22
NUM_STEPS = 2


class WholeModel:
    """Model whose parameters are whole in one process."""

    def __init__(self) -> None:
        self.layouts = {name: ParameterLayout(name, shape) for name, shape in SHAPES.items()}


def main(tier: str, folder: str, limit_bytes: int) -> None:
    torch.set_num_threads(1)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        for name, shape in SHAPES.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = build_optimizer(
        parameters.items(), OptimizerSection(), learning_rate=0.01, weight_decay=0.1
    )
    if limit_bytes:
        status = Path("/proc/self/status").read_text()
        (kibibytes,) = re.findall(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
        limit_bytes += int(kibibytes) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    if tier != "none":
        section = OffloadSection.model_validate({"optimizer": tier, "buffer_bytes": 2**20})
        optimizer = offload_optimizer(
            optimizer,
            section,
            WholeModel(),  # type: ignore[arg-type]
            device=torch.device("cpu"),
            default_folder=Path(folder),
        )
    for _ in range(NUM_STEPS):
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in parameters.values():
        digest.update(parameter.detach().numpy())
    sys.stdout.write(digest.hexdigest())
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
