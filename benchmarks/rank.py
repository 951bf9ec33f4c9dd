"""One rank of one contender: `python -m benchmarks.rank CASE_JSON REPLIES_FD [wait]`; commands come
on standard input. With `wait` the first one is `build`: before it the rank only imports packages.

The environment is that of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so every
contender is set up as its own documentation says.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import psutil
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
        contender = importlib.import_module(CONTENDERS[case.contender])
        pace.details["import_seconds"] = time.time() - psutil.Process().create_time()
        if sys.argv[3:] == ["wait"] and sys.stdin.readline().strip() != "build":
            return
        pace.build_start_seconds = time.perf_counter()
        contender.run(case, pace)
    if dist.is_initialized():
        dist.destroy_process_group()


def _barrier(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
