"""Disagreements among ranks' collectives are found and described."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.layout import Layout
from shardwright.rehearsal.agreement import find_disagreement
from shardwright.rehearsal.collective_recorder import Collective
from shardwright.rehearsal.rehearsal import list_roles, restrict_to_rehearsed


def make_all_reduce(*ranks: int, num_bytes: int = 8) -> Collective:
    return Collective("all_reduce", ranks, num_bytes, "float32", 0.0)


def make_send(peer: int, num_bytes: int = 4) -> Collective:
    return Collective("send", (0, 1, 2, 3), num_bytes, "float32", 0.0, peer)


def make_receive(source: int, num_bytes: int = 4) -> Collective:
    return Collective("recv", (0, 1, 2, 3), num_bytes, "float32", 0.0, source)


def make_sequences() -> dict[int, list[Collective]]:
    """Return two pairs that reduce, sends between them, and an all-reduce over all ranks."""
    reduce_all = make_all_reduce(0, 1, 2, 3)
    return {
        0: [make_all_reduce(0, 1), make_send(2), reduce_all],
        1: [make_all_reduce(0, 1), make_send(3), reduce_all],
        2: [make_receive(0), make_all_reduce(2, 3), reduce_all],
        3: [make_receive(1), make_all_reduce(2, 3), reduce_all],
    }


def describe_disagreement(sequences: dict[int, list[Collective]]) -> str:
    disagreement = find_disagreement(sequences)
    assert disagreement is not None
    return str(disagreement)


def test_ranks_that_agree_pass() -> None:
    assert find_disagreement(make_sequences()) is None
    assert find_disagreement({0: []}) is None


def test_a_rank_that_skips_a_collective_is_found() -> None:
    sequences = make_sequences()
    del sequences[1][0]
    assert describe_disagreement(sequences) == (
        "deadlock: rank 0 waits for 1 in all_reduce of 8 bytes of float32 over ranks (0, 1); "
        "rank 1 waits for 0 in all_reduce of 8 bytes of float32 over ranks (0, 1, 2, 3)"
    )


def test_a_rank_that_ends_early_is_found() -> None:
    sequences = make_sequences()
    del sequences[3][-1]
    assert describe_disagreement(sequences) == (
        "rank 0 waits in its collective 2, all_reduce of 8 bytes of float32, "
        "for rank 3, which has finished"
    )


def test_a_wrong_group_is_found() -> None:
    sequences = make_sequences()
    sequences[2][1] = make_all_reduce(0, 2)
    assert "deadlock" in describe_disagreement(sequences)
    sequences[2][1] = make_all_reduce(2, 5)
    assert "with rank 5, which does not exist" in describe_disagreement(sequences)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            make_all_reduce(2, 3, num_bytes=12),
            "calls all_reduce of 8 bytes of float32, rank 3 calls all_reduce of 12 bytes",
        ),
        (
            replace(make_all_reduce(2, 3), dtype="bfloat16"),
            "rank 3 calls all_reduce of 8 bytes of bfloat16",
        ),
        (replace(make_all_reduce(2, 3), kind="all_gather"), "rank 3 calls all_gather"),
    ],
    ids=["size", "dtype", "kind"],
)
def test_another_size_dtype_or_kind_is_found(other: Collective, message: str) -> None:
    sequences = make_sequences()
    sequences[3][1] = other
    assert message in describe_disagreement(sequences)


def test_a_swapped_send_or_receive_is_found() -> None:
    sequences = make_sequences()
    sequences[0][1] = make_receive(2)
    sequences[2][0] = make_send(0)
    # Swapped on both sides, it is a message in the other direction.
    assert find_disagreement(sequences) is None
    sequences = make_sequences()
    sequences[2][0] = make_send(0)
    assert describe_disagreement(sequences) == (
        "rank 0 sends 4 bytes of float32 to rank 2 (its collective 1), but rank 2 never receives it"
    )
    sequences = make_sequences()
    sequences[0][1] = make_receive(2)
    assert describe_disagreement(sequences) == (
        "rank 2 waits for 4 bytes of float32 from rank 0 (its collective 0), "
        "but rank 0 never sends it"
    )


def test_a_message_of_another_size_is_found() -> None:
    sequences = make_sequences()
    sequences[2][0] = make_receive(0, num_bytes=16)
    assert describe_disagreement(sequences) == (
        "message 0 from rank 0 to rank 2: sent 4 bytes of float32, received as 16 bytes of float32"
    )


def test_sizes_of_all_to_all_may_differ() -> None:
    exchange = Collective("all_to_all", (0, 1), 8, "float32", 4.0)
    assert find_disagreement({0: [exchange], 1: [replace(exchange, num_bytes=24)]}) is None


def test_one_rank_of_each_role_represents_all() -> None:
    layout = Layout(pp=2, tp=2)
    assert [(role.rank, role.ranks) for role in list_roles(layout)] == [(0, (0, 1)), (2, (2, 3))]
    assert len(list_roles(layout, should_run_each_rank=True)) == 4
    sequences = {
        0: [make_all_reduce(0, 1), make_send(2), make_send(3)],
        2: [make_receive(0), make_all_reduce(2, 3)],
    }
    assert find_disagreement(restrict_to_rehearsed(sequences)) is None
    assert [call.ranks for call in restrict_to_rehearsed(sequences)[2]] == [(0, 2), (2,)]
    sequences[2][0] = make_receive(0, num_bytes=1)
    assert find_disagreement(restrict_to_rehearsed(sequences)) is not None
