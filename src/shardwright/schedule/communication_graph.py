"""Order of computations and messages on devices, and circular waits in it.

The model is that of NCCL with eagerly initialised groups, under which the order of calls matters
most:

- A rank's computations run one after another, in the order in which its host issues them.
- A rank has one queue per process group. The group's operations, collectives included, run one
  after another in the order of issue, each after the computations that were issued before it.
- A message passes once it is at the head of the queues of all its ranks. Nothing is buffered.
- The host does not wait. A wait for a message delays later computations of this rank only.
- The first message on a connection is the exception: each host waits until the others issue it.

gloo runs messages of different pairs of ranks independently, which is a queue for each pair and
direction: under gloo a rank waits for no more than under NCCL.

Sources: ProcessGroupNCCL's warning about unbatched point-to-point calls (torch 2.11), and
`ncclTransportP2pSetup` in NCCL's `src/transport.cc` (2.30).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from shardwright.schedule.actions import Schedule
from shardwright.schedule.transfers import Channel, ScheduleStep, find_source

Node = Hashable
"""A computation, a message or a connection; `str(node)` describes it."""


class CommunicationGraph:
    """Computations and messages of all ranks, with the dependencies of each.

    Add the calls of every rank in the order of issue; the order of the ranks does not matter.

    Attributes:
        awaited: for each node the nodes that it waits for, with the reason as a sentence.
    """

    def __init__(self) -> None:
        self.awaited: dict[Node, dict[Node, str]] = {}
        self._last_computation: dict[int, Node] = {}
        self._last_connections: dict[int, Sequence[Node]] = {}
        self._queues: dict[tuple[int, Hashable], Sequence[Node]] = {}

    def add_computation(self, rank: int, computation: Node, needed: Sequence[Node] = ()) -> None:
        """Add a computation of a rank that needs the results of other nodes."""
        awaited = self._add_issue(rank, computation, f"{{}} runs on rank {rank} after {{}}")
        for node in needed:
            awaited.setdefault(node, "{} needs {}")
        self._last_computation[rank] = computation

    def add_operation(self, rank: int, queue: Hashable, messages: Sequence[Node]) -> None:
        """Add an operation of a rank: one message, or several that are batched.

        Args:
            queue: process group of the messages.
            messages: the same nodes on every rank that takes part.
        """
        previous = self._queues.get((rank, queue), ())
        for message in messages:
            awaited = self._add_issue(rank, message, f"rank {rank} issues {{}} after {{}}")
            for earlier in previous:
                awaited.setdefault(earlier, f"{{}} is queued on rank {rank} behind {{}}")
        self._queues[rank, queue] = messages

    def add_connections(self, rank: int, connections: Sequence[Node]) -> None:
        """Add a call in which a rank's host waits until other hosts open these too."""
        for connection in connections:
            self._add_issue(rank, connection, f"rank {rank} opens {{}} after {{}}")
        self._last_connections[rank] = connections

    def _add_issue(self, rank: int, node: Node, reason: str) -> dict[Node, str]:
        awaited = self.awaited.setdefault(node, {})
        if rank in self._last_computation:
            awaited.setdefault(self._last_computation[rank], reason)
        for connection in self._last_connections.get(rank, ()):
            awaited.setdefault(connection, reason)
        return awaited

    def find_circular_wait(self) -> tuple[str, ...] | None:
        """Find nodes that wait for each other; return a sentence per wait, or None."""
        unfinished = self._list_unfinished()
        if not unfinished:
            return None
        node = next(iter(unfinished))
        visited: dict[Node, None] = {}
        while node not in visited:
            visited[node] = None
            node = next(other for other in self.awaited[node] if other in unfinished)
        cycle = self._find_shortest_cycle(node, unfinished)
        return tuple(
            self.awaited[waiting][awaited].format(waiting, awaited)
            for waiting, awaited in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        )

    def sort(self) -> list[Node]:
        """Return the nodes that can run, in an order in which they can."""
        num_awaited = {node: len(awaited) for node, awaited in self.awaited.items()}
        waiting: dict[Node, list[Node]] = {}
        for node, awaited in self.awaited.items():
            for other in awaited:
                waiting.setdefault(other, []).append(node)
        order = [node for node, number in num_awaited.items() if not number]
        for node in order:
            for other in waiting.get(node, ()):
                num_awaited[other] -= 1
                if not num_awaited[other]:
                    order.append(other)
        return order

    def _list_unfinished(self) -> dict[Node, None]:
        finished = set(self.sort())
        return {node: None for node in self.awaited if node not in finished}

    def _find_shortest_cycle(self, start: Node, nodes: Mapping[Node, None]) -> list[Node]:
        """Find the shortest cycle through a node, which is on one of `nodes`."""
        waiting_of: dict[Node, Node] = {}
        pending = deque([start])
        while start not in waiting_of:
            node = pending.popleft()
            for other in self.awaited[node]:
                if other in nodes and other not in waiting_of:
                    waiting_of[other] = node
                    pending.append(other)
        cycle = [waiting_of[start]]
        while cycle[-1] != start:
            cycle.append(waiting_of[cycle[-1]])
        return cycle[::-1]


def build_communication_graph(
    schedule: Schedule,
    steps: Sequence[Sequence[ScheduleStep]],
    group_of_channel: Mapping[Channel, int],
) -> CommunicationGraph:
    """Build the graph of a schedule's execution, by rank as in `plan_steps`."""
    graph = CommunicationGraph()
    sources = {
        (action.kind == "F", action.stage, action.micro_batch): action
        for row in schedule.rows
        for action in row
        if action.kind != "W"
    }

    def list_needed(step: ScheduleStep) -> list[Node]:
        if step.awaited_transfer is not None:
            return [step.awaited_transfer]
        source = find_source(step.action, schedule.num_stages)
        return [] if source is None else [sources[*source, step.action.micro_batch]]

    for rank, row in enumerate(steps):
        for step in row:
            for transfer in step.posted_receives:
                graph.add_operation(rank, group_of_channel[transfer.channel], [transfer])
            graph.add_computation(rank, step.action, list_needed(step))
            if step.sent_transfer is not None:
                channel = step.sent_transfer.channel
                graph.add_operation(rank, group_of_channel[channel], [step.sent_transfer])
    return graph
