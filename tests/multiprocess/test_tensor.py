"""Tensor and sequence parallelism against one process: every family, every data layout, few
key-value heads, generation.
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
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.numerics.compilation import compiles_wide_attention
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.verification import verify
from tests.multiprocess.models import GPT2, TENSOR_LLAMA, build_recipe
from tests.multiprocess.pool import RankPool
from tests.reference.cases import CASES

TOKENS = 12
LONG = pytest.mark.long
"""Combinations that `test_grid` also covers."""
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
"""One tiny model per family, with its special features: biases, padding rows, soft caps, fused
or transposed projections.
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


PIPELINED = {"phi3", "gemma2-soft-caps-bite", "gpt2", "deepseek_v3"}
"""Families whose products overlap with communication here: joined projections, norms after both
branches, matrices `[in, out]` with biases, and a part of the products only.
"""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(ranks: RankPool, name: str) -> None:
    tied = read_config(CASES[name]).tied_embeddings
    layout = Layout(
        tp=2,
        sequence_parallel=len(name) % 2 == 0,
        async_tensor_parallel="chunked" if name in PIPELINED else "none",
    )
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
def test_with_other_parallelisms(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase
) -> None:
    assert_equals_one_process(ranks, config, layout, case)


@pytest.mark.parametrize("name", ["phi3", "olmo2", "qwen3"])
def test_ranks_that_share_a_key_value_head(ranks: RankPool, name: str) -> None:
    """Models with fused projections, a norm over all heads and norms on heads, with half as
    many key-value heads as ranks.
    """
    assert_equals_one_process(ranks, CASES[name], Layout(tp=4), VerificationCase(1))


def build(
    shape_config: dict[str, Any],
    layout: Layout,
    *,
    chunked: bool = True,
    compile_blocks: bool = False,
) -> ParallelModel:
    """Build a float64 model with weights by name and seed."""
    shape = replace(read_config(shape_config), initializer_range=0.5)
    loss = partial(chunked_cross_entropy, chunk_tokens=8) if chunked else None
    with torch.device("meta"):
        decoder = Decoder(shape, loss_function=loss, compute_dtype=torch.float64)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        decoder,
        build_plan(
            shape, layout, BatchPlan(TOKENS, 2, 1, layout.data_ranks), PrecisionSection(kind="fp64")
        ),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 3, dtype=torch.float64, narrow=narrow
        ),
        compile_blocks=compile_blocks,
    )


def build_rows() -> tuple[Tensor, Tensor]:
    """Return token ids and labels."""
    ids_BT = torch.randint(0, 61, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    return ids_BT, ids_BT.roll(-1, 1)


def compute_logits_and_loss(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return all logits, the loss over whole logits, and its gradient for one weight."""
    model = build(TENSOR_LLAMA, layout, chunked=False)
    ids_BT, labels_BT = build_rows()
    loss = model.module(ids_BT, labels_BT=labels_BT)
    loss.backward()
    model.finish_gradients()
    gradient = model.gather_gradient("model.layers.0.self_attn.q_proj.weight")
    assert gradient is not None
    with model.evaluate_mode() as module:
        return module(ids_BT), loss.detach(), gradient


@pytest.mark.parametrize("layout", [Layout(tp=2), WHOLE_STREAM], ids=str)
def test_every_rank_returns_whole_logits(ranks: RankPool, layout: Layout) -> None:
    expected = ranks.run(1, compute_logits_and_loss, Layout())[0]
    for got in ranks.run(2, compute_logits_and_loss, layout):
        for ours, want in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-11, atol=1e-12)


def complete_text(layout: Layout) -> str:
    """Return a sampled completion, generated with a cache of this rank's heads."""
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


def test_generation_equals_that_of_one_process(ranks: RankPool) -> None:
    expected = ranks.run(1, complete_text, Layout())[0]
    assert len(expected) > 5
    assert ranks.run(2, complete_text, Layout(tp=2)) == [expected] * 2
    assert ranks.run(4, complete_text, Layout(tp=4)) == [expected] * 4


def count_saved_elements(layout: Layout) -> int:
    """Count the elements that are saved for the backward pass, parameters excluded."""
    model = build(TENSOR_LLAMA, layout)
    ids_BT, labels_BT = build_rows()
    parameters = {
        parameter.untyped_storage().data_ptr() for _, parameter in model.named_parameters()
    }
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.module(ids_BT, labels_BT=labels_BT)
    total = sum(saved.values())
    loss.backward()
    return total


def test_sequence_parallelism_saves_fewer_activations(ranks: RankPool) -> None:
    whole, sharded = (
        ranks.run(2, count_saved_elements, layout)[0] for layout in (WHOLE_STREAM, Layout(tp=2))
    )
    assert sharded < whole


def compute_compiled_gradient(layout: Layout, compile_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return the loss and one gradient, with blocks compiled or not."""
    model = build(TENSOR_LLAMA, layout, compile_blocks=compile_blocks)
    ids_BT, labels_BT = build_rows()
    loss = model.module(ids_BT, labels_BT=labels_BT)
    loss.backward()
    model.finish_gradients()
    gradient = model.gather_gradient("model.layers.0.mlp.up_proj.weight")
    assert gradient is not None
    return loss.detach(), gradient


@pytest.mark.long
@pytest.mark.skipif(not compiles_wide_attention(), reason="torch cannot compile fp64 attention")
@pytest.mark.parametrize("layout", [Layout(tp=2), WHOLE_STREAM], ids=str)
def test_compiled_blocks_give_the_same_gradients(ranks: RankPool, layout: Layout) -> None:
    expected = ranks.run(2, compute_compiled_gradient, layout, False)[0]
    got = ranks.run(2, compute_compiled_gradient, layout, True, timeout_seconds=280.0)[0]
    for ours, want in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)
