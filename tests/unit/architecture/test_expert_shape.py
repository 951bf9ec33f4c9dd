"""Expected numbers of ranks that a token's experts are on."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardwright.architecture import ExpertShape


@pytest.mark.parametrize(
    ("num_groups", "groups_per_token", "num_ranks"),
    [(1, 1, 2), (1, 1, 4), (4, 2, 2), (4, 2, 4), (2, 1, 8)],
)
def test_reached_ranks_are_the_mean_over_all_choices(
    num_groups: int, groups_per_token: int, num_ranks: int
) -> None:
    shape = ExpertShape(8, 3, 16, num_groups=num_groups, groups_per_token=groups_per_token)
    group_size = 8 // num_groups
    rank_size = 8 // num_ranks
    counts = []
    for groups in combinations(range(num_groups), groups_per_token):
        members = [expert for expert in range(8) if expert // group_size in groups]
        counts += [len({each // rank_size for each in drawn}) for drawn in combinations(members, 3)]
    assert shape.count_reached_ranks(num_ranks) == pytest.approx(sum(counts) / len(counts))
