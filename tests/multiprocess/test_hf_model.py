"""transformers models: gradients of one process under every layout they support; resumed,
exported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.architecture.adapter_targets import add_adapters
from shardwright.cli.main import run as shardwright
from shardwright.errors import ExitCode
from shardwright.layout import Layout
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.telemetry.event_log import read_events, select_surviving_steps
from shardwright.verification.cases import VerificationCase, choose_hf_cases
from shardwright.verification.verification import verify
from tests.multiprocess.models import build_recipe
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_resume import train_some
from tests.unit.model.hf_models import HF_CONFIGS as FOREIGN
from tests.unit.model.hf_models import SPARSE_HF_CONFIG

LAYOUTS = [
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero_stage=1),
    Layout(dp_shard=2, zero_stage=2),
    Layout(dp_shard=2, zero_stage=3),
    Layout(dp_replicate=2, dp_shard=2, zero_stage=2),
    Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
]


def assert_equals_one_process(
    ranks: RankPool,
    family: str,
    layouts: list[Layout],
    cases: list[VerificationCase],
    dtypes: list[Any],
    adapters: dict[str, Any] | None = None,
) -> None:
    configs = FOREIGN | {"qwen2_moe": SPARSE_HF_CONFIG}
    recipe = build_recipe(configs[family], model={"dropout": "off"}, adapters=adapters)
    assert recipe.model.config is not None
    shape = add_adapters(read_model_shape(recipe.model.config, recipe.model), recipe.adapters)
    report = verify(recipe, shape, layouts, cases, dtypes, sequence_length=12, pool=ranks)
    failed = [
        (str(c.layout), str(c.case), c.failure or [f for f in c.findings if not f.passed])
        for c in report.cells
        if not c.passed
    ]
    assert report.passed, failed


# Learned positions, tied; rotary positions and a head with a bias; no attention; logits scaled
# after the head; experts.
@pytest.mark.parametrize(
    ("family", "layout", "case"),
    [
        ("opt", Layout(dp_shard=2, zero_stage=3), VerificationCase(2, "full", tied=True)),
        ("opt", Layout(dp_replicate=2), VerificationCase(1, "none", tied=True)),
        ("phi", Layout(dp_shard=2, zero_stage=2), VerificationCase(2, "selective", tied=False)),
        (
            "phi",
            Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
            VerificationCase(1, "none", tied=False, documents=False),
        ),
        ("mamba", Layout(dp_shard=2, zero_stage=1), VerificationCase(2, "none", tied=True)),
        ("mamba", Layout(dp_shard=2, zero_stage=3), VerificationCase(1, "full", tied=True)),
        ("cohere", Layout(dp_shard=2, zero_stage=3), VerificationCase(1, "selective", tied=True)),
        ("qwen2_moe", Layout(dp_shard=2, zero_stage=3), VerificationCase(2, "full", tied=False)),
    ],
    ids=str,
)
def test_layouts_give_the_gradients_of_one_process(
    ranks: RankPool, family: str, layout: Layout, case: VerificationCase
) -> None:
    assert_equals_one_process(ranks, family, [layout], [case], ["float64"])


@pytest.mark.parametrize(
    ("family", "layout"),
    [("opt", Layout(dp_shard=2, zero_stage=3)), ("mamba", Layout(dp_replicate=2))],
    ids=str,
)
def test_adapters_have_the_gradients_of_one_process(
    ranks: RankPool, family: str, layout: Layout
) -> None:
    assert_equals_one_process(
        ranks,
        family,
        [layout],
        [VerificationCase(2, "full", tied=True)],
        ["float64"],
        adapters={"rank": 2},
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["opt", "phi", "mamba"])
def test_adapters_under_every_layout(ranks: RankPool, family: str) -> None:
    recipe = build_recipe(FOREIGN[family], model={"dropout": "off"})
    assert recipe.model.config is not None
    tied = read_model_shape(recipe.model.config, recipe.model).tied_embeddings
    assert_equals_one_process(
        ranks,
        family,
        LAYOUTS,
        [VerificationCase(2, "full", tied=tied)],
        ["float64"],
        adapters={"rank": 2},
    )


def choose_cases(family: str, layout: Layout, tied: bool) -> list[VerificationCase]:
    """Choose three of the 18 cases.

    Every family then has every layout and every case, and every case every layout.
    """
    offset = (sorted(FOREIGN).index(family) + LAYOUTS.index(layout)) % len(LAYOUTS)
    return choose_hf_cases(tied, is_full=True)[offset :: len(LAYOUTS)]


def test_cases_cover_pairs_of_family_layout_and_case() -> None:
    cells = [
        (family, layout, case)
        for family in FOREIGN
        for layout in LAYOUTS
        for case in choose_cases(family, layout, True)
    ]
    assert len(FOREIGN) == len(LAYOUTS) == 6
    for one, other, number in ((0, 1, 6 * 6), (0, 2, 6 * 18), (1, 2, 6 * 18)):
        assert len({(cell[one], cell[other]) for cell in cells}) == number


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", sorted(FOREIGN))
def test_every_layout_of_every_family(ranks: RankPool, family: str, layout: Layout) -> None:
    recipe = build_recipe(FOREIGN[family], model={"dropout": "off"})
    assert recipe.model.config is not None
    tied = read_model_shape(recipe.model.config, recipe.model).tied_embeddings
    assert_equals_one_process(
        ranks, family, [layout], choose_cases(family, layout, tied), ["float64"]
    )


CHAIN = [(2, "dp_shard=2,zero_stage=3"), (1, "dp_replicate=1"), (2, "dp_replicate=2")]


def test_a_run_changes_its_layout_and_is_exported(ranks: RankPool, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{a} + {b} = {a + b}\n" for a in range(30) for b in range(10)))
    config = {key: value for key, value in FOREIGN["phi"].items() if key != "vocab_size"}
    document = {
        "model": {"config": config},
        "tokenizer": {"kind": "bpe", "vocab_size": 270},
        "data": {
            "sources": str(corpus),
            "packing": "documents",
            "cache_dir": str(tmp_path / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": 4,
            "max_steps": 2 * len(CHAIN),
            "learning_rate": 1e-2,
        },
        "run": {"device": "cpu"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(document))
    ranks.run(
        1,
        train_some,
        str(recipe),
        str(tmp_path / "whole"),
        "dp_replicate=1",
        2 * len(CHAIN) + 1,
        False,
    )
    for number, (num_ranks, layout) in enumerate(CHAIN):
        ranks.run(num_ranks, train_some, str(recipe), str(tmp_path / "run"), layout, 2, number > 0)
    ours, whole = (
        select_surviving_steps(read_events(tmp_path / name)) for name in ("run", "whole")
    )
    assert len(ours) == 2 * len(CHAIN)
    for step, other in zip(ours, whole, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=2e-5), step.step
    assert ours[-1].loss < ours[0].loss - 0.1
    # The export fails unless transformers computes our logits.
    assert (
        shardwright(
            ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "fp32"]
        )
        == ExitCode.DONE
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "PhiForCausalLM"
    ]
