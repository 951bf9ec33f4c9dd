"""Records of NCCL's flight recorder, built key by key as torch writes them.

Torch 2.11 and 2.13 have the same keys (`FlightRecorderDetail.hpp`, version 2.10 of the format).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Group = tuple[str, str, tuple[int, ...]]
"""Name, description, ranks."""

WORLD: Group = ("0", "default_pg", (0, 1, 2, 3))
TENSOR: Group = ("5f1d", "tp", (0, 1))
OTHER_TENSOR: Group = ("77ab", "tp", (2, 3))
DATA: Group = ("c0de", "fsdp", (0, 2))
OTHER_DATA: Group = ("feed", "fsdp", (1, 3))


@dataclass
class Recorder:
    """Flight recorder of one rank; operations are numbered as NCCL's backend numbers them."""

    rank: int
    clock: int = 1_780_000_000_000_000_000
    groups: dict[str, Group] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)

    def collective(
        self,
        group: Group,
        name: str,
        elements: int,
        state: str = "completed",
        *,
        outputs: int | None = None,
        dtype: str = "Float",
        line: int = 10,
    ) -> None:
        """Enqueue a collective."""
        self.collectives[group[0]] = self.collectives.get(group[0], 0) + 1
        sizes = [[elements]], [[elements if outputs is None else outputs]]
        self._append(group, f"nccl:{name}", *sizes, state, dtype, line)

    def send(self, group: Group, receiver: int, elements: int, state: str = "completed") -> None:
        """Enqueue a send to a rank."""
        self._message(group, "send", receiver, elements, state)

    def receive(self, group: Group, sender: int, elements: int, state: str = "completed") -> None:
        """Enqueue a receive from a rank."""
        self._message(group, "recv", sender, elements, state)

    def batch(
        self, group: Group, messages: Sequence[tuple[str, int, int]], state: str = "completed"
    ) -> None:
        """Enqueue a batch of messages (`send` or `recv`, rank, elements).

        The messages stay `scheduled`; the entry that ends the batch has its state and no sizes.
        """
        name = group[0]
        self.collectives[name] = self.collectives.get(name, 0) + 1
        self.messages[name] = self.messages.get(name, 0) + 1
        for operation, peer, elements in messages:
            self._append_message(group, operation, peer, elements, "scheduled")
        self._append(group, "nccl:coalesced", [], [], state, "Float", 30, is_p2p=True)

    def build(self) -> dict[str, Any]:
        """Return the content of the record."""
        return {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": str(list(ranks))}
                for name, description, ranks in self.groups.values()
            },
            "comm_lib_version": "2.28.3",
            "pg_status": {
                "0": {
                    "last_enqueued_collective": 1,
                    "last_started_collective": -1,
                    "last_completed_collective": 1,
                }
            },
            "entries": self.entries,
        }

    def write(self, folder: Path) -> Path:
        """Write the record where `RECORD_STEM` expects it."""
        path = folder / f"nccl-rank-{self.rank}"
        path.write_bytes(pickle.dumps(self.build(), protocol=2))
        return path

    def _message(self, group: Group, operation: str, peer: int, elements: int, state: str) -> None:
        self.messages[group[0]] = self.messages.get(group[0], 0) + 1
        self._append_message(group, operation, peer, elements, state)

    def _append_message(
        self, group: Group, operation: str, peer: int, elements: int, state: str
    ) -> None:
        own = group[2].index(self.rank)
        other = group[2].index(peer)
        arrow = "->" if operation == "send" else "<-"
        self._append(
            group,
            f"nccl:{operation} {own}{arrow}{other}",
            [[elements]],
            [[elements]],
            state,
            "BFloat16",
            20,
            is_p2p=True,
        )

    def _append(
        self,
        group: Group,
        profiling_name: str,
        input_sizes: list[list[int]],
        output_sizes: list[list[int]],
        state: str,
        dtype: str,
        line: int,
        *,
        is_p2p: bool = False,
    ) -> None:
        name = group[0]
        self.groups[name] = group
        self.clock += 1_000_000
        site = "/opt/python/site-packages/torch/distributed"
        self.entries.append(
            {
                "frames": [
                    {"name": "call", "filename": f"{site}/distributed_c10d.py", "line": 3001},
                    {"name": "wrapper", "filename": f"{site}/c10d_logger.py", "line": 81},
                    {"name": "run_step", "filename": "/home/me/job/step.py", "line": line},
                ],
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(name),
                "process_group": (name, group[1]),
                "thread_name": "python",
                "thread_id": "140000000000000",
                "collective_seq_id": self.collectives.get(name, 0),
                "p2p_seq_id": self.messages.get(name, 0),
                "op_id": len(self.entries) + 1,
                "profiling_name": profiling_name,
                "time_created_ns": self.clock,
                "input_sizes": input_sizes,
                "input_dtypes": [dtype] * len(input_sizes),
                "output_sizes": output_sizes,
                "output_dtypes": [dtype] * len(output_sizes),
                "state": state,
                "time_discovered_started_ns": None if state == "scheduled" else self.clock + 5,
                "time_discovered_completed_ns": self.clock + 9 if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600000,
                "is_p2p": is_p2p,
            }
        )
