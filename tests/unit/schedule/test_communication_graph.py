"""Circular waits under NCCL's order: the model, and the groups of a pipeline's channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    Action,
    ActionTimes,
    Channel,
    CommunicationGraph,
    Schedule,
    Transfer,
    assign_channel_groups,
    assign_stages,
    build_communication_graph,
    build_forward_only,
    build_schedule,
    check_schedule,
    plan_steps,
    simulate_step_seconds,
)

Grouping = Callable[[Sequence[int]], Mapping[Channel, int]]


def list_channels(rank_of_stage: Sequence[int]) -> list[Channel]:
    return list(assign_channel_groups(rank_of_stage))


def group_by_direction(rank_of_stage: Sequence[int]) -> dict[Channel, int]:
    """One group for messages to higher ranks and one for those to lower ranks."""
    return {channel: int(channel[0] > channel[1]) for channel in list_channels(rank_of_stage)}


def group_together(rank_of_stage: Sequence[int]) -> dict[Channel, int]:
    return dict.fromkeys(list_channels(rank_of_stage), 0)


def build_graph(
    schedule: Schedule, grouping: Grouping = assign_channel_groups, lookahead: int = 2
) -> CommunicationGraph:
    return build_communication_graph(
        schedule, plan_steps(schedule, lookahead), grouping(schedule.rank_of_stage)
    )


def compute_step_seconds(graph: CommunicationGraph, transfer: float) -> float:
    """Return the length of the longest path; F, I and W take one second each."""
    ends: dict[object, float] = {}
    for node in graph.sort():
        duration = transfer
        if isinstance(node, Action):
            duration = 2.0 if node.kind == "B" else 1.0
        ends[node] = duration + max((ends[other] for other in graph.awaited[node]), default=0.0)
    assert len(ends) == len(graph.awaited), "the graph has a cycle"
    return max(ends.values())


def add_calls(*calls: tuple[int, str, Sequence[str]]) -> CommunicationGraph:
    """Build a graph of (rank, group, messages) in the order of issue; `wait` is not a group."""
    graph = CommunicationGraph()
    for number, (rank, group, messages) in enumerate(calls):
        if group == "wait":
            graph.add_computation(rank, f"work {number}", messages)
        else:
            graph.add_operation(rank, group, messages)
    return graph


def test_two_sends_that_cross_in_one_queue_wait_for_each_other() -> None:
    graph = add_calls((0, "g", ["up"]), (0, "g", ["down"]), (1, "g", ["down"]), (1, "g", ["up"]))
    assert graph.find_circular_wait() == (
        "up is queued on rank 1 behind down",
        "down is queued on rank 0 behind up",
    )


@pytest.mark.parametrize(
    "calls",
    [
        [(0, "g", ["up"]), (0, "h", ["down"]), (1, "h", ["down"]), (1, "g", ["up"])],
        [(0, "g", ["up", "down"]), (1, "g", ["down", "up"])],
        [(0, "g", ["up"]), (0, "g", ["down"]), (1, "g", ["up"]), (1, "g", ["down"])],
    ],
    ids=["two groups", "one batch", "same order"],
)
def test_messages_that_need_not_wait(calls: list[tuple[int, str, Sequence[str]]]) -> None:
    graph = add_calls(*calls)
    assert graph.find_circular_wait() is None
    assert set(graph.sort()) == {"up", "down"}


def test_a_collective_is_queued_behind_a_message_of_its_group() -> None:
    calls = [(0, "g", ["message"]), (0, "g", ["sum"]), (1, "g", ["sum"]), (1, "g", ["message"])]
    cycle = add_calls(*calls).find_circular_wait()
    assert cycle is not None
    assert "sum is queued on rank 0 behind message" in cycle


def test_a_wait_delays_later_operations_of_its_rank_only() -> None:
    """Rank 0 waits for a receive before the send that rank 1 answers; the host never waits."""
    receive_first = [(0, "g", ["down"]), (0, "wait", ["down"]), (0, "h", ["up"])]
    answer = [(1, "h", ["up"]), (1, "wait", ["up"]), (1, "g", ["down"])]
    cycle = add_calls(*receive_first, *answer).find_circular_wait()
    assert cycle is not None
    assert "rank 0 issues up after work 1" in cycle
    posted_early = [receive_first[0], receive_first[2], receive_first[1]]
    assert add_calls(*posted_early, *answer).find_circular_wait() is None


def test_hosts_wait_for_each_other_at_the_first_message() -> None:
    """A receive that is posted before the send that it answers."""
    graph = add_calls()
    graph.add_connections(0, ["down"])
    graph.add_connections(0, ["up"])
    graph.add_connections(1, ["up"])
    graph.add_connections(1, ["down"])
    assert graph.find_circular_wait() is not None
    batched = add_calls()
    batched.add_connections(0, ["down", "up"])
    batched.add_connections(1, ["up", "down"])
    assert batched.find_circular_wait() is None


def list_schedules(
    num_ranks: int, counts: Sequence[int] = (1, 2, 3), virtual_stages: Sequence[int] = (2, 3)
) -> list[Schedule]:
    """List every named schedule with its fewest micro-batches and more."""
    schedules = []
    for name, family in PIPELINE_SCHEDULES.items():
        for count in counts:
            for stages in virtual_stages if family.stage_assignment == "looped" else (None,):
                least = max(family.min_micro_batches_per_rank, 1)
                number = least * num_ranks * count
                if count == 1 and not family.has_divisibility_rule and least == 1:
                    number = num_ranks - 1  # fewer than ranks
                schedules.append(build_schedule(name, num_ranks, number, stages))
    return schedules


@pytest.mark.parametrize("num_ranks", range(2, 17))
def test_no_schedule_has_a_circular_wait(num_ranks: int) -> None:
    for schedule in list_schedules(num_ranks, *([(1, 2), (2,)] if num_ranks > 8 else [])):
        assert check_schedule(schedule).num_transfers > 0
        forward_only = build_forward_only(schedule.rank_of_stage, schedule.num_micro_batches)
        assert check_schedule(forward_only).num_transfers > 0


def find_circular_schedules(num_ranks: int, grouping: Grouping, lookahead: int) -> set[str]:
    return {
        name
        for name in PIPELINE_SCHEDULES
        if build_graph(
            build_schedule(name, num_ranks, 2 * num_ranks), grouping, lookahead
        ).find_circular_wait()
        is not None
    }


def test_one_group_per_direction_has_circular_waits_from_four_ranks_on() -> None:
    """Receives are posted two actions ahead, in the group of the sends behind them."""
    named = {"1f1b", "interleaved_1f1b", "dualpipev"}
    assert [find_circular_schedules(p, group_by_direction, 2) for p in (2, 3, 4, 8)] == [
        set(),
        set(),
        named,
        named | {"zb_h1", "zbv"},
    ]
    assert find_circular_schedules(8, group_by_direction, 1) == set()
    assert find_circular_schedules(2, group_together, 2) != set()


def test_a_circular_wait_is_named_action_by_action() -> None:
    cycle = build_graph(build_schedule("1f1b", 4, 8), group_by_direction).find_circular_wait()
    assert cycle is not None
    text = "; ".join(cycle)
    assert "is queued on rank" in text
    assert "behind the message of" in text
    # Each wait begins where the one before it ends.
    for wait, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        last = wait.split(" needs ")[-1].split(" behind ")[-1].split(" after ")[-1]
        assert last in following


@pytest.mark.parametrize("num_ranks", range(2, 17))
@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_no_rank_has_two_channels_in_one_group(name: str, num_ranks: int) -> None:
    groups = assign_channel_groups(assign_stages(name, num_ranks))
    ends = [(rank, group) for channel, group in groups.items() for rank in channel]
    assert len(set(ends)) == len(ends)
    is_odd_ring = name == "interleaved_1f1b" and num_ranks % 2 and num_ranks > 1
    assert max(groups.values()) + 1 == (2 if num_ranks == 2 else 6 if is_odd_ring else 4)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_queues_of_the_channels_take_no_time(name: str, num_ranks: int) -> None:
    """A step takes as long as with messages that wait for nothing but their sender."""
    schedule = build_schedule(name, num_ranks, 2 * num_ranks)
    times = ActionTimes.uniform(schedule.num_stages, transfer=0.25)
    assert compute_step_seconds(build_graph(schedule), 0.25) == pytest.approx(
        simulate_step_seconds(schedule, times)
    )


def test_a_send_behind_an_early_receive_is_late() -> None:
    """Why one group per direction is slow even where nothing waits without end."""
    schedule = build_schedule("zbv", 8, 32)
    chosen, by_direction = (
        compute_step_seconds(build_graph(schedule, grouping, 1), 0.1)
        for grouping in (assign_channel_groups, group_by_direction)
    )
    assert by_direction == pytest.approx(1.105 * chosen, rel=1e-3)


def test_a_transfer_describes_itself() -> None:
    assert str(Transfer(Action("F", 0, 3), 0, 1, 3)) == "the message of 0F3 from rank 0 to rank 1"
