"""Tensor and sequence parallelism against one process: every family, every data layout beside it,
few key-value heads, text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_config, read_recipe_shape
from shardwright.config.training import PrecisionSection
from shardwright.data.tokenizer import CharacterTokenizer
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plan import BatchPlan, Plan
from shardwright.verify.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verify.verification import verify
from tests.multiprocess.models import GPT2, TENSOR_LLAMA, build_recipe
from tests.multiprocess.pool import RankPool
from tests.reference.cases import CASES

TOKENS = 12
LONG = pytest.mark.long
"""Pairs of cuts, which meet in `test_grid` every day."""
WHOLE_STREAM = Layout(tp=2, sequence_parallel=False)

FAMILIES = (
    "llama-padding-row",
    "llama-one-kv-head-tied",
    "mistral-window",
    "qwen2",
    "qwen3-biases-window",
    "phi3",
    "gemma2-soft-caps-bite",
    "gemma3_text-newer",
    "olmo2-biases-tied",
    "granite-biases",
    "smollm3",
    "gpt2",
    "gpt_neox",
    "gpt_neox-sequential-tied",
    "gpt_oss",
    "deepseek_v3",
)
"""One tiny model each, with what is odd about it: biases, padding rows, soft caps, fused and
transposed projections.
"""


def assert_equals_one_process(
    ranks: RankPool,
    config: dict[str, Any],
    layout: Layout,
    case: VerificationCase,
    dtypes: tuple[str, ...] = ("float64",),
) -> None:
    """Fail unless every comparison passes."""
    recipe = build_recipe(config)
    report = verify(
        recipe,
        read_recipe_shape(recipe),
        [layout],
        [case],
        list(dtypes),
        sequence_length=TOKENS,
        pool=ranks,
    )
    failed = [finding for cell in report.cells for finding in cell.findings if not finding.passed]
    assert report.passed, failed or [cell.failure for cell in report.cells]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(ranks: RankPool, name: str) -> None:
    tied = read_config(CASES[name]).tied_embeddings
    layout = Layout(tp=2, sequence_parallel=len(name) % 2 == 0)
    assert_equals_one_process(
        ranks,
        CASES[name],
        layout,
        VerificationCase(2, dropout=True, tied=tied),
        VERIFICATION_DTYPES,
    )


@pytest.mark.parametrize(
    ("config", "layout", "case"),
    [
        (TENSOR_LLAMA, Layout(tp=2), VerificationCase(1, documents=False)),
        (TENSOR_LLAMA, WHOLE_STREAM, VerificationCase(2, "selective", tied=True)),
        (TENSOR_LLAMA, Layout(tp=4), VerificationCase(2, "full", dropout=True)),
        (
            TENSOR_LLAMA,
            Layout(tp=4, sequence_parallel=False),
            VerificationCase(1, "selective", dropout=True, tied=True),
        ),
        (GPT2, Layout(tp=4), VerificationCase(2, dropout=True, tied=True)),
        pytest.param(
            TENSOR_LLAMA,
            Layout(tp=2, dp_replicate=2),
            VerificationCase(3, "full", dropout=True),
            marks=LONG,
        ),
        pytest.param(
            TENSOR_LLAMA,
            Layout(tp=2, dp_shard=2, zero_stage=1, sequence_parallel=False),
            VerificationCase(2, tied=True),
            marks=LONG,
        ),
        pytest.param(
            GPT2,
            Layout(tp=2, dp_shard=2, zero_stage=2),
            VerificationCase(3, dropout=True, tied=True),
            marks=LONG,
        ),
        (
            TENSOR_LLAMA,
            Layout(tp=2, dp_shard=2, zero_stage=3),
            VerificationCase(2, "selective", dropout=True),
        ),
        pytest.param(
            TENSOR_LLAMA, Layout(tp=2, cp=2), VerificationCase(2, dropout=True), marks=LONG
        ),
        pytest.param(
            TENSOR_LLAMA,
            Layout(tp=2, pp=2),
            VerificationCase(2, dropout=True, tied=True),
            marks=LONG,
        ),
    ],
    ids=str,
)
def test_beside_other_cuts(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    assert_equals_one_process(ranks, config, layout, case)


@pytest.mark.parametrize("name", ["phi3", "olmo2", "qwen3"])
def test_ranks_that_share_a_key_value_head(ranks: RankPool, name: str) -> None:
    """Fused projections, a norm over all heads and norms on heads, each with half as many key-value
    heads as ranks.
    """
    assert_equals_one_process(ranks, CASES[name], Layout(tp=4), VerificationCase(1))


def build(
    shape_config: dict[str, Any],
    layout: Layout,
    *,
    chunked: bool = True,
    compile_blocks: bool = False,
) -> ParallelModel:
    """A model of a layout in float64, weights by name and seed."""
    shape = replace(read_config(shape_config), initializer_range=0.5)
    loss = partial(chunked_cross_entropy, chunk_tokens=8) if chunked else None
    with torch.device("meta"):
        decoder = Decoder(shape, loss_function=loss, compute_dtype=torch.float64)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        decoder,
        Plan(layout, BatchPlan(TOKENS, 2, 1, layout.data_ranks), PrecisionSection(kind="fp64")),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 3, dtype=torch.float64, narrow=narrow
        ),
        compile_blocks=compile_blocks,
    )


def rows() -> tuple[Tensor, Tensor]:
    """Ids and labels."""
    ids_BT = torch.randint(0, 61, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    return ids_BT, ids_BT.roll(-1, 1)


def logits_and_loss(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """All logits, the loss that holds them all, and the gradient that it gives one weight."""
    model = build(TENSOR_LLAMA, layout, chunked=False)
    ids_BT, labels_BT = rows()
    loss = model.module(ids_BT, labels_BT=labels_BT)
    loss.backward()
    model.finish_gradients()
    gradient = model.gather_gradient("model.layers.0.self_attn.q_proj.weight")
    assert gradient is not None
    with model.evaluate_mode() as module:
        return module(ids_BT), loss.detach(), gradient


@pytest.mark.parametrize("layout", [Layout(tp=2), WHOLE_STREAM], ids=str)
def test_logits_come_whole_to_every_rank(ranks: RankPool, layout: Layout) -> None:
    wanted = ranks.run(1, logits_and_loss, Layout())[0]
    for got in ranks.run(2, logits_and_loss, layout):
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def continue_text(layout: Layout) -> str:
    """What the model writes after a prompt, drawn token by token from a cache of this rank's
    heads.
    """
    characters = [chr(code) for code in range(60, 120)]
    with build(TENSOR_LLAMA, layout).evaluate_mode():
        decoder = build(TENSOR_LLAMA, layout).decoder
        return complete_prompt(
            decoder,
            CharacterTokenizer(characters),
            "ABC",
            SamplingSettings(1.0, seed=4),
            max_new_tokens=15,
        ).text


def test_generation_is_that_of_one_process(ranks: RankPool) -> None:
    wanted = ranks.run(1, continue_text, Layout())[0]
    assert len(wanted) > 5
    assert ranks.run(2, continue_text, Layout(tp=2)) == [wanted] * 2
    assert ranks.run(4, continue_text, Layout(tp=4)) == [wanted] * 4


def saved_elements(layout: Layout) -> int:
    """Elements that one block keeps for its backward pass, parameters left out."""
    model = build(TENSOR_LLAMA, layout)
    ids_BT, labels_BT = rows()
    parameters = {
        parameter.untyped_storage().data_ptr() for _, parameter in model.named_parameters()
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.module(ids_BT, labels_BT=labels_BT)
    total = sum(kept.values())
    loss.backward()
    return total


def test_sequence_parallelism_keeps_fewer_activations(ranks: RankPool) -> None:
    whole, cut = (
        ranks.run(2, saved_elements, layout)[0] for layout in (WHOLE_STREAM, Layout(tp=2))
    )
    assert cut < whole


def compiled_gradient(layout: Layout, compile_blocks: bool) -> tuple[Tensor, Tensor]:
    """Loss and one gradient, blocks compiled or not."""
    model = build(TENSOR_LLAMA, layout, compile_blocks=compile_blocks)
    ids_BT, labels_BT = rows()
    loss = model.module(ids_BT, labels_BT=labels_BT)
    loss.backward()
    model.finish_gradients()
    gradient = model.gather_gradient("model.layers.0.mlp.up_proj.weight")
    assert gradient is not None
    return loss.detach(), gradient


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(tp=2), WHOLE_STREAM], ids=str)
def test_compiled_blocks_give_the_same(ranks: RankPool, layout: Layout) -> None:
    wanted = ranks.run(2, compiled_gradient, layout, False)[0]
    got = ranks.run(2, compiled_gradient, layout, True, timeout_seconds=280.0)[0]
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
