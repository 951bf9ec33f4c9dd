"""One rank of one contender: `python -m benchmarks.rank CASE_JSON REPLIES_FD`; commands come on
standard input.

The environment is that of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so every
contender is set up as its own documentation says.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
import torch.distributed as dist

from benchmarks.case import Case
from benchmarks.contenders import CONTENDERS
from benchmarks.pace import Pace


def main() -> None:
    """Run the case's contender until the parent sends `stop`."""
    case = Case.from_json(sys.argv[1])
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    with os.fdopen(int(sys.argv[2]), "w") as replies:
        pace = Pace(sys.stdin, replies, lambda: _barrier(case.device), case.device)
        pace.details["threads"] = torch.get_num_threads()
        importlib.import_module(CONTENDERS[case.contender]).run(case, pace)
    if dist.is_initialized():
        dist.destroy_process_group()


def _barrier(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
