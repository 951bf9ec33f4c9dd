"""Waits for other ranks: what counts as one, and what is the rank's own work."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.parallel.comm_timing import (
    CommunicationTimer,
    begin_wait,
    end_wait,
    pause_wait,
    use_timer,
)
from shardwright.parallel.sharded_weights import _bring_before_gather
from shardwright.parallel.update_units import _wait_before_gather

GATHER_SECONDS = 0.01
OWN_SECONDS = 0.2


def work(*_: Any) -> None:
    time.sleep(OWN_SECONDS)


def build_group() -> Any:
    return SimpleNamespace(
        unshard=lambda _async_op: time.sleep(GATHER_SECONDS),
        comm_ctx=SimpleNamespace(get_all_gather_streams=lambda *_: (None, None)),
        _training_state=None,
        is_unsharded=False,
        _all_gather_result=None,
        device=torch.device("cpu"),
    )


def update_before(group: Any) -> None:
    _wait_before_gather(group, 0, work)


def bring_before(group: Any) -> None:
    shards = [nn.Parameter(torch.zeros(1))]
    offload: Any = SimpleNamespace(bring_shards=work)
    _bring_before_gather(group, 0, offload, shards)


@pytest.mark.parametrize("install", [update_before, bring_before])
def test_an_update_or_a_transfer_before_a_gather_is_no_wait_for_others(
    install: Callable[[Any], None],
) -> None:
    """A rank that updates slowly was counted as one that waits for the others."""
    timer = CommunicationTimer(torch.device("cpu"), {})
    group = build_group()
    install(group)
    with use_timer(timer):
        begin_wait()
        group.unshard(False)
        end_wait("data")
    assert GATHER_SECONDS <= timer.seconds()["data"] < OWN_SECONDS


def test_a_pause_outside_of_a_wait_starts_none() -> None:
    timer = CommunicationTimer(torch.device("cpu"), {})
    with use_timer(timer):
        with pause_wait("data"):
            work()
        time.sleep(GATHER_SECONDS)
        end_wait("data")
    assert sum(timer.seconds().values()) == 0.0
