"""A rank of a run that meets faults: `shardwright.train.worker` with what a plan names, from deaths
to wrong numbers.

The plan is a JSON list in the environment, each fault {"rank", "step", "place", "signals"}; each
happens once in the life of the run: a mark in the folder of marks says that it has. Each rank also
keeps a ledger there of the samples that its steps have used.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

PLAN = "SHARDWRIGHT_TEST_FAULTS"
MARKS = "SHARDWRIGHT_TEST_MARKS"
PLACES = {
    "forward": "signals, before the forward pass of the step",
    "collective": "signals, before an all-reduce of the step",
    "optimizer": "signals, before the update",
    "save": "signals, before a file of the checkpoint of this step is brought to the device",
    "publish": "signals, after that checkpoint has its name and before `latest` names it",
    "flip": "a bit of a weight flips after the step",
    "poison": "a gradient is not a number",
    "pass over": "the update is passed over, as if some gradient were not a number",
    "spike": "the loss is a thousand times what it is",
    "jump": "the samples of this many steps are left out from here on (`count`)",
    "hold": "the interpreter's lock is held for as long as the process lives",
    "sleep": "the rank sleeps, and others wait for it",
    "interrupt": "the launcher gets SIGINT, and the rank takes its step once it has been told",
    "skip": "the rank skips its next all-reduce",
    "slow": "reading a step's samples takes `seconds` longer from here on",
    "memory": "no more memory than now may be had",
    "clock": "the wall clock jumps by a day from here on",
}
"""What happens at each place."""


class Faults:
    """What is still to happen on this rank; `step` counts finished optimizer steps."""

    def __init__(self) -> None:
        self.step = 0
        self.saving = threading.local()
        """Its `step` is that of the checkpoint which this thread is writing: in the background it
        is not the loop's.
        """
        rank = int(os.environ["RANK"])
        self.plan = [fault for fault in json.loads(os.environ[PLAN]) if fault["rank"] == rank]
        assert {fault["place"] for fault in self.plan} <= set(PLACES)
        self.ledger = (Path(os.environ[MARKS]) / f"ledger-{rank}.jsonl").open("a", encoding="utf-8")

    def is_due(self, place: str) -> list[dict[str, Any]]:
        """Faults that are due here, each given out once."""
        found = []
        step = getattr(self.saving, "step", None) if place in ("save", "publish") else self.step
        for fault in self.plan:
            mark = Path(os.environ[MARKS]) / "-".join(
                str(fault[key]) for key in ("rank", "step", "place")
            )
            if fault["place"] == place and fault["step"] == step and not mark.exists():
                mark.touch()
                found.append(fault)
        return found

    def intersect(self, place: str) -> None:
        """Send this process the signals that are due here."""
        for fault in self.is_due(place):
            for name in fault["signals"]:
                os.kill(os.getpid(), signal.Signals[name])


def before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Let `call` run ahead of a function of a module or class."""
    former = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        call(*arguments, **options)
        return former(*arguments, **options)

    setattr(owner, name, wrapped)


def instead(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call(former, ...)` run in the place of a function of a module or class."""
    former = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: call(former, *arguments, **options))


def arm(faults: Faults) -> None:
    """Put the faults into the places where they happen."""
    import torch.distributed as dist

    from shardwright.checkpoint import background_save, commit
    from shardwright.checkpoint.disk import Disk
    from shardwright.train import loop, step_policy

    def note(running: loop.TrainingLoop, *_: object) -> None:
        faults.step = running.state.step
        ask_to_stop(faults, running)
        arm_numbers(faults, running)
        arm_hangs(faults)

    def note_save(_ranks: object, _root: object, planned: Any, **_: object) -> None:
        faults.saving.step = planned.step

    def keep_ledger(_model: object, micro_batches: Any, *, step: int, **_: object) -> None:
        used = [int(index) for batch in micro_batches for index in batch.sample_indices_B]
        told = {
            "generation": os.environ["TORCHELASTIC_RUN_ID"],
            "at": time.monotonic(),
            "step": step + 1,
            "used": used,
        }
        faults.ledger.write(json.dumps(told) + "\n")
        faults.ledger.flush()

    before(loop.TrainingLoop, "_run_step", note)
    before(loop, "accumulate_gradients", lambda *_, **__: faults.intersect("forward"))
    before(loop, "accumulate_gradients", keep_ledger)
    before(dist, "all_reduce", lambda *_, **__: faults.intersect("collective"))
    before(torch.optim.AdamW, "step", lambda *_: faults.intersect("optimizer"))
    before(background_save, "finish_save", note_save)
    before(Disk, "sync", lambda *_: faults.intersect("save"))
    before(commit, "move_pointer", lambda *_, **__: faults.intersect("publish"))
    arm_update(faults, loop, step_policy)


def _pause(seconds: float, *_: object) -> None:
    time.sleep(seconds)


def ask_to_stop(faults: Faults, running: Any) -> None:
    """As by Ctrl-C in the launcher's terminal, before this step."""
    if faults.is_due("interrupt"):
        os.kill(os.getppid(), signal.SIGINT)
        while not running.context.stop_request:
            time.sleep(0.01)


def arm_numbers(faults: Faults, running: Any) -> None:
    """Faults that change what this step reads."""
    for fault in faults.is_due("jump"):
        running.state.skipped_data_steps += fault["count"]


def arm_update(faults: Faults, loop: Any, step_policy: Any) -> None:
    """Faults between the backward pass and the update, and after it."""
    from shardwright.train.step import StepLoss, StepUpdate

    def flip(running: Any, *_: object) -> None:
        if faults.is_due("flip"):
            parameter = next(iter(dict(running.state.model.named_parameters()).values()))
            parameter.data.view(torch.int32).view(-1)[3] ^= 1 << 20

    def update(
        former: Callable[..., Any], model: Any, optimizer: torch.optim.Optimizer, **options: Any
    ) -> Any:
        if faults.is_due("poison"):
            gradients = [gradient for gradient, _ in model.list_gradients() if gradient is not None]
            gradients[0].view(-1)[0] = float("nan")
        if faults.is_due("pass over"):
            optimizer.zero_grad(set_to_none=True)
            return StepUpdate(float("nan"), is_skipped=True)
        return former(model, optimizer, **options)

    def accumulate(former: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        loss = former(*arguments, **options)
        if faults.is_due("spike"):
            return StepLoss(loss.loss_sum * 1000, loss.supervised_tokens, loss.router_table)
        return loss

    before(step_policy.StepPolicy, "_check_replicas", flip)
    instead(loop, "update_parameters", update)
    instead(loop, "accumulate_gradients", accumulate)


def arm_hangs(faults: Faults) -> None:
    """Faults that stop this rank, or slow it down."""
    import torch.distributed as dist

    from shardwright.train import loop

    if faults.is_due("hold"):
        # PyDLL keeps the interpreter's lock where CDLL does not; no signal wakes who waits for a
        # mutex of his own.
        c = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(256)
        c.pthread_mutex_init(mutex, None)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)
    if faults.is_due("sleep"):
        time.sleep(3600)
    if faults.is_due("skip"):
        former = dist.all_reduce

        def skip(*_: object, **__: object) -> None:
            dist.all_reduce = former

        dist.all_reduce = skip
    for fault in faults.is_due("slow"):
        before(loop, "read_step_micro_batches", partial(_pause, fault["seconds"]))
    if faults.is_due("memory"):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if faults.is_due("clock"):
        now = time.time
        time.time = lambda: now() + 86400.0


if __name__ == "__main__":
    arm(Faults())
    from shardwright.train.worker import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
