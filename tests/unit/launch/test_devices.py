"""Choice of each rank's device, with torch.cuda replaced by a machine of a given size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.launch import devices
from shardwright.launch.devices import choose_rank_device, claim_device
from shardwright.launch.rank_environment import (
    RankEnvironment,
    count_local_ranks,
    detect_rank_environment,
)


class VisibleDevices:
    """Devices that a process sees; `current` is the one it made current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
        self.uuids = uuids
        self.current: torch.device | None = None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.uuids))
        monkeypatch.setattr(torch.cuda, "set_device", self.make_current)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.get_properties)

    def make_current(self, device: torch.device) -> None:
        assert device.index < len(self.uuids)
        self.current = device

    def get_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[device.index])


def choose(rank: int, local_rank: int) -> torch.device:
    environment = RankEnvironment(rank, world_size=8, local_rank=local_rank)
    return choose_rank_device("cuda", environment, field="run.device")


@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_rank_that_sees_all_devices_takes_its_own(
    monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    visible = VisibleDevices(monkeypatch, "a", "b", "c", "d")
    assert choose(4 + local_rank, local_rank) == torch.device("cuda", local_rank)
    assert visible.current == torch.device("cuda", local_rank)


def test_a_rank_that_sees_one_device_takes_it_whatever_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visible = VisibleDevices(monkeypatch, "d")
    assert choose(7, local_rank=3) == torch.device("cuda", 0)
    assert visible.current == torch.device("cuda", 0)


def test_a_task_of_srun_with_one_gpu_takes_the_visible_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`srun --gpus-per-task=1`: four tasks of a node, each with one visible device."""
    store = dist.HashStore()
    for task in range(4, 8):
        visible = VisibleDevices(monkeypatch, f"gpu-{task}")
        environment = {
            "SLURM_PROCID": str(task),
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": str(task - 4),
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
        }
        ranks = detect_rank_environment(environment)
        assert ranks is not None
        device = choose_rank_device("auto", ranks, field="run.device")
        assert device == visible.current == torch.device("cuda", 0)
        claim_device(store, ranks, device)  # no other task has claimed it


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    VisibleDevices(monkeypatch, "a", "b")
    with pytest.raises(
        InputError, match=r"rank 7 is local rank 3 of its node and sees 2 CUDA devices"
    ) as error:
        choose(7, local_rank=3)
    assert "exactly one for each rank" in str(error.value)


def claim(monkeypatch: pytest.MonkeyPatch, store: dist.Store, rank: int, uuid: str) -> None:
    VisibleDevices(monkeypatch, uuid)
    claim_device(
        store, RankEnvironment(rank, world_size=8, local_rank=rank), torch.device("cuda", 0)
    )


def test_two_ranks_on_one_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.PrefixStore("launch", dist.HashStore())
    claim(monkeypatch, store, 0, "a")
    claim(monkeypatch, store, 1, "b")
    with pytest.raises(InputError, match=r"ranks 1 and 2 compute on the same device, GPU-b"):
        claim(monkeypatch, store, 2, "b")


def test_without_a_uuid_the_bus_of_the_node_identifies_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    hosts = iter(["node0", "node1", "node1"])
    monkeypatch.setattr(devices.socket, "gethostname", lambda: next(hosts))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(pci_bus_id=0x17)
    )
    for rank in (0, 1):
        claim_device(store, RankEnvironment(rank, 3, rank), torch.device("cuda", 0))
    with pytest.raises(InputError, match=r"ranks 1 and 2 .* node1 PCI 0000:17:00"):
        claim_device(store, RankEnvironment(2, 3, 2), torch.device("cuda", 0))


def test_the_cpu_is_shared_by_all_ranks() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        claim_device(store, RankEnvironment(rank, 2, rank), torch.device("cpu"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "4,8(x3)"}, 8),
        # A login shell in an allocation is no rank.
        ({"SLURM_TASKS_PER_NODE": "8"}, None),
    ],
)
def test_ranks_of_a_node(environment: dict[str, str], expected: int | None) -> None:
    assert count_local_ranks(environment) == expected
