"""The real step of every family and layout on fake CUDA tensors and a fake process group.

No operator mixes devices (fake tensors raise), lacks a CUDA kernel, multiplies integers, or has no
deterministic version on CUDA; and the attention kernels are those that CUDA takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import torch

import shardwright as sw
from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.config.training import OptimizerName, OptimizerSection
from shardwright.layout import Layout
from shardwright.model.attention import fused_attention
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.problem import build_template
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal import rank_rehearsal
from shardwright.rehearsal.rank_rehearsal import RankRehearsal, RehearsalDevice, rehearse_rank
from tests.hostcuda import device

TOKENS = 128
NO_OVERHEAD = Efficiency(
    reserve_share=0.0, reserve_bytes=0.0, context_bytes=0.0, communicator_bytes=0.0
)
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 256, "n_embd": 128, "n_head": 8, "n_layer": 2, "n_positions": 256,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"sliding_window": 32},
    "qwen2": _SIZES,
    "qwen3": _SIZES | {"head_dim": 16},
    "phi3": _SIZES | {"original_max_position_embeddings": 256},
    "gemma2": _SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": _SIZES | {"head_dim": 16, "sliding_window": 32},
    "olmo2": _SIZES,
    "granite": _SIZES,
    "smollm3": _SIZES,
    "gpt2": _GPT2,
    "gpt_neox": {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"},
    "mixtral": _SIZES | {"num_local_experts": 8},
    "qwen3_moe": _SIZES | _EXPERTS | {"head_dim": 16},
    "olmoe": _SIZES | {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": _SIZES | {"head_dim": 16, "sliding_window": 32, "num_local_experts": 8},
    "deepseek_v3": _SIZES | _LATENT,
}
SPARSE = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
EXPLICIT = {"fsdp-tp-cp-pp": ("gemma2",), "ddp": ("gemma2", "gpt_oss")}
"""Families that no fused kernel supports: soft caps, and sinks unless cp adds them itself."""


def make_recipe(family: str, **sections: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {
                "config": {"model_type": family, **FAMILIES[family]},
                "loss_chunk_tokens": 64,
            },
            "data": {"sources": ["nowhere"]},
            "training": {
                "sequence_length": TOKENS,
                "micro_batch_size": 2,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
            **sections,
        }
    )


def rehearse(
    family: str,
    layout: Layout,
    *,
    kind: str = "bf16",
    recompute: str = "none",
    device_type: RehearsalDevice = "cuda",
    num_micro_batches: int = 2,
    **sections: Any,
) -> RankRehearsal:
    recipe = make_recipe(family, **sections)
    precision = recipe.precision.model_copy(update={"kind": kind})
    batch = BatchPlan(TOKENS, 2, num_micro_batches, layout.data_ranks)
    shape = read_recipe_shape(recipe)
    plan = build_plan(shape, layout, batch, precision, recompute)  # type: ignore[arg-type]
    return rehearse_rank(recipe, plan, 0, device_type)


@pytest.fixture(autouse=True)
def checked_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Refuse operators without a CUDA kernel; return the names of those that ran on CUDA."""
    run = rank_rehearsal._run_operator
    names: set[str] = set()

    def run_checked(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cuda" for x in tensors):
            names.add(func.name())
            assert device.has_cuda_kernel(func), f"{func.name()} has no CUDA kernel"
            if func.name() in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"):
                assert tensors[0].is_floating_point(), f"{func.name()} of {tensors[0].dtype}"
            assert not is_without_determinism(func.name(), args), f"{func.name()} varies on CUDA"
        return run(func, args, kwargs)

    monkeypatch.setattr(rank_rehearsal, "_run_operator", run_checked)
    return names


NO_DETERMINISM = frozenset(
    f"aten::{name}"
    for name in (
        "histc", "kthvalue", "median.dim", "put_", "_embedding_bag_dense_backward",
        "scatter_reduce.two", "nll_loss2d_forward", "_ctc_loss_backward",
    )
)  # fmt: skip
"""Operators without a deterministic version on CUDA, of `use_deterministic_algorithms`'s list in
torch's documentation: those that a language model might use."""


def is_without_determinism(name: str, arguments: Any) -> bool:
    """Return True if `training.deterministic` would end in an error at an operator on CUDA."""
    base = name.partition(".")[0]
    if base == "aten::bincount":
        return len(arguments) > 1 and arguments[1] is not None
    if base in ("aten::cumsum", "aten::cumsum_"):
        return bool(arguments[0].is_floating_point())
    return name in NO_DETERMINISM


def list_attention(names: set[str]) -> set[str]:
    """Return which fused kernels ran forward, of flash, efficient and varlen."""
    operators = {
        "flash": "aten::_scaled_dot_product_flash_attention",
        "efficient": "aten::_scaled_dot_product_efficient_attention",
        "varlen": "torch_attn::_varlen_attn",
    }
    return {kernel for kernel, name in operators.items() if name in names}


OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


def update_with(
    optimizers: Collection[OptimizerName], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Let a rehearsal clip and update with these optimizers, then with the recipe's.

    Returns:
        The number of updates by optimizer, of those whose packages are installed.
    """
    counts: Counter[str] = Counter()
    update = rank_rehearsal.update_parameters

    def update_several_times(
        model: ParallelModel, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        assert options["max_grad_norm"] is not None
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for rule in optimizers:
            if rule == "adamw_8bit" and find_spec("torchao") is None:
                continue  # the extra `lowbit`
            section = OptimizerSection(name=rule)
            other = build_optimizer(
                model.named_parameters(), section, learning_rate=1e-4, weight_decay=0.1, model=model
            )
            update(model, other, **options)
            counts[rule] += 1
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
        update(model, optimizer, **options)

    monkeypatch.setattr(rank_rehearsal, "update_parameters", update_several_times)
    return counts


SINGLE_AXES = {
    "zero_1": Layout(dp_shard=2, zero_stage=1),
    "zero_3": Layout(dp_shard=2, zero_stage=3),
    "tp": Layout(tp=2),
    "cp_ring": Layout(cp=2, cp_method="ring"),
    "cp_all_gather": Layout(cp=2, cp_method="all_gather"),
    "cp_ulysses": Layout(cp=2, cp_method="ulysses"),
    "pp": Layout(pp=2, schedule="zb_h1"),
}


def find_family_layout(family: str, axes: str) -> Layout:
    """Return a layout by its name; the experts of a family that has some are sharded too."""
    ep = 2 if family in SPARSE else 1
    return {
        "fsdp-tp-cp-pp": Layout(dp_shard=2, tp=2, cp=2, pp=2, ep=ep, zero_stage=3),
        "ddp": Layout(dp_replicate=2),
        "ep": Layout(dp_shard=2, ep=ep, zero_stage=1),
        **SINGLE_AXES,
    }[axes]


OPTIMIZERS_OF_AXES: dict[str, set[OptimizerName]] = {
    "fsdp-tp-cp-pp": {"adafactor", "muon", "sgd"},
    "ddp": {"adamw_8bit"},
}
"""Optimizers other than AdamW, the recipe's, in `make test`: each with every family."""
QUANTISED = ("llama", "gpt2", "gpt_oss", "deepseek_v3")
"""Families that 8-bit AdamW updates in `make test`, which takes half of the time of a step: with
matrices, vectors, biases, and weights of several experts in one tensor."""


def test_every_optimizer_updates_every_family() -> None:
    assert {"adamw"}.union(*OPTIMIZERS_OF_AXES.values()) == set(OPTIMIZERS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axes", OPTIMIZERS_OF_AXES)
def test_every_family_takes_a_step(
    family: str, axes: str, checked_operators: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = find_family_layout(family, axes)
    optimizers = OPTIMIZERS_OF_AXES[axes]
    if family not in QUANTISED:
        optimizers = optimizers - {"adamw_8bit"}
    updates = update_with(optimizers, monkeypatch)
    report = rehearse(family, layout, num_micro_batches=layout.pp)
    assert report.peak_bytes > report.weights_bytes > 0
    assert set(updates) >= optimizers - {"adamw_8bit"}
    kernels = list_attention(checked_operators)
    if family in EXPLICIT[axes]:
        assert kernels == set()
    elif family == "gpt_oss":
        assert "efficient" in kernels  # sinks are added to the results of tiles, which need masks
    elif "sliding_window" in FAMILIES[family]:
        assert kernels == {"varlen"}  # the context ranks, adjacent to those of tp, exchange heads
    else:
        assert kernels == {"flash"}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axes", [*OPTIMIZERS_OF_AXES, *SINGLE_AXES, "ep"])
def test_every_family_takes_a_step_with_every_optimizer(
    family: str, axes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if axes == "ep" and family not in SPARSE:
        pytest.skip("a family without experts")
    updates = update_with(OPTIMIZERS, monkeypatch)
    layout = find_family_layout(family, axes)
    report = rehearse(family, layout, num_micro_batches=layout.pp)
    assert report.peak_bytes > report.weights_bytes > 0
    assert set(updates) >= set(OPTIMIZERS) - {"adamw_8bit"}


LAYOUTS = [
    Layout(),
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero_stage=1),
    Layout(dp_shard=2, zero_stage=2),
    Layout(dp_shard=2, zero_stage=3),
    Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
    Layout(tp=2, sequence_parallel=True, async_tensor_parallel="chunked"),
    Layout(tp=2, sequence_parallel=False, async_tensor_parallel="chunked"),
    Layout(cp=2, cp_method="ring"),
    Layout(cp=2, cp_method="all_gather"),
    Layout(cp=2, cp_method="ulysses"),
    Layout(pp=2, schedule="1f1b"),
    Layout(pp=2, schedule="zb_h1"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_takes_a_step_with_the_bytes_and_collectives_of_a_cpu(
    layout: Layout, checked_operators: set[str]
) -> None:
    # Copies of weights would make the norms' temporaries a larger share of the peak.
    precision = {"kind": "bf16", "working_weights": False}
    on_cuda = rehearse("llama", layout, precision=precision)
    assert list_attention(checked_operators) == {"flash"}
    on_cpu = rehearse("llama", layout, device_type="cpu", precision=precision)
    assert on_cuda.collectives == on_cpu.collectives
    assert on_cuda.weights_bytes == on_cpu.weights_bytes
    assert on_cuda.optimizer_bytes == on_cpu.optimizer_bytes
    # Of a model this small, a norm's wide temporaries on a CPU are 7% of the peak.
    assert on_cuda.peak_bytes == pytest.approx(on_cpu.peak_bytes, rel=0.08)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2, ep=2, zero_stage=3)], ids=str)
def test_experts_take_a_step(layout: Layout) -> None:
    assert rehearse("qwen3_moe", layout).peak_bytes > 0


SHARDED = Layout(dp_shard=2, zero_stage=3)
REPLICATED = Layout(dp_replicate=2, tp=2)


@pytest.mark.parametrize(  # the tests of families take the others
    ("rule", "layout"),
    [
        ("sgd", REPLICATED),
        ("muon", REPLICATED),
        ("adafactor", REPLICATED),
        ("adamw_8bit", SHARDED),
    ],
    ids=str,
)
def test_optimizers_take_a_step_under_other_layouts(rule: str, layout: Layout) -> None:
    if rule == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    options = {"block_size": 32} if rule == "adamw_8bit" else {}
    assert rehearse("llama", layout, optimizer={"name": rule, **options}).optimizer_bytes >= 0


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_other_precisions_take_their_kernels(kind: str, checked_operators: set[str]) -> None:
    rehearse("llama", Layout(), kind=kind)
    assert list_attention(checked_operators) == {"efficient" if kind == "fp32" else "flash"}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_takes_the_same_kernels(recompute: str, checked_operators: set[str]) -> None:
    rehearse("llama", Layout(dp_shard=2, zero_stage=3), recompute=recompute)
    assert list_attention(checked_operators) == {"flash"}


@pytest.mark.parametrize("cp_method", ["ring", "all_gather", "ulysses", None])
def test_packed_documents_are_masked(cp_method: Any, checked_operators: set[str]) -> None:
    layout = Layout() if cp_method is None else Layout(cp=2, cp_method=cp_method)
    packed = rehearse("llama", layout, data={"sources": ["nowhere"], "packing": "documents"})
    # The two documents of a row end where chunks of the ring end, so that no tile needs a mask.
    has_whole_rows = cp_method in ("ulysses", None)
    assert list_attention(checked_operators) == {"varlen" if has_whole_rows else "flash"}
    assert packed.peak_bytes > 0


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_documents_in_fp32_need_a_mask_without_triton(
    attention: str, checked_operators: set[str]
) -> None:
    packing = {"sources": ["nowhere"], "packing": "documents"}
    model = make_recipe("llama").model.model_dump() | {"attention": attention}
    rehearse("llama", Layout(), kind="fp32", data=packing, model=model)
    assert list_attention(checked_operators) == {"efficient"}


KERNELS = {
    ("gemma2", "none"): set(),  # flex alone, whose tensors have no operator
    ("gpt_oss", "documents"): set(),
}


@pytest.mark.parametrize(("family", "packing"), KERNELS)
def test_the_planner_counts_the_bytes_of_the_kernel(
    family: str, packing: str, monkeypatch: pytest.MonkeyPatch, checked_operators: set[str]
) -> None:
    """Attention of 512 tokens: explicit scores would be most of the bytes of a step."""
    monkeypatch.setattr(fused_attention, "_find_missing_flex", lambda _: None)
    config = {"model_type": family, **FAMILIES[family], "max_position_embeddings": 512}
    training = {"sequence_length": 512, "micro_batch_size": 2, "learning_rate": 1e-3}
    predicted = []
    rehearsed = []
    for attention in ("auto", "explicit"):
        recipe = make_recipe(
            family,
            model={"config": config, "loss_chunk_tokens": 64, "attention": attention},
            data={"sources": ["nowhere"], "packing": packing},
            training=training | {"max_steps": 1},
            precision={"kind": "bf16"},
        )
        shape = read_recipe_shape(recipe)
        plan = build_plan(shape, Layout(), BatchPlan(512, 2, 2, 1), recipe.precision, "none")
        rehearsed.append(rehearse_rank(recipe, plan, 0, "cuda").peak_bytes)
        if attention == "auto":
            assert list_attention(checked_operators) == KERNELS[family, packing]
        facts = ModelFacts(shape)
        candidate = replace(
            build_template(recipe), micro_batch_size=2, gradient_accumulation_steps=2
        )
        load = get_pipeline(facts, Layout(), 2, 512).build_rank_load(0)
        predicted.append(predict_memory(facts, candidate, load, NO_OVERHEAD).live)
    assert predicted[0] == pytest.approx(rehearsed[0], rel=0.1)
    assert rehearsed[1] - rehearsed[0] == pytest.approx(predicted[1] - predicted[0], rel=0.2)


def test_adapters_of_a_quantised_base_take_a_step() -> None:
    assert rehearse("llama", Layout(), adapters={"rank": 4, "quantize": "nf4"}).peak_bytes > 0


def test_the_public_function_rehearses_on_cuda_by_default() -> None:
    recipe = make_recipe("llama", precision="bf16", layout={"pp": 2, "dp_shard": 1}).model_dump(
        mode="json"
    )
    rehearsal = sw.rehearse(recipe, 2)  # two roles, in processes of their own
    assert rehearsal.device == "cuda"
    assert rehearsal.disagreement is None
    assert not any("--device cuda" in line for line in rehearsal.assumptions)
    assert sw.rehearse(recipe, 2, device="cpu").device == "cpu"
