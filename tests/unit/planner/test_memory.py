"""Predicted memory: elements of the parameter layouts, saved activations, and ZeRO stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from shardwright.config.low_precision import FP8Section
from shardwright.layout import Layout, RankGrid, compute_local_shape
from shardwright.model.decoder import Decoder
from shardwright.model.forward_context import build_forward_context
from shardwright.placement import build_parameter_layouts, partition_stages
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.low_precision import build_scaled_shares
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import Predictor
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.pipeline import get_pipeline
from tests.unit.planner import models

NO_OVERHEAD = Efficiency(
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
def test_elements_between_steps_are_those_of_the_parameter_layouts(
    name: str, layout: Layout
) -> None:
    shape = models.read_shape(name)
    if name == "qwen3_moe" and layout.zero_stage >= 1 and layout.tp == 1:
        layout = replace(layout, ep=2) if layout.fsdp % 2 == 0 else layout
    facts = ModelFacts(shape)
    candidate = Candidate(layout, TOKENS, 1, 8, precision="fp32")
    prediction = Predictor(
        facts, models.make_cluster(layout.world_size), NO_OVERHEAD
    ).compute_memory(candidate, get_pipeline(facts, layout, 8, TOKENS))
    layouts = build_parameter_layouts(shape, layout, partition_stages(shape, layout, TOKENS))
    grid = RankGrid(layout)
    elements_of_rank = []
    for rank in range(layout.world_size):
        coordinates = grid.coordinates(rank)
        local_shapes = [
            compute_local_shape(p, layout, coordinates)
            for p in layouts.values()
            if coordinates["pp"] in p.pp_ranks
        ]
        elements_of_rank.append(sum(torch.Size(size).numel() for size in local_shapes))
    # The rank with the most activations may have fewer weights than another rank, never more.
    assert 4 * min(elements_of_rank) <= prediction.weights <= 4 * max(elements_of_rank)
    if layout.pp == 1:
        assert prediction.weights == 4 * max(elements_of_rank)
        assert prediction.optimizer == 8 * max(elements_of_rank)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "olmo2", "phi3", "gpt2", "gpt_neox", "qwen3_moe"]
)
def test_a_layers_activations_are_the_tensors_that_its_operations_save(name: str) -> None:
    shape = models.read_shape(name)
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
        cache=None,
    )
    shared = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    shared |= {table.untyped_storage().data_ptr() for pair in context.rope_tables for table in pair}
    shared |= {
        kernel.mask.untyped_storage().data_ptr()
        for kernel in context.kernels.values()
        if kernel.mask is not None
    }
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.blocks[-1](x_BTD, context)
    measured = sum(storage.nbytes() for address, storage in saved.items() if address not in shared)
    facts = ModelFacts(shape)
    kind = facts.kinds[facts.slot_of_layer[-1]]
    predicted = get_layer_activations(
        facts, kind, Candidate(Layout(), TOKENS, ROWS, precision="fp32")
    ).saved_bytes
    assert predicted == pytest.approx(measured, rel=0.01)


def test_more_recomputation_saves_fewer_bytes() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    saved_bytes = {
        recompute: get_layer_activations(
            facts, facts.kinds[0], Candidate(Layout(), 128, 2, recompute=recompute)
        ).saved_bytes
        for recompute in ("none", "selective", "full")
    }
    assert saved_bytes["full"] == 2 * 128 * 256 * 2
    assert saved_bytes["full"] < saved_bytes["selective"] < saved_bytes["none"]


def test_sequence_parallelism_shards_the_residual_stream_and_tp_the_rest() -> None:
    facts = ModelFacts(models.read_shape("llama"))

    def count_saved_bytes(**degrees: object) -> float:
        return get_layer_activations(
            facts, facts.kinds[0], Candidate(Layout(**degrees), 128, 2)
        ).saved_bytes  # type: ignore[arg-type]

    whole = count_saved_bytes()
    tp = count_saved_bytes(tp=4)
    without_sequence_parallel = count_saved_bytes(tp=4, sequence_parallel=False)
    stream_bytes = 2 * 128 * 256 * 2
    assert without_sequence_parallel - tp == pytest.approx(
        2 * stream_bytes * 3 / 4, rel=0.02
    )  # inputs of both norms
    # Half of everything, plus the attention output by heads, which the ring saves in addition to
    # that by tokens (Q equals D here).
    assert count_saved_bytes(cp=2) == pytest.approx(whole / 2 + stream_bytes / 2)
    assert whole / 4 < tp < whole


def test_zero_stages_shard_states_gradients_and_parameters() -> None:
    """Four ranks, weights of 4 bytes, bf16 products, as in tests/multiprocess/test_memory.py."""
    facts = ModelFacts(models.read_shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    memory = {}
    for stage in (1, 2, 3):
        layout = Layout(dp_shard=4, zero_stage=stage)
        memory[stage] = predict_memory(facts, Candidate(layout, 128, 1, 4), load, NO_OVERHEAD)
    num = facts.num_parameters
    for parts in memory.values():
        assert parts.weights == pytest.approx(num)  # 4 bytes over 4 ranks
        assert parts.optimizer == pytest.approx(2 * num)
    # Whole ones: the first group becomes a shard after the peak.
    assert memory[1].gradients == pytest.approx(4 * num)
    assert memory[2].gradients == memory[3].gradients == pytest.approx(num)
    assert memory[1].gathered == memory[2].gathered == pytest.approx(2 * num)
    assert memory[3].gathered < memory[2].gathered


def test_adapters_alone_have_gradients_and_states() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    full = predict_memory(facts, Candidate(Layout(), 128), load, NO_OVERHEAD)
    lora = predict_memory(
        facts, Candidate(Layout(), 128, adapter=LowRankAdapter(4)), load, NO_OVERHEAD
    )
    qlora = predict_memory(
        facts,
        Candidate(Layout(), 128, adapter=LowRankAdapter(4, quantised=True)),
        load,
        NO_OVERHEAD,
    )
    base_parameters = 4 * (256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 704)
    adapter_bytes = 4 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 704))
    assert lora.optimizer == 8 * adapter_bytes
    assert lora.weights == 2 * facts.num_parameters + 4 * adapter_bytes
    assert lora.weights - qlora.weights == pytest.approx(base_parameters * (2 - 0.5625))
    assert lora.total < full.total


def test_a_framework_with_half_precision_weights_and_fp32_masters() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    conventions = FrameworkConventions(
        "other",
        weight_bytes=2.0,
        master_bytes=4.0,
        gradient_bytes=4.0,
        has_unsharded_gradients=True,
    )
    parts = predict_memory(
        facts,
        Candidate(Layout(dp_shard=4, zero_stage=1), 128, engine=conventions),
        load,
        NO_OVERHEAD,
    )
    num = facts.num_parameters
    assert (parts.weights, parts.gradients, parts.gathered) == (2 * num, 4 * num, 0)
    assert parts.optimizer == pytest.approx(12 * num / 4)


@pytest.mark.parametrize(("smaller", "larger"), list(itertools.pairwise([1, 2, 4])))
def test_larger_micro_batches_need_more_activation_memory(smaller: int, larger: int) -> None:
    facts = ModelFacts(models.read_shape("llama"))
    predictor = Predictor(facts, models.make_cluster(4), NO_OVERHEAD)

    def predict_activations(micro_batch: int) -> float:
        candidate = Candidate(Layout(pp=4, dp_replicate=1), 128, micro_batch, 8)
        return predictor.compute_memory(
            candidate, predictor.get_pipeline_stages(candidate)
        ).activations

    assert predict_activations(larger) == pytest.approx(
        predict_activations(smaller) * larger / smaller, rel=0.1
    )


ADAPTED = Candidate(Layout(), 128, recompute="selective", adapter=LowRankAdapter(4))
CODES = Candidate(
    Layout(dp_shard=2, zero_stage=3),
    128,
    precision="fp8",
    scaled_shares=build_scaled_shares(
        models.read_shape("llama"), FP8Section(recipe="rowwise_with_gw_hp")
    ),
)


@pytest.mark.parametrize(
    ("candidate", "other"),
    [
        (ADAPTED, replace(ADAPTED, adapter=LowRankAdapter(64))),
        (Candidate(Layout(), 128), Candidate(Layout(), 128, has_bf16_masters=True)),
        (CODES, replace(CODES, parameter_offload="host")),
    ],
    ids=["rank", "bf16 weights", "offloaded weights"],
)
def test_cached_activations_are_those_of_the_same_settings(
    candidate: Candidate, other: Candidate
) -> None:
    """Candidates of one model share a cache, as those of all plans of a process do."""
    facts = ModelFacts(models.read_shape("llama"))
    get_layer_activations(facts, facts.kinds[0], candidate)
    cached = get_layer_activations(facts, facts.kinds[0], other)
    alone = ModelFacts(models.read_shape("llama"))
    assert cached == get_layer_activations(alone, alone.kinds[0], other)
    assert cached != get_layer_activations(facts, facts.kinds[0], candidate)
