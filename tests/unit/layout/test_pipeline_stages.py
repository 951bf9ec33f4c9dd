"""Partitioning of layers into stages is optimal, with costs of embedding and head."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import partition_layers

cost = st.sampled_from([0.25, 1.0, 1.0, 2.0, 3.5])


@given(st.lists(cost, min_size=1, max_size=9), st.data())
def test_no_other_partition_is_better(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    embedding, head = data.draw(
        st.tuples(st.sampled_from([0.0, 0.5, 4.0]), st.sampled_from([0.0, 1.0, 7.0]))
    )
    stages = partition_layers(costs, range(num_stages), embedding_cost=embedding, head_cost=head)
    assert [stage.first_layer for stage in stages[1:]] == [
        stage.last_layer for stage in stages[:-1]
    ]
    assert (stages[0].first_layer, stages[-1].last_layer) == (0, len(costs))
    assert all(stage.layers for stage in stages)
    assert [stage.has_embedding for stage in stages] == [index == 0 for index in range(num_stages)]
    assert [stage.has_head for stage in stages] == [
        index == num_stages - 1 for index in range(num_stages)
    ]

    def measure(bounds: tuple[int, ...]) -> tuple[float, float]:
        loads = [sum(costs[first:last]) for first, last in pairwise(bounds)]
        loads[0] += embedding
        loads[-1] += head
        return round(max(loads), 6), round(sum(load * load for load in loads), 6)

    chosen = measure((0, *(stage.last_layer for stage in stages)))
    all_partitions = (
        measure((0, *inner, len(costs)))
        for inner in combinations(range(1, len(costs)), num_stages - 1)
    )
    assert chosen == min(all_partitions)


def test_surplus_layers_go_to_the_last_stage_unless_it_has_the_head() -> None:
    assert [len(stage.layers) for stage in partition_layers([1.0] * 5, range(4))] == [1, 1, 1, 2]
    assert [
        len(stage.layers) for stage in partition_layers([1.0] * 5, range(4), head_cost=1.0)
    ] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("layers", "ranks", "message"),
    [
        (3, (0, 1, 2, 3), "nearest that works is pp=3"),
        (5, (0, 1, 2, 0, 1, 2), "nearest that works is pp=2"),
        (1, (0, 1, 1, 0), "one stage per rank, or pp=1"),
    ],
)
def test_too_few_layers_are_refused_with_a_number_that_works(
    layers: int, ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        partition_layers([1.0] * layers, ranks)
    assert f"{layers} layers are fewer than {len(ranks)} pipeline stages" in str(caught.value)
    assert message in str(caught.value)
