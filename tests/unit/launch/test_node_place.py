"""Place of a node among the processes of a launcher, and the number of ranks that follows."""

from __future__ import annotations

import pytest

from shardwright.config.run import ElasticSection
from shardwright.errors import InputError
from shardwright.launch.node_place import NodePlace, count_ranks, find_node_place

WARM = ElasticSection(max_restarts=1, warm_restarts=True)
SPARE = ElasticSection(max_restarts=1, warm_restarts=True, spare_nodes=1)


@pytest.fixture
def second_of_three(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of srun on the second of three nodes, one task on each."""
    variables = {"PROCID": "1", "NTASKS": "3", "LOCALID": "0", "TASKS_PER_NODE": "1(x3)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("SHARDWRIGHT_NODE_TOKEN", "secret")
    return monkeypatch


def test_one_process_per_node_with_nproc_shares_the_ranks(
    second_of_three: pytest.MonkeyPatch,
) -> None:
    assert find_node_place(WARM, 4) == NodePlace(1, 3, "first", 29500, "secret")
    assert (count_ranks(WARM, 4), count_ranks(SPARE, 4)) == (12, 8)
    assert find_node_place(ElasticSection(), 4) is None
    assert find_node_place(WARM, None) is None
    assert count_ranks(ElasticSection(), None) == 3, "the processes are ranks"


def test_nodes_without_a_token_are_refused(second_of_three: pytest.MonkeyPatch) -> None:
    second_of_three.delenv("SHARDWRIGHT_NODE_TOKEN")
    with pytest.raises(InputError, match="only nodes that know the token") as error:
        find_node_place(WARM, 4)
    assert error.value.field == "SHARDWRIGHT_NODE_TOKEN"


def test_several_processes_on_a_node_are_refused(second_of_three: pytest.MonkeyPatch) -> None:
    second_of_three.setenv("SLURM_TASKS_PER_NODE", "2(x3)")
    with pytest.raises(InputError, match="one process per node starts the ranks") as error:
        find_node_place(WARM, 4)
    assert (error.value.field, error.value.got) == ("--nproc", "2 processes on a node")


def test_spare_nodes_leave_one_for_the_ranks(second_of_three: pytest.MonkeyPatch) -> None:
    three = ElasticSection(max_restarts=1, warm_restarts=True, spare_nodes=3)
    with pytest.raises(InputError, match="none is left for the ranks") as error:
        count_ranks(three, 4)
    assert error.value.allowed == "at most 2: the run has 3 nodes"
    for name in ("PROCID", "NTASKS", "LOCALID", "TASKS_PER_NODE"):
        second_of_three.delenv(f"SLURM_{name}")
    with pytest.raises(InputError, match="none is left for the ranks"):
        count_ranks(SPARE, 4)


def test_spare_nodes_need_warm_restarts() -> None:
    with pytest.raises(ValueError, match="`spare_nodes` replace lost nodes"):
        ElasticSection(max_restarts=1, spare_nodes=1)
