"""Ranks' waiting times are reported by parallelism, and a slow rank differs from those that
wait for it. Ranks agree on a clock and on the ceiling of the MFU.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from shardwright.parallel import ParallelModel
from shardwright.parallel.comm_timing import PARALLELISMS, time_wait, use_timer
from shardwright.plans import BatchPlan
from shardwright.training import setup
from shardwright.training.rank_sync import RankSync
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.models import LLAMA, build_model
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_pipeline_execution import micro_batch

CONFIG = LLAMA | {"num_hidden_layers": 4, "intermediate_size": 28}
SLOW_SECONDS = (0.3, 1.0, 4.0)
"""Delays of the slow rank: longer ones in case the other rank is slow by chance on a busy
machine.
"""


def build(layout: Layout) -> ParallelModel:
    batch = BatchPlan(8, 2, 2, layout.data_ranks)
    precision = PrecisionSection(kind="fp64")
    return build_model(read_config(CONFIG), layout, batch, precision, seed=3)


def measure_own_time_and_waits(
    layout: Layout, slow_rank: int, slow_seconds: float
) -> tuple[float, dict[str, float]]:
    """Return own time and waits of a rank's second step, in which one rank is delayed in its
    blocks.
    """
    model = build(layout)
    batches = [micro_batch(2, 8, number) for number in range(2)]
    accumulate_gradients(model, batches, seed=0, step=0)
    if dist.get_rank() == slow_rank:
        calls: list[None] = []

        def delay(_module: nn.Module, _arguments: Any) -> None:
            if not calls:
                calls.append(None)
                time.sleep(slow_seconds)

        model.decoder.blocks[0].register_forward_pre_hook(delay)
    dist.barrier()
    waits = model.build_comm_timer()
    waits.reset()
    start = time.perf_counter()
    with use_timer(waits):
        accumulate_gradients(model, batches, seed=0, step=1)
    seconds = time.perf_counter() - start
    return seconds - sum(waits.seconds().values()), waits.seconds()


@pytest.mark.parametrize(
    ("layout", "parallelism"),
    [
        (Layout(dp_replicate=2), "data"),
        (Layout(dp_shard=2, zero_stage=3), "data"),
        (Layout(dp_shard=2, zero_stage=1), "data"),
        (Layout(tp=2), "tensor"),
        (Layout(cp=2, zero_stage=0), "context"),
        (Layout(pp=2), "pipeline"),
    ],
    ids=str,
)
def test_a_slow_rank_differs_from_the_rank_that_waits(
    ranks: RankPool, layout: Layout, parallelism: str
) -> None:
    measurements = []
    for slow_seconds in SLOW_SECONDS:
        (own_slow, waits_slow), (own_other, waits_other) = ranks.run(
            2, measure_own_time_and_waits, layout, 0, slow_seconds
        )
        assert own_slow > slow_seconds
        measurements.append((own_slow, waits_slow, own_other, waits_other))
        if (
            waits_other[parallelism] > 0.8 * slow_seconds
            and own_other < own_slow - 0.6 * slow_seconds
            and sum(waits_slow.values()) < sum(waits_other.values())
        ):
            return
    pytest.fail(f"never in {len(measurements)} tries: {measurements}")


def measure_clock() -> tuple[float, float]:
    """Return the clock's stated error and its difference from rank 0; all ranks of this test
    share one clock.
    """
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    clock = RankSync(environment, torch.device("cpu")).synchronise_clock()
    return clock.error_seconds, abs(clock.wall_offset_seconds)


def test_ranks_agree_on_a_clock(ranks: RankPool) -> None:
    for error, difference in ranks.run(2, measure_clock):
        assert difference <= error + 1e-3
        assert error < 5.0


def share_ceiling(rank_that_knows: int | None) -> tuple[float, int]:
    """Return the ceiling on which ranks agree, and how often this rank measures it."""
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    device = torch.device("cpu")
    known = {(device, torch.float64): 7.0} if environment.rank == rank_that_knows else {}
    run = SimpleNamespace(dtypes=SimpleNamespace(compute=torch.float64))
    measure = Mock(return_value=5.0)
    with patch.object(setup, "_ceilings", known), patch.object(setup, "measure_ceiling", measure):
        rates = [
            setup.agree_on_ceiling(cast(Any, run), device, RankSync(environment, device))
            for _generation in range(2)
        ]
    assert rates[0] == rates[1]
    return rates[0], measure.call_count


def test_rank_0_measures_the_ceiling_once_unless_a_rank_knows_it(ranks: RankPool) -> None:
    assert ranks.run(2, share_ceiling, None) == [(5.0, 1), (5.0, 0)]
    assert ranks.run(2, share_ceiling, 1) == [(7.0, 0), (7.0, 0)]


def test_waits_outside_of_a_timer_are_not_measured() -> None:
    with time_wait("data"):
        pass
    assert set(PARALLELISMS) == {"data", "tensor", "context", "expert", "pipeline", "world"}
