"""A rank's process that follows orders instead of training: `-m` module for `RankProcesses`.

The arguments of a generation are a file with the orders as JSON, one for each rank, and the path of
the records without its end. An order is `finish`, `leave` (because more ranks follow), `lose peer`,
`fail`, `wait` (until the launcher reports that a rank is lost), `hang` or `die`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import GenerationEnded, InputError, RankFailed
from shardwright.launch import rank_service
from shardwright.launch.rank_outcome import write_pid


def follow_order(arguments: Sequence[str]) -> BaseException | None:
    """Follow this rank's order and record the process and its environment."""
    rank = os.environ["RANK"]
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_USE_AGENT_STORE",
        "MASTER_PORT",
    )
    record = {"pid": os.getpid()} | {name: os.environ[name] for name in names}
    file, records = map(Path, arguments)
    records.with_name(f"{records.name}-{rank}.json").write_text(json.dumps(record))
    write_pid(int(rank))
    print(f"rank {rank} of {records.name}", flush=True)  # noqa: T201
    order = json.loads(file.read_text())[int(rank)]
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "hang":
        time.sleep(3600)
    if order == "leave":
        return GenerationEnded(1)
    if order == "fail":
        return InputError("wrong", field="model", got=1)
    if order == "wait":
        time.sleep(0.3)
        return ValueError("an error while a rank is lost")
    return RankFailed("a peer died: Connection closed by peer") if order == "lose peer" else None


if __name__ == "__main__":
    os._exit(rank_service.serve_generations(follow_order))
