"""A rank of a run that meets faults: `shardwright.train.worker` with deaths and signals at the places that a plan names.

The plan is a JSON list in the environment, each fault {"rank", "step", "place", "signals"}; each happens once in the life of the
run: a mark in the folder of marks says that it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PLAN, MARKS = "SHARDWRIGHT_TEST_FAULTS", "SHARDWRIGHT_TEST_MARKS"
PLACES = ("forward", "collective", "optimizer", "save", "publish", "flip")
"""The last one flips a bit of a weight after the step; at the others signals are sent."""


class Faults:
    """What is still to happen on this rank; `step` counts finished optimizer steps."""

    def __init__(self) -> None:
        self.step = 0
        rank = int(os.environ["RANK"])
        self.plan = [fault for fault in json.loads(os.environ[PLAN]) if fault["rank"] == rank]

    def due(self, place: str) -> list[dict[str, Any]]:
        """Faults that are due here, each given out once."""
        found = []
        for fault in self.plan:
            mark = Path(os.environ[MARKS]) / "-".join(str(fault[key]) for key in ("rank", "step", "place"))
            if fault["place"] == place and fault["step"] == self.step and not mark.exists():
                mark.touch()
                found.append(fault)
        return found

    def meet(self, place: str) -> None:
        """Send this process the signals that are due here."""
        for fault in self.due(place):
            for name in fault["signals"]:
                os.kill(os.getpid(), signal.Signals[name])


def before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Let `call` run ahead of a function of a module or class."""
    former = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        call(*arguments)
        return former(*arguments, **options)

    setattr(owner, name, wrapped)


def arm(faults: Faults) -> None:
    """Put the faults into the places where they happen."""
    import torch.distributed as dist

    from shardwright.checkpoint import commit
    from shardwright.checkpoint.disk import Disk
    from shardwright.train import loop

    def note(running: loop.Loop, *_: object) -> None:
        faults.step = running.state.step

    def flip(running: loop.Loop, *_: object) -> None:
        if faults.due("flip"):
            parameter = next(iter(dict(running.state.model.named_parameters()).values()))
            parameter.data.view(torch.int32).view(-1)[3] ^= 1 << 20

    before(loop.Loop, "_step", note)
    before(loop.Loop, "_check_replicas", flip)
    before(loop, "accumulate_gradients", lambda *_: faults.meet("forward"))
    before(dist, "all_reduce", lambda *_: faults.meet("collective"))
    before(torch.optim.AdamW, "step", lambda *_: faults.meet("optimizer"))
    before(Disk, "sync", lambda *_: faults.meet("save"))
    before(commit, "move_pointer", lambda *_: faults.meet("publish"))


if __name__ == "__main__":
    arm(Faults())
    from shardwright.train.worker import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
