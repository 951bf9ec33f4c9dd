"""A planted mismatch among ranks' collectives is found and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.layout import Layout
from shardwright.rehearse.agreement import find_disagreement
from shardwright.rehearse.collective_recorder import Collective
from shardwright.rehearse.rehearsal import list_roles, restrict_to_rehearsed


def reduced(*ranks: int, num_bytes: int = 8) -> Collective:
    return Collective("all_reduce", ranks, num_bytes, "float32", 0.0)


def sent(to: int, num_bytes: int = 4) -> Collective:
    return Collective("send", (0, 1, 2, 3), num_bytes, "float32", 0.0, to)


def received(source: int, num_bytes: int = 4) -> Collective:
    return Collective("recv", (0, 1, 2, 3), num_bytes, "float32", 0.0, source)


def agreeing() -> dict[int, list[Collective]]:
    """Two pairs that reduce, a pipeline between them, and a sum of all."""
    everyone = reduced(0, 1, 2, 3)
    return {
        0: [reduced(0, 1), sent(2), everyone],
        1: [reduced(0, 1), sent(3), everyone],
        2: [received(0), reduced(2, 3), everyone],
        3: [received(1), reduced(2, 3), everyone],
    }


def told(sequences: dict[int, list[Collective]]) -> str:
    found = find_disagreement(sequences)
    assert found is not None
    return str(found)


def test_ranks_that_agree() -> None:
    assert find_disagreement(agreeing()) is None
    assert find_disagreement({0: []}) is None


def test_a_rank_that_skips_one() -> None:
    sequences = agreeing()
    del sequences[1][0]
    assert told(sequences) == (
        "deadlock: rank 0 waits for 1 in all_reduce of 8 bytes of float32 over ranks (0, 1); "
        "rank 1 waits for 0 in all_reduce of 8 bytes of float32 over ranks (0, 1, 2, 3)"
    )


def test_a_rank_that_ends_early() -> None:
    sequences = agreeing()
    del sequences[3][-1]
    assert told(sequences) == (
        "rank 0 waits in its collective 2, all_reduce of 8 bytes of float32, for rank 3, which has finished"
    )


def test_a_wrong_group() -> None:
    sequences = agreeing()
    sequences[2][1] = reduced(0, 2)
    assert "deadlock" in told(sequences)
    sequences[2][1] = reduced(2, 5)
    assert "with rank 5, which does not exist" in told(sequences)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            reduced(2, 3, num_bytes=12),
            "calls all_reduce of 8 bytes of float32, rank 3 calls all_reduce of 12 bytes",
        ),
        (
            replace(reduced(2, 3), dtype="bfloat16"),
            "rank 3 calls all_reduce of 8 bytes of bfloat16",
        ),
        (replace(reduced(2, 3), kind="all_gather"), "rank 3 calls all_gather"),
    ],
    ids=["size", "dtype", "kind"],
)
def test_another_size_dtype_or_kind(other: Collective, words: str) -> None:
    sequences = agreeing()
    sequences[3][1] = other
    assert words in told(sequences)


def test_a_swapped_send_and_receive() -> None:
    sequences = agreeing()
    sequences[0][1], sequences[2][0] = received(2), sent(0)
    assert (
        find_disagreement(sequences) is None
    )  # swapped on both sides it is a message the other way
    sequences = agreeing()
    sequences[2][0] = sent(0)
    assert told(sequences) == (
        "rank 0 sends 4 bytes of float32 to rank 2 (its collective 1), but rank 2 never receives it"
    )
    sequences = agreeing()
    sequences[0][1] = received(2)
    assert told(sequences) == (
        "rank 2 waits for 4 bytes of float32 from rank 0 (its collective 0), but rank 0 never sends it"
    )


def test_a_message_of_another_size() -> None:
    sequences = agreeing()
    sequences[2][0] = received(0, num_bytes=16)
    assert (
        told(sequences)
        == "message 0 from rank 0 to rank 2: sent 4 bytes of float32, received as 16 bytes of float32"
    )


def test_what_ranks_put_into_an_exchange_may_differ() -> None:
    exchange = Collective("all_to_all", (0, 1), 8, "float32", 4.0)
    assert find_disagreement({0: [exchange], 1: [replace(exchange, num_bytes=24)]}) is None


def test_one_rank_of_each_role_stands_for_all() -> None:
    layout = Layout(pp=2, tp=2)
    assert [(role.rank, role.ranks) for role in list_roles(layout)] == [(0, (0, 1)), (2, (2, 3))]
    assert len(list_roles(layout, should_run_each_rank=True)) == 4
    sequences = {0: [reduced(0, 1), sent(2), sent(3)], 2: [received(0), reduced(2, 3)]}
    assert find_disagreement(restrict_to_rehearsed(sequences)) is None
    assert [call.ranks for call in restrict_to_rehearsed(sequences)[2]] == [(0, 2), (2,)]
    sequences[2][0] = received(0, num_bytes=1)
    assert find_disagreement(restrict_to_rehearsed(sequences)) is not None
