"""Copies of states in the memory of other ranks: what is lost with a process comes back bit by bit,
under any layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint.rank_group import RankGroup
from shardwright.errors import CheckpointError, RunFailed
from shardwright.peer_copies import recovery
from shardwright.peer_copies.copier import PeerCopier
from shardwright.peer_copies.holders import choose_holders
from shardwright.peer_copies.memory import CopyId, PeerMemory
from shardwright.peer_copies.recovery import find_copies, load_copies, read_copied_values
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_layouts import (
    LAYOUTS,
    distribute_tensors,
    read_local_bytes,
)

NODES = {2: (0, 1), 3: (0, 0, 0), 4: (0, 0, 1, 1)}


def build_copier(memory: PeerMemory) -> PeerCopier:
    group = dist.new_group(backend="gloo")
    assert group is not None
    return PeerCopier(memory, group, choose_holders(NODES[dist.get_world_size()]))


def copy_step(copier: PeerCopier, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """Copy this rank's state after a step; the merged value differs between ranks."""
    rank = dist.get_rank()
    copier.begin(step, tensors, {"step": step}, lambda: {"counts": {f"rank {rank}": step}})
    copier.wait_for_copy()


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Change all tensors, as the update of the next step does."""
    for tensor in tensors.values():
        with torch.no_grad():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.zero_()


def recover_after_loss(layout: str, other_layout: str, lost_rank: int) -> tuple[int, int]:
    """Lose one process after two steps; return the bytes of this rank's state and those sent."""
    memory = PeerMemory()
    copier = build_copier(memory)
    tensors = distribute_tensors(layout, blank=False)
    copy_step(copier, 1, distribute_tensors(layout, blank=True))
    copy_step(copier, 2, tensors)
    change(tensors)  # training continues while the copy is sent
    copier.close()
    counts = copier.counts
    rank = dist.get_rank()
    if rank == lost_rank:
        memory = PeerMemory()  # of the spare that takes the rank
    ranks = RankGroup()
    search = find_copies(ranks, memory)
    assert search.found == CopyId(0, 2), search
    assert read_copied_values(ranks, memory, search.found) == {
        "step": 2,
        "counts": {f"rank {each}": 2 for each in range(dist.get_world_size())},
    }
    loaded = distribute_tensors(other_layout, blank=True)
    load_copies(None, memory, search.found, loaded)
    expected = distribute_tensors(other_layout, blank=False)
    for name, tensor in loaded.items():
        assert torch.equal(read_local_bytes(tensor), read_local_bytes(expected[name])), name
    return counts.own_bytes, counts.sent_bytes


@pytest.mark.parametrize(
    ("layout", "other_layout"),
    [
        ("plain2", "rows2"),
        ("columns2", "columns2"),
        ("rows3", "rows3"),
        ("hybrid4", "strided4"),
        ("strided_columns4", "rows_columns4"),
    ],
)
def test_a_lost_state_comes_back_from_memory(
    ranks: RankPool, layout: str, other_layout: str
) -> None:
    num_ranks = LAYOUTS[layout][0]
    for lost_rank in range(num_ranks):
        counts = ranks.run(num_ranks, recover_after_loss, layout, other_layout, lost_rank)
        own = sum(own_bytes for own_bytes, _ in counts)
        sent = sum(sent_bytes for _, sent_bytes in counts)
        # In these two the holder has the same parts itself.
        assert (sent == 0) == (layout in ("plain2", "hybrid4"))
        assert sent <= own


def recover_in_small_messages(lost_rank: int) -> None:
    recovery._ROUND_BYTES, former = 48, recovery._ROUND_BYTES
    try:
        recover_after_loss("rows2", "columns2", lost_rank)
    finally:
        recovery._ROUND_BYTES = former


def test_boxes_are_split_and_joined_into_messages(ranks: RankPool) -> None:
    ranks.run(2, recover_in_small_messages, 0)


def interrupt_copy(transfer: int) -> tuple[Any, Any]:
    """Interrupt the copy of step 3 before a transfer; return what is found without a rank.

    The first result is without rank 1, the second with both ranks.
    """
    memory = PeerMemory()
    copier = build_copier(memory)
    tensors = distribute_tensors("rows2", blank=False)
    for step in (1, 2):
        copy_step(copier, step, tensors)
    copier.wait()
    original = copier._transfer
    left = [transfer]

    def fail(*arguments: Any) -> None:
        if left[0] == 0:
            raise RuntimeError("Connection reset by peer")
        left[0] -= 1
        original(*arguments)

    copier._transfer = fail  # type: ignore[method-assign]
    copy_step(copier, 3, tensors)
    with pytest.raises(RuntimeError, match="Connection reset"):
        copier.close()
    everything = find_copies(RankGroup(), memory).found
    if dist.get_rank() == 1:
        memory = PeerMemory()
    search = find_copies(RankGroup(), memory)
    assert search.found is not None
    load_copies(None, memory, search.found, distribute_tensors("rows2", blank=True))
    return search.found.step, everything and everything.step


