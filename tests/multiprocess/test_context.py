"""Context parallelism in the whole engine against one process: methods, ZeRO stages, kinds of
attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import read_recipe_shape
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.errors import LayoutError, RankFailed
from shardwright.layout import Layout
from shardwright.model import KeyValueCache
from shardwright.training.step import accumulate_gradients
from shardwright.verification.cases import VerificationCase
from shardwright.verification.verification import verify
from tests.multiprocess.models import GPT2, LLAMA, MIXTRAL, QWEN3, build_recipe
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import SEED, TOKENS, build, distance, micro_batches

METHODS = ("ring", "all_gather", "ulysses")
PLAIN = VerificationCase(accumulation=1, documents=False)
DOCUMENTS = VerificationCase(accumulation=2)
DROPPING = VerificationCase(accumulation=1, recompute="full", dropout=True)
SELECTIVE = VerificationCase(accumulation=2, recompute="selective", tied=True)

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 7}
GEMMA2 = {
    **LLAMA,
    "model_type": "gemma2",
    "sliding_window": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
LONGROPE = {
    **LLAMA,
    "model_type": "phi3",
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.0, 3.0],
    },
    "original_max_position_embeddings": 8,
    "pad_token_id": 0,
}
EVEN = {**LLAMA, "intermediate_size": 28}
MODELS = {
    "llama": LLAMA,
    "even": EVEN,
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "longrope": LONGROPE,
    "mixtral": MIXTRAL,
}


class Cell(NamedTuple):
    """Model, layout and case."""

    model: str
    layout: Layout
    case: VerificationCase

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.case}"


def build_cell(model: str, method: Any, case: VerificationCase, **degrees: Any) -> Cell:
    return Cell(model, Layout(**{"cp": 2, "cp_method": method, **degrees}), case)


CELLS = [
    # Every method, stage, number of ranks and kind of attention; `LONG` has their combinations.
    build_cell("llama", "ring", DOCUMENTS, zero_stage=2),
    build_cell("llama", "all_gather", SELECTIVE),
    build_cell("llama", "ulysses", DROPPING, cp=4),
    build_cell("llama", "ring", DROPPING, cp=4, zero_stage=3),
    build_cell("llama", "all_gather", DOCUMENTS, cp=3, zero_stage=1),
    build_cell("llama", "ulysses", DOCUMENTS, dp_shard=2, zero_stage=1),
    build_cell("llama", "ring", PLAIN, dp_replicate=2),
    build_cell("llama", "all_gather", DROPPING, dp_replicate=2, zero_stage=3),
    build_cell("gpt2", "ring", SELECTIVE),
    build_cell("gpt2", "ulysses", DROPPING, zero_stage=3),
    build_cell("mistral", "all_gather", PLAIN, zero_stage=2),
    build_cell("gemma2", "ring", SELECTIVE, zero_stage=1),
    build_cell("gemma2", "ulysses", PLAIN),
    build_cell("longrope", "ring", DOCUMENTS),
    build_cell("even", "ring", DROPPING, tp=2),
    build_cell("even", "ulysses", DROPPING, tp=2, sequence_parallel=False),
    build_cell("even", "all_gather", DOCUMENTS, pp=2),
]
LONG = [
    *(
        build_cell(model, method, case, zero_stage=2)
        for model in MODELS
        for method in METHODS
        for case in (PLAIN, SELECTIVE, DROPPING)
        if model != "mixtral"
    ),
    *(
        build_cell("llama", method, case, zero_stage=stage)
        for method in METHODS
        for case in (DOCUMENTS, DROPPING)
        for stage in range(4)
    ),
    *(
        build_cell("llama", method, DOCUMENTS, dp_replicate=2, zero_stage=stage)
        for method in METHODS
        for stage in (0, 1, 3)
    ),
    *(
        build_cell("llama", method, DOCUMENTS, dp_shard=2, zero_stage=stage)
        for method in METHODS
        for stage in (1, 2, 3)
    ),
    *(
        build_cell("llama", method, DOCUMENTS, cp=4, zero_stage=stage)
        for method in METHODS
        for stage in (0, 3)
    ),
    *(
        build_cell("even", method, case, tp=2, zero_stage=3)
        for method in METHODS
        for case in (DOCUMENTS, DROPPING)
    ),
    *(build_cell("even", method, DOCUMENTS, pp=2) for method in METHODS),
]


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in LONG)], ids=str
)
def test_gradients_are_those_of_one_process(ranks: RankPool, cell: Cell) -> None:
    recipe = build_recipe(MODELS[cell.model])
    report = verify(
        recipe,
        read_recipe_shape(recipe),
        [cell.layout],
        [cell.case],
        ["float64"],
        sequence_length=24,
        pool=ranks,
    )
    failed = [
        (result.failure, [f for f in result.findings if not f.passed])
        for result in report.cells
        if not result.passed
    ]
    assert not failed


SPLIT_BY_WORK = [
    Cell("mistral", Layout(cp=2, cp_method="ring", cp_split="work", zero_stage=3), DOCUMENTS),
    Cell(
        "llama",
        Layout(cp=2, cp_method="all_gather", cp_split="work", dp_shard=2, zero_stage=1),
        SELECTIVE,
    ),
    Cell("even", Layout(tp=2, pp=2, cp=2, cp_method="ring", cp_split="work"), DOCUMENTS),
    Cell("mixtral", Layout(cp=2, ep=2, cp_method="ring", cp_split="work", zero_stage=1), DOCUMENTS),
]


@pytest.mark.parametrize("cell", SPLIT_BY_WORK, ids=str)
def test_rows_split_by_work(ranks: RankPool, cell: Cell) -> None:
    """Rows of 64 tokens have eight chunks."""
    recipe = build_recipe(MODELS[cell.model])
    shape = read_recipe_shape(recipe)
    report = verify(
        recipe, shape, [cell.layout], [cell.case], ["float64"], sequence_length=64, pool=ranks
    )
    assert report.passed, [result.failure or result.findings for result in report.cells]


@pytest.mark.parametrize("method", METHODS)
def test_float32_and_explicit_attention(ranks: RankPool, method: Any) -> None:
    for kind in ("auto", "explicit"):
        recipe = build_recipe(LLAMA, model={"attention": kind})
        layout = Layout(cp=2, cp_method=method)
        report = verify(
            recipe,
            read_recipe_shape(recipe),
            [layout],
            [DOCUMENTS],
            ["float32"],
            sequence_length=24,
            pool=ranks,
        )
        assert report.passed


def compute_partly_supervised_loss(layout: Layout, positions: slice) -> tuple[float, float]:
    """Return loss and gradient norm of a step that supervises some positions of the rows only."""
    model = build(layout, PrecisionSection(kind="fp64"))
    labels_BT = torch.full((2, TOKENS), -100)
    labels_BT[:, positions] = 7
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS) % LLAMA["vocab_size"]
    batch = MicroBatch(
        ids_BT,
        labels_BT,
        torch.arange(TOKENS).expand(2, TOKENS),
        None,
        torch.arange(2),
        int((labels_BT >= 0).sum()),
    )
    loss = accumulate_gradients(model, [batch], seed=SEED, step=0)
    gradients = [model.gather_gradient(name) for name, _ in model.named_parameters()]
    return loss.mean(), float(
        torch.stack([g.double().norm() for g in gradients if g is not None]).norm()
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_a_supervised_token(ranks: RankPool, method: Any) -> None:
    """Rank 0 has the first chunk under every method, so the other rank has no supervised token."""
    (expected,) = ranks.run(1, compute_partly_supervised_loss, Layout(), slice(0, 3))
    for got in ranks.run(
        2, compute_partly_supervised_loss, Layout(cp=2, cp_method=method), slice(0, 3)
    ):
        assert got == pytest.approx(expected, rel=1e-12)


def evaluate(layout: Layout) -> float:
    """Return the summed loss of two rows without gradients."""
    model = build(layout, PrecisionSection(kind="fp64"))
    model.decoder.eval()
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS)
    with model.evaluate_mode() as module:
        return float(model.sum_over_data(module(ids_BT, labels_BT=ids_BT).double()))


def compute_gradients(layout: Layout, kind: Any) -> dict[str, Tensor]:
    """Return every gradient of a step on two rows that all ranks share."""
    model = build(layout, PrecisionSection(kind=kind))
    accumulate_gradients(model, micro_batches(0), seed=SEED, step=0)
    gradients = {name: model.gather_gradient(name) for name, _ in model.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize("method", METHODS)
def test_bf16_rounds_no_more_than_one_process(ranks: RankPool, method: Any) -> None:
    (exact,), (rounded,) = (
        ranks.run(1, compute_gradients, Layout(), kind) for kind in ("fp32", "bf16")
    )
    for got in ranks.run(
        2, compute_gradients, Layout(cp=2, cp_method=method, zero_stage=3), "bf16"
    ):
        assert all(gradient.dtype == torch.float32 for gradient in got.values())
        assert 1e-4 < distance(got, exact) < 1.5 * distance(rounded, exact)


@pytest.mark.parametrize("method", METHODS)
def test_evaluation(ranks: RankPool, method: Any) -> None:
    (expected,) = ranks.run(1, evaluate, Layout())
    assert ranks.run(2, evaluate, Layout(cp=2, cp_method=method, zero_stage=3)) == pytest.approx(
        [expected] * 2, rel=1e-12
    )


def generate_on_ranks() -> None:
    model = build(Layout(cp=2), PrecisionSection(kind="fp32"))
    cache = KeyValueCache(model.decoder.shape, 1, TOKENS, dtype=torch.float32, device="cpu")
    model.decoder(torch.arange(4)[None], cache=cache)


def test_caches_are_refused() -> None:
    with (
        RankPool() as pool,
        pytest.raises(
            RankFailed, match="generation does not support context parallelism"
        ) as caught,
    ):
        pool.run(2, generate_on_ranks)
    assert isinstance(caught.value.__cause__, LayoutError)


def compute_odd_rows(layout: Layout) -> None:
    build(layout, PrecisionSection(kind="fp32")).module(
        torch.arange(7)[None], labels_BT=torch.arange(7)[None]
    )


def test_an_indivisible_row_is_refused_whatever_the_recipe_allows() -> None:
    with (
        RankPool() as pool,
        pytest.raises(RankFailed, match=r"7 tokens are not divisible by 2 x cp = 4.* 4 or 8"),
    ):
        pool.run(2, compute_odd_rows, Layout(cp=2, cp_method="ring"))


def compute_compiled_gradients(layout: Layout) -> float:
    """Return the gradient norm of a step in which every block is compiled."""
    model = build(layout, PrecisionSection(kind="fp64"))
    model.decoder.compile_blocks()
    ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS)
    document_ids_BT = (torch.arange(TOKENS) >= TOKENS // 3).long().expand(2, TOKENS)
    loss = model.module(ids_BT, labels_BT=ids_BT, document_ids_BT=document_ids_BT)
    loss.backward()
    model.finish_gradients()
    gradients = [model.gather_gradient(name) for name, _ in model.named_parameters()]
    dist.barrier() if dist.is_initialized() else None
    return float(torch.stack([g.double().norm() for g in gradients if g is not None]).norm())


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "split"), [*((method, "zigzag") for method in METHODS), ("ring", "work")]
)
def test_compiled_blocks(ranks: RankPool, method: Any, split: Any) -> None:
    (expected,) = ranks.run(1, compute_compiled_gradients, Layout(), timeout_seconds=280)
    layout = Layout(cp=2, cp_method=method, cp_split=split)
    got = ranks.run(2, compute_compiled_gradients, layout, timeout_seconds=280)
    assert got == pytest.approx([expected] * 2, rel=1e-10)
