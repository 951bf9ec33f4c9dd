"""A rank with faults: `shardwright.training.worker` with the faults of a plan, from deaths to wrong
numbers.

The plan is a JSON list in the environment, each fault {"rank", "step", "place", "signals"}. Each
fault happens once per run: a file in the folder of marks records that it has. Each rank also keeps
a ledger there of the samples that its steps have used.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO

import torch

PLAN = "SHARDWRIGHT_TEST_FAULTS"
MARKS = "SHARDWRIGHT_TEST_MARKS"
PLACES = {
    "forward": "signals, before the forward pass of the step",
    "collective": "signals, before an all-reduce of the step",
    "optimizer": "signals, before the update",
    "save": "signals, before a file of this step's checkpoint is synchronised to the disk",
    "publish": "signals, after that checkpoint is renamed and before `latest` points to it",
    "announce": "signals, before this rank announces the copy of its state after the step",
    "send": "signals, before the parts of that copy are sent, after its values",
    "kept": "signals, after that copy and the peer's are complete on this rank",
    "flip": "a bit of a weight flips after the step",
    "poison": "a gradient is not a number",
    "pass over": "the update is skipped, as if some gradient were not a number",
    "spike": "the loss is a thousand times what it is",
    "jump": "the samples of the next `count` steps are skipped",
    "hold": "the interpreter's lock is held until the process ends",
    "sleep": "the rank sleeps while others wait for it",
    "interrupt": "the launcher gets SIGINT; the rank runs its step after it was notified",
    "skip": "the rank skips its next all-reduce",
    "slow": "reading a step's samples takes `seconds` longer from here on",
    "memory": "no more memory can be allocated",
    "clock": "the wall clock jumps by a day from here on",
    "finished": "no fault: the state after the step is also saved next to the marks",
    "restored": "no fault: the state from which the ranks continue is saved there",
}
"""Fault at each place."""


class Faults:
    """Faults that are still to happen on this rank; `step` counts finished optimizer steps."""

    def __init__(self) -> None:
        self.step = 0
        self.saving = threading.local()
        """Its `step` is that of the checkpoint that this thread writes; in the background it
        differs from the loop's.
        """
        self.copying = threading.local()
        """Its `step` is that of the copy that this thread sends, `transfers` their number."""

    # A process that waits for its rank has none when the faults are installed.
    @cached_property
    def plan(self) -> list[dict[str, Any]]:
        """Faults of this rank."""
        plan = json.loads(os.environ[PLAN])
        assert {fault["place"] for fault in plan} <= set(PLACES)
        return [fault for fault in plan if fault["rank"] == int(os.environ["RANK"])]

    @cached_property
    def ledger(self) -> TextIO:
        """Samples that the steps of this rank have used."""
        path = Path(os.environ[MARKS]) / f"ledger-{os.environ['RANK']}.jsonl"
        return path.open("a", encoding="utf-8")

    def take_due_faults(self, place: str) -> list[dict[str, Any]]:
        """Return the faults that are due at this place, each once."""
        due = []
        step = self.step
        if place in ("save", "publish"):
            step = getattr(self.saving, "step", None)
        elif place in ("announce", "send", "kept"):
            step = self.copying.step
        for fault in self.plan:
            mark = Path(os.environ[MARKS]) / "-".join(
                str(fault[key]) for key in ("rank", "step", "place")
            )
            if fault["place"] == place and fault["step"] == step and not mark.exists():
                mark.touch()
                due.append(fault)
        return due

    def send_signals(self, place: str) -> None:
        """Send this process the signals that are due at this place."""
        for fault in self.take_due_faults(place):
            for name in fault["signals"]:
                os.kill(os.getpid(), signal.Signals[name])


def call_before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Make `call` run before a function of a module or class."""
    original = getattr(owner, name)

    def call_both(*arguments: Any, **options: Any) -> Any:
        call(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, call_both)


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function of a module or class by `call(original, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: call(original, *arguments, **options))


def install_faults(faults: Faults) -> None:
    """Install the faults at the places where they happen."""
    import torch.distributed as dist

    from shardwright.checkpoint import background_save, commit
    from shardwright.checkpoint.disk import Disk
    from shardwright.optim import local_updates
    from shardwright.training import loop, step_policy

    def start_step(loop_instance: loop.TrainingLoop, *_: object) -> None:
        faults.step = loop_instance.state.step
        interrupt_launcher(faults, loop_instance)
        install_data_faults(faults, loop_instance)
        install_hangs(faults)

    def record_saved_step(_ranks: object, _root: object, planned: Any, **_: object) -> None:
        faults.saving.step = planned.step

    def write_ledger(_model: object, micro_batches: Any, *, step: int, **_: object) -> None:
        used = [int(index) for batch in micro_batches for index in batch.sample_indices_B]
        record = {
            "generation": os.environ["TORCHELASTIC_RUN_ID"],
            "at": time.monotonic(),
            "step": step + 1,
            "used": used,
        }
        faults.ledger.write(json.dumps(record) + "\n")
        faults.ledger.flush()

    call_before(loop.TrainingLoop, "_run_step", start_step)
    call_before(loop, "accumulate_gradients", lambda *_, **__: faults.send_signals("forward"))
    call_before(loop, "accumulate_gradients", write_ledger)
    call_before(dist, "all_reduce", lambda *_, **__: faults.send_signals("collective"))
    call_before(local_updates.AdamW, "step", lambda *_: faults.send_signals("optimizer"))
    call_before(background_save, "finish_save", record_saved_step)
    call_before(Disk, "sync", lambda *_: faults.send_signals("save"))
    call_before(commit, "move_pointer", lambda *_, **__: faults.send_signals("publish"))
    install_update_faults(faults, loop, step_policy)
    install_copy_faults(faults)
    install_probes(faults)


def install_probes(faults: Faults) -> None:
    """Install the probes, which save what the ranks have; each is in the plan of every rank."""
    from shardwright.checkpoint.tensor_saving import save_checkpoint
    from shardwright.parallel.mesh import get_host_group
    from shardwright.training.checkpointing import RunCheckpointer
    from shardwright.training.step_policy import StepPolicy

    def save(place: str, checkpointer: Any) -> None:
        step = checkpointer.state.step
        if any(fault["place"] == place and fault["step"] == step for fault in faults.plan):
            root = Path(os.environ[MARKS]) / f"{place}-by-{os.environ['WORLD_SIZE']}"
            save_checkpoint(root, step, checkpointer.collect_tensors(), {}, group=get_host_group())

    def restore(original: Callable[..., Any], checkpointer: Any, *arguments: Any) -> None:
        original(checkpointer, *arguments)
        save("restored", checkpointer)

    replace(RunCheckpointer, "restore", restore)
    call_before(StepPolicy, "apply", lambda policy, *_, **__: save("finished", policy.checkpointer))


def install_copy_faults(faults: Faults) -> None:
    """Install the faults while the state is copied to a peer's memory."""
    from shardwright.peer_copies.copier import PeerCopier
    from shardwright.peer_copies.memory import PeerMemory

    def announce(_copier: object, copy_id: Any, _boxes: object) -> None:
        faults.copying.step = copy_id.step
        faults.copying.transfers = 0
        faults.send_signals("announce")

    def transfer(*_: object) -> None:
        faults.copying.transfers += 1
        if faults.copying.transfers == 3:  # after the length and the text of the values
            faults.send_signals("send")

    def keep(original: Callable[..., Any], *arguments: Any) -> None:
        original(*arguments)
        if hasattr(faults.copying, "step"):  # not when a generation starts
            faults.send_signals("kept")

    call_before(PeerCopier, "_announce", announce)
    call_before(PeerCopier, "_transfer", transfer)
    replace(PeerMemory, "keep_slot", keep)


def _pause(seconds: float, *_: object) -> None:
    time.sleep(seconds)


def interrupt_launcher(faults: Faults, loop_instance: Any) -> None:
    """Interrupt the launcher before this step, as Ctrl-C in its terminal does."""
    if faults.take_due_faults("interrupt"):
        os.kill(os.getppid(), signal.SIGINT)
        while not loop_instance.context.stop_request:
            time.sleep(0.01)


def install_data_faults(faults: Faults, loop_instance: Any) -> None:
    """Install the faults that change which samples this step reads."""
    for fault in faults.take_due_faults("jump"):
        loop_instance.state.skipped_data_steps += fault["count"]


def install_update_faults(faults: Faults, loop: Any, step_policy: Any) -> None:
    """Install the faults between the backward pass and the update, and after it."""
    from shardwright.training.metrics.host_reads import read_together
    from shardwright.training.step import StepLoss, StepUpdate

    def flip(loop_instance: Any, *_: object) -> None:
        if faults.take_due_faults("flip"):
            parameter = next(iter(dict(loop_instance.state.model.named_parameters()).values()))
            parameter.data.view(torch.int32).view(-1)[3] ^= 1 << 20

    def update(
        original: Callable[..., Any], model: Any, optimizer: torch.optim.Optimizer, **options: Any
    ) -> Any:
        if faults.take_due_faults("poison"):
            gradients = [gradient for gradient, _ in model.list_gradients() if gradient is not None]
            gradients[0].view(-1)[0] = float("nan")
        if faults.take_due_faults("pass over"):
            optimizer.zero_grad(set_to_none=True)
            values = tuple(read_together(options["read_along"]))
            return StepUpdate(float("nan"), is_skipped=True, read_values=values)
        return original(model, optimizer, **options)

    def accumulate(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        loss = original(*arguments, **options)
        if faults.take_due_faults("spike"):
            return StepLoss(loss.loss_sum * 1000, loss.supervised_tokens, loss.router_table)
        return loss

    call_before(step_policy.StepPolicy, "_check_replicas", flip)
    replace(loop, "update_parameters", update)
    replace(loop, "accumulate_gradients", accumulate)


def install_hangs(faults: Faults) -> None:
    """Install the faults that stop this rank or slow it down."""
    import torch.distributed as dist

    from shardwright.training import loop

    if faults.take_due_faults("hold"):
        # PyDLL keeps the interpreter's lock where CDLL does not; no signal wakes a thread that
        # waits for a mutex that it holds itself.
        c = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(256)
        c.pthread_mutex_init(mutex, None)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)
    if faults.take_due_faults("sleep"):
        time.sleep(3600)
    if faults.take_due_faults("skip"):
        original = dist.all_reduce

        def skip(*_: object, **__: object) -> None:
            dist.all_reduce = original

        dist.all_reduce = skip
    for fault in faults.take_due_faults("slow"):
        call_before(loop, "read_step_micro_batches", partial(_pause, fault["seconds"]))
    if faults.take_due_faults("memory"):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if faults.take_due_faults("clock"):
        now = time.time
        time.time = lambda: now() + 86400.0


if __name__ == "__main__":
    install_faults(Faults())
    from shardwright.training.worker import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