@pytest.mark.parametrize("transfer", [0, 1, 2])
def test_half_a_copy_is_none(ranks: RankPool, transfer: int) -> None:
    """The header or the values of step 3 do not arrive: step 2 is still complete."""
    assert ranks.run(2, interrupt_copy, transfer) == [(2, 3), (2, 3)]


def fail_to_recover() -> list[str]:
    """Return the reasons why nothing is found, after several losses."""
    memory = PeerMemory()
    copier = build_copier(memory)
    copy_step(copier, 5, distribute_tensors("rows4", blank=False))
    copier.close()
    rank = dist.get_rank()
    ranks = RankGroup()
    # Rank 2 keeps the copy of rank 0.
    lost = find_copies(ranks, PeerMemory() if rank in (0, 2) else memory)
    survived = find_copies(ranks, PeerMemory() if rank in (0, 1) else memory)
    assert survived.found == CopyId(0, 5)
    if rank == 3:
        memory.discard()
    discarded = find_copies(ranks, memory)
    assert (lost.found, discarded.found) == (None, None)
    return [lost.fault, discarded.fault]


def test_reasons_for_a_state_that_is_lost(ranks: RankPool) -> None:
    """A discarded state is not continued, even if only one process has discarded it."""
    assert set(map(tuple, ranks.run(4, fail_to_recover))) == {
        (
            "the state of ranks 0, 2 after step 5 was lost with the process that kept its copy",
            "no rank has a complete copy",
        )
    }


def copy_different_steps() -> str:
    copier = build_copier(PeerMemory())
    copy_step(copier, 1 + dist.get_rank(), distribute_tensors("rows2", blank=False))
    with pytest.raises(RunFailed) as error:
        copier.close()
    return str(error.value)


def load_other_tensors() -> str:
    memory = PeerMemory()
    copier = build_copier(memory)
    copy_step(copier, 1, distribute_tensors("rows2", blank=False))
    copier.close()
    loaded = distribute_tensors("rows2", blank=True)
    loaded["odd"] = torch.zeros(7, 6, dtype=torch.bfloat16)
    del loaded["norm"]
    loaded["new"] = torch.zeros(3)
    found = find_copies(RankGroup(), memory).found
    assert found is not None
    with pytest.raises(CheckpointError) as error:
        load_copies(None, memory, found, loaded)
    assert not any(read_local_bytes(tensor).any() for tensor in loaded.values())
    return str(error.value)


def test_wrong_steps_and_wrong_tensors_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, copy_different_steps):
        assert "the ranks copied different steps: [1, 2]" in message
    for message in ranks.run(2, load_other_tensors):
        assert "odd is BF16 (7, 5) in the copies, BF16 (7, 6) here" in message
        assert "surplus norm: on no rank" in message
        assert "the copies have 0 of 3 elements of new[0:3]" in message


def mix_generations() -> tuple[int, int]:
    """Two generations reach step 2; their copies are not combined."""
    rank = dist.get_rank()
    memory = PeerMemory()
    first = build_copier(memory)
    for step in (1, 2):
        copy_step(first, step, distribute_tensors("rows2", blank=True))
    first.close()
    find_copies(RankGroup(), memory)
    second = build_copier(memory)
    copy_step(second, 2, distribute_tensors("rows2", blank=False))
    second.close()
    found = find_copies(RankGroup(), memory if rank == 0 else PeerMemory()).found
    assert found is not None
    loaded = distribute_tensors("rows2", blank=True)
    load_copies(None, memory if rank == 0 else PeerMemory(), found, loaded)
    expected = distribute_tensors("rows2", blank=False)
    for name, tensor in loaded.items():
        assert torch.equal(read_local_bytes(tensor), read_local_bytes(expected[name])), name
    return found.generation, found.step


def test_copies_of_different_generations_are_not_combined(ranks: RankPool) -> None:
    assert ranks.run(2, mix_generations) == [(1, 2), (1, 2)]
