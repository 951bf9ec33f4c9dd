"""Shapes of models from their names and the columns of a row."""

from __future__ import annotations

import re

import pytest

from shardwright.errors import InputError
from shardwright.planner.published.model_catalogue import load_named_sizes
from shardwright.planner.published.named_models import build_row_shape
from tests.unit.planner.published.rows import ROW


@pytest.mark.parametrize(
    ("name", "sizes", "billions"),
    [
        ("MPT-7b", "32 4096 32 32 16384 50368", 6.66),
        ("GPT-145.6B", "80 12288 96 96 49152 51200", 145.6),
        ("Llama-3-70B", "80 8192 64 8 28672 128256", 70.55),
        ("Nemotron-4-340B", "96 18432 96 8 73728 256000", 341.0),
        ("GPT-462B", "112 18432 144 144 73728 131072", 462.0),
        ("DeepSeek-V3", "", 671.0),
        ("Qwen3-235B-A22B", "", 235.1),
        ("GPT-OSS-120B", "", 116.8),
        ("Llama-4-Maverick-400B", "", 400.7),
    ],
)
def test_shapes_have_the_number_of_parameters_of_their_models(
    name: str, sizes: str, billions: float
) -> None:
    columns = dict(
        zip(
            ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"),
            sizes.split(),
            strict=False,
        )
    )
    blank = dict.fromkeys(ROW, "")
    shape = build_row_shape(
        blank | columns | {"model_name": name, "params_b": str(billions), "seq_len": "2048"}
    )
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.006)


def _make_name(pattern: str) -> str:
    """Return a name that matches a pattern: its first alternative without optional parts."""
    note = re.sub(r"\([^()]*\)\?", "", pattern)
    note = re.sub(r"\(([^()|]*)[^()]*\)", r"\1", note).split("|")[0]
    return re.sub(
        r"\w\?", "", re.sub(r"\[(.)[^]]*\]", r"\1", note).replace(" ?", "-").replace("\\d", "1")
    ).replace("\\", "")


@pytest.mark.parametrize("pattern", load_named_sizes())
def test_named_models_have_their_published_number_of_parameters(pattern: str) -> None:
    shape = build_row_shape(
        dict.fromkeys(ROW, "") | {"model_name": _make_name(pattern), "seq_len": "2048"}
    )
    assert shape.num_parameters / 1e9 == pytest.approx(
        load_named_sizes()[pattern]["billions"], rel=0.007
    )


@pytest.mark.parametrize(
    ("name", "stated", "billions"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", {}, 8.03),
        ("Llama 3", {"params_b": "70"}, 70.55),
        ("DeepSeek-R1-Distill-Qwen-32B", {}, 32.76),
        ("DeepSeek-V2-Lite (16B)", {}, 15.71),
        ("deepseek-ai/DeepSeek-V3", {"layers": "4"}, 15.2),
        ("Llama-3-8B, 16 layers", {"layers": "16"}, 4.54),
        ("GPT-3 6.7B", {}, 6.71),
        ("Llama-2-7B (narrow)", {"hidden": "2048", "layers": "32"}, 1.955),
        ("bigscience/bloom-7b1", {}, 7.07),
        ("Mistral-7B", {"vocab": "32768"}, 7.25),
    ],
)
def test_a_name_fills_in_missing_columns_and_never_overrides_others(
    name: str, stated: dict[str, str], billions: float
) -> None:
    shape = build_row_shape(
        dict.fromkeys(ROW, "") | {"model_name": name, "seq_len": "2048"} | stated
    )
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"), [(4096, 32, 128), (14400, 120, 120), (509, 1, 509)]
)
def test_unstated_heads_divide_the_width(hidden: int, heads: int, head_dim: int) -> None:
    sizes = {"model_name": "GPT", "layers": "8", "hidden": str(hidden), "vocab": "51200"}
    shape = build_row_shape(dict.fromkeys(ROW, "") | {"seq_len": "2048"} | sizes)
    assert (shape.num_heads, shape.head_dim) == (heads, head_dim)


def test_an_unknown_model_is_refused() -> None:
    blank = dict.fromkeys(ROW, "")
    with pytest.raises(InputError, match="gives its size"):
        build_row_shape(blank | {"model_name": "Mystery"})
    with pytest.raises(InputError, match="too many layers"):
        build_row_shape(blank | {"model_name": "Mystery-7B", "hidden": "128"})
