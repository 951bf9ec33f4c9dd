"""Two tables of docs/low-precision.md: what does not compose, and torchtitan's recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shardwright.architecture import ModelShape, read_config, read_recipe_shape
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import FP8Section, LowPrecisionSection, NVFP4Section
from shardwright.config.model import ModelSection
from shardwright.config.recipe_loading import load_recipe
from shardwright.config.training import PrecisionSection
from shardwright.convert.conversion import emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.doctor.rates.cluster_profile import build_request
from shardwright.errors import ShardwrightError
from shardwright.layout import Layout
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.placement import select_scaled_weights
from shardwright.planner.recompute.choice import check_choosable
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.checks.async_tensor_parallel import resolve_async_tensor_parallel
from tests.multiprocess.models import DEEPSEEK
from tests.multiprocess.scaled_operands import DENSE, SPARSE
from tests.unit.model.hf_models import HF_CONFIGS
from tests.unit.test_low_precision_rules import PADDED, build_recipe, plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/low-precision.md").read_text()
FP8 = PrecisionSection(kind="fp8")


def read_rows(heading: str) -> list[list[str]]:
    """Read the cells of the first table below a heading of the page, without its header."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def plan_packed_blocks() -> None:
    adapted = add_adapters(
        read_config(DENSE | {"hidden_size": 256}), AdapterSection(rank=4, quantize="nf4")
    )
    precision = PrecisionSection.of_low_precision(FP8Section(recipe="mxfp8"))
    build_plan(adapted, Layout(tp=2), BatchPlan(128, 1, 1, 1), precision)


def plan_class_of_transformers() -> None:
    config = HF_CONFIGS["opt"]
    shape = read_model_shape(config, ModelSection(config=config, dropout="off"))
    build_plan(shape, Layout(), BatchPlan(16, 1, 1, 1), FP8)


def overlap_products() -> None:
    layout = Layout(tp=2, async_tensor_parallel="chunked")
    resolve_async_tensor_parallel(build_recipe(precision="fp8"), plan(DENSE, layout))


def convert_recipe() -> None:
    request = EmitRequest(
        build_recipe(precision="fp8"), Layout(), BatchPlan(32, 1, 1, 1), "none", 1
    )
    emit("torchtitan", request)


SHARDED = Layout(dp_shard=2, zero_stage=3)
REFUSALS: dict[str, Callable[[], object]] = {
    "`recompute: auto` or a budget": lambda: check_choosable(read_config(DENSE), "fp8"),
    "`layout.async_tensor_parallel: chunked` or `fused`": overlap_products,
    "`layout.expert_dispatch: padded` with quantised experts": partial(plan, SPARSE, PADDED),
    "`tensorwise` or `rowwise` with data or context parallelism": partial(
        plan, DENSE, SHARDED, recipe="rowwise"
    ),
    "`tensorwise` with quantised experts": partial(plan, SPARSE, Layout(), recipe="tensorwise"),
    "more tensor ranks than key-value heads": partial(plan, DENSE, Layout(tp=4)),
    "latent attention under `tp`": partial(plan, DEEPSEEK, Layout(tp=2), 32),
    "`mxfp8` or `blockwise` with rows that are not whole blocks": partial(
        plan, DENSE, Layout(), 100, recipe="mxfp8"
    ),
    "weights that are not whole blocks of the recipe": partial(
        plan, DENSE, Layout(), recipe="blockwise"
    ),
    "`mxfp8`, `blockwise` or `nvfp4` over a 4-bit base (QLoRA) under `tp`": plan_packed_blocks,
    "models that run through transformers' own class": plan_class_of_transformers,
    "`plan --emit`": convert_recipe,
    "`doctor --calibrate`": lambda: build_request(
        build_recipe(precision="fp8"), Layout(), device="cpu", should_calibrate=True
    ),
}
"""First cell of each row of the table, and what is refused there."""


def test_the_page_lists_all_refusals() -> None:
    assert [row[0] for row in read_rows("What does not compose")] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_of_the_page(name: str) -> None:
    with pytest.raises(ShardwrightError):
        REFUSALS[name]()


