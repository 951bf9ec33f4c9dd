"""The process group of the pool: results of gloo, waits in any order, large messages, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.multiprocess.pool import RankPool

LARGE = 1 << 20
"""Elements of a message that no socket's buffer holds."""


def run_operations(dtype: torch.dtype) -> dict[str, Tensor]:
    """Run every operation once on small whole numbers, of which every sum is exact."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    source = (torch.arange(6).reshape(2, 3) + 2 * rank).to(dtype)
    results = {}
    for kind in ("SUM", "MAX", "MIN", "PRODUCT"):
        results[kind] = source.clone()
        dist.all_reduce(results[kind], getattr(dist.ReduceOp, kind))
    results["transposed"] = source.t().clone(memory_format=torch.contiguous_format)
    dist.broadcast(results["transposed"], src=1)
    gathered = [torch.empty_like(source) for _ in range(size)]
    dist.all_gather(gathered, source)
    results["all_gather"] = torch.stack(gathered)
    results["reduce_scatter"] = torch.empty_like(source)
    dist.reduce_scatter(results["reduce_scatter"], [source * (i + 1) for i in range(size)])
    sizes = [(rank + peer) % 3 for peer in range(size)]  # some are empty
    results["all_to_all"] = torch.empty(sum(sizes), 3, dtype=dtype)
    rows = torch.arange(3 * sum(sizes)).reshape(-1, 3).to(dtype) + rank
    dist.all_to_all_single(results["all_to_all"], rows, sizes, sizes)
    on_root = [torch.empty_like(source) for _ in range(size)] if rank == 1 else None
    dist.gather(source, on_root, dst=1)
    if on_root is not None:
        results["gather"] = torch.stack(on_root)
    results["scatter"] = torch.empty_like(source)
    dist.scatter(
        results["scatter"], [source + i for i in range(size)] if rank == 0 else None, src=0
    )
    results["reduce"] = source.clone()
    dist.reduce(results["reduce"], dst=0)
    if rank != 0:  # undefined there
        del results["reduce"]
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        results["of a subgroup"] = source.clone()
        dist.all_reduce(results["of a subgroup"], group=group)
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_every_operation_gives_the_result_of_gloo(
    ranks: RankPool, gloo_ranks: RankPool, dtype: torch.dtype
) -> None:
    expected = gloo_ranks.run(3, run_operations, dtype)
    for got, wanted in zip(ranks.run(3, run_operations, dtype), expected, strict=True):
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


def average() -> list[float]:
    tensor = torch.tensor([1.0, 4.0]) * (dist.get_rank() + 1)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensor.tolist()


def test_an_average_is_that_of_all_ranks(ranks: RankPool) -> None:
    """FSDP2 asks for it; gloo has none."""
    assert ranks.run(3, average) == [[2.0, 8.0]] * 3


def wait_in_another_order() -> list[float]:
    rank = dist.get_rank()
    tensors = [torch.tensor(float(rank + 10 * number)) for number in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    messages = [torch.empty(()) for _ in range(4)]
    receives = [
        dist.irecv(message, (rank + 1) % 2, tag=number // 2)
        for number, message in enumerate(messages)
    ]
    for number in (2, 0, 3, 1):  # in order within a tag
        dist.send(torch.tensor(100.0 * rank + number), (rank + 1) % 2, tag=number // 2)
    for receive in reversed(receives):
        receive.wait()
    return [float(tensor) for tensor in (*tensors, *messages)]


def test_waits_may_come_in_another_order(ranks: RankPool) -> None:
    for rank, got in enumerate(ranks.run(2, wait_in_another_order)):
        other = 100.0 * (1 - rank)
        assert got == [1.0, 21.0, 41.0, other, other + 1, other + 2, other + 3]


def change_an_input_before_the_wait() -> list[float]:
    tensor = torch.ones(2)
    gathered = [torch.empty(2) for _ in range(2)]
    work = dist.all_gather(gathered, tensor, async_op=True)
    tensor.fill_(7.0)
    work.wait()
    return torch.cat(gathered).tolist()


def test_an_operation_has_the_inputs_of_its_call(ranks: RankPool) -> None:
    assert ranks.run(2, change_an_input_before_the_wait) == [[1.0] * 4] * 2


def send_large_messages_to_each_other() -> float:
    sent = torch.full((LARGE,), float(dist.get_rank()))
    received = torch.empty(LARGE)
    work = dist.isend(sent, 1 - dist.get_rank())
    dist.recv(received, 1 - dist.get_rank())
    work.wait()
    return float(received.sum())


def test_ranks_may_send_more_than_a_buffer_to_each_other(ranks: RankPool) -> None:
    assert ranks.run(2, send_large_messages_to_each_other) == [float(LARGE), 0.0]


def reduce_in_two_threads() -> list[float]:
    """Reduce over two groups, in each thread over one; ranks start in the opposite order."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    sums = [0.0, 0.0]

    def work(number: int) -> None:
        for step in range(50):
            tensor = torch.tensor(float(step + number))
            dist.all_reduce(tensor, group=groups[number])
            sums[number] += float(tensor)

    thread = threading.Thread(target=work, args=(dist.get_rank(),))
    thread.start()
    work(1 - dist.get_rank())
    thread.join()
    return sums


def test_two_threads_use_one_transport(ranks: RankPool) -> None:
    total = 2.0 * sum(range(50))
    assert ranks.run(2, reduce_in_two_threads) == [[total, total + 100.0]] * 2
