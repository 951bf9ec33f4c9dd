"""Bytes: elements as the engine's descriptors give them, activations as the model's own operations
save them, moments of a step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from shardwright.layout import Layout, RankGrid, compute_local_shape
from shardwright.model.decoder import Decoder
from shardwright.model.forward_context import build_forward_context
from shardwright.placement import build_parameter_layouts, partition_stages
from shardwright.planner.activations import get_layer_activations
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.memory import predict_memory
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.parameter_memory import StageLoad
from shardwright.planner.pipeline import get_pipeline
from shardwright.planner.predictor import Predictor
from shardwright.planner.published.conventions import FrameworkConventions
from tests.unit.planner import models

NOTHING_BESIDE = Efficiency(
    reserve_share=0.0, reserve_bytes=0.0, context_bytes=0.0, communicator_bytes=0.0
)
TOKENS = 64
ROWS = 2

LAYOUTS = [
    Layout(),
    Layout(dp_shard=4, zero_stage=3),
    Layout(dp_shard=3, zero_stage=1),
    Layout(tp=2, dp_replicate=2),
    Layout(tp=8, dp_shard=2, zero_stage=2),
    Layout(tp=2, cp=2, dp_shard=3, zero_stage=3),
    Layout(pp=2, tp=2, dp_shard=2, zero_stage=1),
    Layout(pp=2, schedule="zbv", dp_shard=2, zero_stage=3),
    Layout(pp=4, dp_replicate=2),
]


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_elements_between_steps_are_those_of_the_descriptors(name: str, layout: Layout) -> None:
    shape = models.shape(name)
    if name == "qwen3_moe" and layout.zero_stage >= 1 and layout.tp == 1:
        layout = replace(layout, ep=2) if layout.fsdp % 2 == 0 else layout
    facts = ModelFacts(shape)
    candidate = Candidate(layout, TOKENS, 1, 8, precision="fp32")
    mine = Predictor(facts, models.cluster(layout.world_size), NOTHING_BESIDE).compute_memory(
        candidate, get_pipeline(facts, layout, 8, TOKENS)
    )
    placed = build_parameter_layouts(shape, layout, partition_stages(shape, layout, TOKENS))
    grid = RankGrid(layout)
    held = []
    for rank in range(layout.world_size):
        here = grid.coordinates(rank)
        mine_here = [
            compute_local_shape(p, layout, here)
            for p in placed.values()
            if here["pp"] in p.pp_ranks
        ]
        held.append(sum(torch.Size(size).numel() for size in mine_here))
    # The fullest rank by activations may hold fewer weights than the fullest by weights, never
    # more.
    assert 4 * min(held) <= mine.weights <= 4 * max(held)
    if layout.pp == 1:
        assert mine.weights == 4 * max(held)
        assert mine.optimizer == 8 * max(held)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "olmo2", "phi3", "gpt2", "gpt_neox", "qwen3_moe"]
)
def test_a_layer_keeps_what_its_operations_save(name: str) -> None:
    shape = models.shape(name)
    decoder = Decoder(shape)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x_BTD = torch.randn(ROWS, TOKENS, shape.hidden_size, requires_grad=True)
    context = build_forward_context(
        shape,
        x_BTD,
        torch.arange(TOKENS)[None],
        None,
        None,
        num_tokens=TOKENS,
        dropout=None,
        has_explicit_attention=False,
        cache=None,
    )
    shared = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    shared |= {table.untyped_storage().data_ptr() for pair in context.rope_tables for table in pair}
    shared |= {
        mask.untyped_storage().data_ptr() for mask in context.masks.values() if mask is not None
    }
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.blocks[-1](x_BTD, context)
    measured = sum(storage.nbytes() for place_, storage in saved.items() if place_ not in shared)
    facts = ModelFacts(shape)
    kind = facts.kinds[facts.slot_of_layer[-1]]
    predicted = get_layer_activations(
        facts, kind, Candidate(Layout(), TOKENS, ROWS, precision="fp32")
    ).saved_bytes
    assert predicted == pytest.approx(measured, rel=0.01)


def test_recomputation_keeps_less_the_more_of_it_there_is() -> None:
    facts = ModelFacts(models.shape("llama"))
    kept = {
        recompute: get_layer_activations(
            facts, facts.kinds[0], Candidate(Layout(), 128, 2, recompute=recompute)
        ).saved_bytes
        for recompute in ("none", "selective", "full")
    }
    assert kept["full"] == 2 * 128 * 256 * 2
    assert kept["full"] < kept["selective"] < kept["none"]


def test_sequence_parallelism_cuts_the_stream_and_heads_cut_the_rest() -> None:
    facts = ModelFacts(models.shape("llama"))

    def kept(**degrees: object) -> float:
        return get_layer_activations(
            facts, facts.kinds[0], Candidate(Layout(**degrees), 128, 2)
        ).saved_bytes  # type: ignore[arg-type]

    whole = kept()
    tp = kept(tp=4)
    without = kept(tp=4, sequence_parallel=False)
    stream = 2 * 128 * 256 * 2
    assert without - tp == pytest.approx(2 * stream * 3 / 4, rel=0.02)  # the inputs of both norms
    # Half of everything, and the output by heads, which the ring's kernel puts together, beside
    # that by tokens (Q is D here).
    assert kept(cp=2) == pytest.approx(whole / 2 + stream / 2)
    assert whole / 4 < tp < whole


def test_stages_of_zero_hold_what_they_say() -> None:
    """P parameters of 4 bytes, bf16 products, four ranks; what field notes and
    tests/multiprocess/test_memory.py measure.
    """
    facts = ModelFacts(models.shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    memory = {}
    for stage in (1, 2, 3):
        layout = Layout(dp_shard=4, zero_stage=stage)
        memory[stage] = predict_memory(facts, Candidate(layout, 128, 1, 4), load, NOTHING_BESIDE)
    num = facts.num_parameters
    for parts in memory.values():
        assert parts.weights == pytest.approx(num)  # 4 bytes over 4 ranks
        assert parts.optimizer == pytest.approx(2 * num)
    assert memory[1].gradients == pytest.approx(4 * num + num)
    assert memory[2].gradients == memory[3].gradients == pytest.approx(num)
    assert memory[1].gathered == memory[2].gathered == pytest.approx(2 * num)
    assert memory[3].gathered < memory[2].gathered


def test_adapters_leave_gradients_and_states_for_themselves_only() -> None:
    facts = ModelFacts(models.shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    full = predict_memory(facts, Candidate(Layout(), 128), load, NOTHING_BESIDE)
    lora = predict_memory(
        facts, Candidate(Layout(), 128, adapter=LowRankAdapter(4)), load, NOTHING_BESIDE
    )
    qlora = predict_memory(
        facts,
        Candidate(Layout(), 128, adapter=LowRankAdapter(4, quantised=True)),
        load,
        NOTHING_BESIDE,
    )
    inside = 4 * (256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 704)
    ranks = 4 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 704))
    assert lora.optimizer == 8 * ranks
    assert lora.weights == 2 * facts.num_parameters + 4 * ranks
    assert lora.weights - qlora.weights == pytest.approx(inside * (2 - 0.5625))
    assert lora.total < full.total


def test_a_trainer_with_copies_in_half_precision() -> None:
    facts = ModelFacts(models.shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    engine = FrameworkConventions(
        "other",
        weight_bytes=2.0,
        master_bytes=4.0,
        gradient_bytes=4.0,
        has_unsharded_gradients=True,
    )
    parts = predict_memory(
        facts,
        Candidate(Layout(dp_shard=4, zero_stage=1), 128, engine=engine),
        load,
        NOTHING_BESIDE,
    )
    num = facts.num_parameters
    assert (parts.weights, parts.gradients, parts.gathered) == (2 * num, 4 * num, 0)
    assert parts.optimizer == pytest.approx(12 * num / 4)


@pytest.mark.parametrize(("smaller", "larger"), list(itertools.pairwise([1, 2, 4])))
def test_more_micro_batches_in_flight_need_more(smaller: int, larger: int) -> None:
    facts = ModelFacts(models.shape("llama"))
    predictor = Predictor(facts, models.cluster(4), NOTHING_BESIDE)

    def total(micro_batch: int) -> float:
        candidate = Candidate(Layout(pp=4, dp_replicate=1), 128, micro_batch, 8)
        return predictor.compute_memory(
            candidate, predictor.get_pipeline_stages(candidate)
        ).activations

    assert total(larger) == pytest.approx(total(smaller) * larger / smaller, rel=0.1)