def test_async_tensor_parallelism_is_off_by_itself() -> None:
    layout = Layout(tp=2, async_tensor_parallel="auto")
    resolved = resolve_async_tensor_parallel(build_recipe(precision="fp8"), plan(DENSE, layout))
    assert resolved.layout.async_tensor_parallel == "none"


TITAN_PARTS = [
    ("self_attn.q_proj", "attention.qkv_linear.wq"),
    ("self_attn.k_proj", "attention.qkv_linear.wk"),
    ("self_attn.v_proj", "attention.qkv_linear.wv"),
    ("self_attn.q_a_proj", "attention.wq_a"),
    ("self_attn.q_b_proj", "attention.wq_b"),
    ("self_attn.kv_a_proj_with_mqa", "attention.wkv_a"),
    ("self_attn.kv_b_proj", "attention.wkv_b"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.shared_experts.", "moe.shared_experts."),
    ("mlp.experts.", "moe.routed_experts.inner_experts."),
    ("mlp.gate.", "moe.router.gate."),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
    ("model.", ""),
]
"""Parts of our names and of torchtitan's, in the order of replacement (its
`models/*/state_dict_adapter.py`, commit b5bcd76c)."""
NOT_LINEAR = ("embed_tokens", "norm", "bias")
"""Parts of names of parameters that no `nn.Linear` has."""


def name_as_torchtitan(name: str) -> str:
    for own, other in TITAN_PARTS:
        name = name.replace(own, other)
    return name


def list_linear_weights(shape: ModelShape) -> dict[str, str]:
    """List the weights of torchtitan's linear layers and grouped experts by our names."""
    return {
        spec.name: name_as_torchtitan(spec.name)
        for spec in shape.list_parameters()
        if not any(part in spec.name for part in NOT_LINEAR)
    }


def filter_out(*filter_fqns: str) -> Callable[[str], bool]:
    """torchtitan's `module_filter_fn`: names that contain a part are not converted."""
    return lambda fqn: not any(part in fqn for part in filter_fqns)


def convert_first_layers(num_layers: int, fraction: float) -> Callable[[str], bool]:
    """torchtitan's `nvfp4_bf16_tail_fqns`."""
    fqns = [f"layers.{layer}." for layer in range(num_layers - math.ceil(num_layers * fraction))]
    return lambda fqn: any(part in fqn for part in fqns)


LAST_FIVE = ("model.layers.2[789].*", "model.layers.3[01].*")
TITAN_CASES: dict[str, tuple[str, Callable[[str], bool], LowPrecisionSection]] = {
    "llama3_405b": ("llama3-405b", filter_out("lm_head"), FP8Section(recipe="rowwise")),
    "deepseek_v3_671b_float8": (
        "deepseek-v3",
        filter_out("lm_head", "router.gate"),
        FP8Section(recipe="rowwise"),
    ),
    "mxfp8.md, Llama4 Scout": (
        "llama3-8b",
        filter_out("lm_head", "router.gate", "attention.qkv_linear.wk", "attention.qkv_linear.wv"),
        FP8Section(recipe="mxfp8", exclude=("*.k_proj.weight", "*.v_proj.weight")),
    ),
    "llama3_8b_first_85_pct_layers_nvfp4": (
        "llama3-8b",
        convert_first_layers(32, 0.15),
        NVFP4Section(experimental=True, exclude=LAST_FIVE),
    ),
}
"""torchtitan's configuration: our recipe, its filter, our section."""


@pytest.mark.parametrize("name", TITAN_CASES)
def test_targets_and_exclusions_select_torchtitans_layers(name: str) -> None:
    file, is_converted, section = TITAN_CASES[name]
    shape = read_recipe_shape(load_recipe(ROOT / "recipes" / f"{file}.yaml"))
    linear = list_linear_weights(shape)
    assert set(select_scaled_weights(shape, section)) == {
        own for own, other in linear.items() if is_converted(other)
    }


def test_the_page_states_the_exclusions_of_each_torchtitan_recipe() -> None:
    rows = {row[0].strip("`"): row for row in read_rows("Recipes of torchtitan")}
    assert set(rows) >= set(TITAN_CASES)
    for name, (_, _, section) in TITAN_CASES.items():
        patterns = re.findall(r'"([^"]+)"', rows[name][2])
        assert tuple(patterns) == section.exclude
        assert section.recipe in rows[name][2]
