"""Published rows as planner candidates: columns, notes, defaults, and removed results."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from shardwright.errors import DataError, InputError
from shardwright.planner.candidate import LowRankAdapter
from shardwright.planner.published.measurements import (
    CONFIGURATION_COLUMNS,
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import (
    list_row_candidates,
    predict_least_memory,
    predict_published_run,
    predict_row,
)
from tests.unit.planner.published.rows import OUTCOMES, ROW


def test_results_and_notes_about_results_are_removed() -> None:
    plain = extract_configuration(ROW)
    notes = ROW["notes"]
    for note in (
        "OOM; ",
        "CRASHED/OOM (source does not separate OOM from other crash or timeout); ",
        "aggregate 4.4 PFLOP/s; ",
    ):
        with_notes = extract_configuration(
            ROW
            | OUTCOMES
            | {"id": "oom-0001", "notes": note + notes + "; 12.3 min per 1k iterations"}
        )
        assert with_notes == plain
    assert not any("OOM" in value or "PFLOP" in value for value in plain.values())
    assert set(OUTCOMES).isdisjoint(CONFIGURATION_COLUMNS)


def test_a_row_becomes_layout_batch_cluster_and_framework() -> None:
    case = read_published_run("x", extract_configuration(ROW))
    layout = case.candidate.layout
    candidate = case.candidate
    assert (layout.tp, layout.pp, layout.dp_shard, layout.zero_stage, layout.world_size) == (
        2,
        4,
        8,
        1,
        64,
    )
    assert (
        candidate.micro_batch_size,
        candidate.gradient_accumulation_steps,
        candidate.global_batch_size,
    ) == (2, 32, 512)
    assert not layout.sequence_parallel
    assert case.cluster.name == "8 x 8xA100-80GB-SXM over ib200"
    assert case.features == (
        "megatron-core on Ampere",
        "megatron-core on A100-80GB-SXM",
        "flash_attention2 + RMS kernel",
    )
    assert case.framework == "megatron-core", (
        "a partitioned model without a named framework is assumed to be Megatron's"
    )
    assert case.is_micro_batch_stated


def test_only_transformer_engine_has_attention_written_for_hopper() -> None:
    features = {
        name: read_published_run(
            "x", extract_configuration(ROW | {"gpu": "H100-80GB-SXM", "source": name, "notes": ""})
        ).features
        for name in ("NeMo", "nanotron", "torchtitan")
    }
    assert "Ampere attention on Hopper" not in features["NeMo"]
    assert features["nanotron"][0] == features["torchtitan"][0] == "Ampere attention on Hopper"


def test_missing_values_are_those_of_the_framework_or_left_to_the_planner() -> None:
    case = read_published_run(
        "x",
        extract_configuration(
            ROW | {"recompute": "unknown", "micro_batch": "", "zero_stage": "unknown"}
        ),
    )
    assert not case.is_micro_batch_stated
    assert case.candidate.recompute == "none"
    with_deepspeed = ROW | {"recompute": "", "notes": "Megatron+DeepSpeed 3D"}
    assert (
        read_published_run("x", extract_configuration(with_deepspeed)).candidate.recompute == "full"
    )
    assert case.candidate.layout.zero_stage == 1, "Megatron's distributed optimizer"
    assert case.candidate.global_batch_size == 512


@pytest.mark.parametrize(
    ("note", "link"),
    [
        ("EFA inter-node", "efa-p5"),
        ("Jean-Zay A100 8/node 4xOmni-Path 100Gbps", "4xopa100"),
        ("NDm A100 v4, 8x200Gbps IB/node", "8xib200"),
        ("FSDP mixed_precision=DEFAULT; A100 interconnect 1600Gbps RoCE/node", "8xroce200"),
        (
            "FSDP mixed_precision=DEFAULT; A100 interconnect 1600Gbps RoCE/node n/a (H100 table)",
            "ib200",
        ),
        ("nothing of it", "ib200"),
    ],
)
def test_notes_name_the_network_between_nodes(note: str, link: str) -> None:
    cluster = read_published_run("x", extract_configuration(ROW | {"notes": note})).cluster
    assert cluster.inter is not None
    assert cluster.inter.name == link


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,model\n1,x\n")
    with pytest.raises(DataError, match="not a table of measurements"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_every_published_row_is_read() -> None:
    folder = os.environ.get("SHARDWRIGHT_PUBLISHED")
    if not folder:
        pytest.skip("SHARDWRIGHT_PUBLISHED names no folder of published measurements")
    for name in ("measurements.csv", "failures.csv"):
        path = Path(folder) / name
        with open(path, encoding="utf-8", newline="") as file:
            gpus = {row["id"]: int(row["gpus"]) for row in csv.DictReader(file)}
        for row in read_rows(path):
            case = read_published_run(row["id"], extract_configuration(row))
            assert case.candidate.layout.world_size == gpus[case.id] == case.cluster.num_gpus, (
                case.id
            )


def test_alternative_spellings_of_a_row_are_equal() -> None:
    plain = read_published_run(
        "x",
        extract_configuration(
            ROW | {"seq_len": "8192", "recompute": "full", "sequence_parallel": "yes"}
        ),
    )
    alternatives = {
        "seq_len": "8k",
        "global_batch": "4.19M tokens",
        "gpus": "64.0",
        "recompute": "True",
        "sequence_parallel": "on",
    }
    alternatives |= {
        "precision": "BF16-mixed",
        "zero_stage": "ZeRO-1",
        "gpu": "8x A100-80GB-SXM",
        "flash_attention": "fa2",
        "params_b": "13B",
    }
    assert read_published_run("x", extract_configuration(ROW | alternatives)) == plain


@pytest.mark.parametrize("column", CONFIGURATION_COLUMNS)
@pytest.mark.parametrize("text", ["", "n/a", "0", "unknown"])
def test_a_row_without_any_one_field_is_predicted(column: str, text: str) -> None:
    row = ROW | {column: text}
    if column == "gpu" and text == "0":
        with pytest.raises(InputError, match="not in the catalogue"):
            read_published_run("x", extract_configuration(row))
        return
    predicted = predict_row(read_published_run("x", extract_configuration(row)))
    assert predicted.tokens_per_second_per_gpu > 0
    assert predicted.memory_gib > 0


def test_recipes_without_virtual_stages_interleave_if_their_framework_does() -> None:
    with_framework = ROW | {"notes": "NeMo/Megatron-Core", "virtual_pp": ""}
    layout = read_published_run("x", extract_configuration(with_framework)).candidate.layout
    assert (layout.schedule, layout.virtual_stages) == ("interleaved_1f1b", 5)
    assert (
        read_published_run(
            "x", extract_configuration(with_framework | {"virtual_pp": "1"})
        ).candidate.layout.schedule
        == "1f1b"
    )
    assert (
        read_published_run("x", extract_configuration(ROW)).candidate.layout.schedule == "1f1b"
    ), "another run, with a guessed framework"


FINE_TUNING = {
    "tp": "",
    "pp": "",
    "dp": "",
    "gpus": "8",
    "zero_stage": "",
    "micro_batch": "",
    "global_batch": "",
    "recompute": "",
}


def test_notes_describe_adapters_batches_and_optimizers() -> None:
    notes = (
        "Axolotl; QLoRA r=64, q_proj, v_proj; paged_adamw_8bit; FSDP2; gradient checkpointing; "
        "mbs 2 x grad accum 4; Liger"
    )
    candidate = read_published_run(
        "x", extract_configuration(ROW | FINE_TUNING | {"task": "sft", "notes": notes})
    ).candidate
    assert candidate.adapter == LowRankAdapter(rank=64, roles=("query", "value"), quantised=True)
    assert (candidate.optimizer, candidate.recompute, candidate.loss_chunk_tokens) == (
        "adamw_8bit",
        "full",
        1024,
    )
    assert (
        candidate.micro_batch_size,
        candidate.gradient_accumulation_steps,
        candidate.global_batch_size,
    ) == (2, 4, 64)
    assert (candidate.layout.zero_stage, candidate.layout.tp, candidate.layout.pp) == (3, 1, 1)
    quantised = read_published_run(
        "x",
        extract_configuration(
            ROW | FINE_TUNING | {"task": "lora", "precision": "nf4", "notes": ""}
        ),
    ).candidate
    assert quantised.adapter == LowRankAdapter(rank=16, quantised=True)


def test_columns_have_precedence_over_notes() -> None:
    notes = "gradient checkpointing; mbs 4; ZeRO-3; no flash attention"
    candidate = read_published_run("x", extract_configuration(ROW | {"notes": notes})).candidate
    assert (candidate.recompute, candidate.micro_batch_size, candidate.layout.zero_stage) == (
        "none",
        2,
        1,
    )
    assert candidate.flash_attention
    blank_columns = dict.fromkeys(("recompute", "micro_batch", "zero_stage", "flash_attention"), "")
    with_notes = read_published_run(
        "x", extract_configuration(ROW | blank_columns | {"notes": notes})
    ).candidate
    assert (with_notes.recompute, with_notes.micro_batch_size, with_notes.flash_attention) == (
        "full",
        4,
        False,
    )


def test_negated_notes_are_not_read_as_features() -> None:
    notes = (
        "full fine-tuning, not LoRA; no activation checkpointing; no CPU offload; "
        "activation ckpt not stated"
    )
    candidate = read_published_run(
        "x", extract_configuration(ROW | FINE_TUNING | {"task": "sft", "notes": notes})
    ).candidate
    assert (candidate.adapter, candidate.recompute, candidate.offload) == (None, "none", "none")


def test_notes_describe_offloading_to_the_host_and_a_loss_in_tiles() -> None:
    row = ROW | FINE_TUNING | {"task": "sft", "gpus": "8"}
    resident, offloaded = (
        read_published_run("x", extract_configuration(row | {"notes": f"DeepSpeed ZeRO-3{notes}"}))
        for notes in ("", "; optimizer offload; activation checkpoint offload; tiled loss")
    )
    candidate = offloaded.candidate
    assert (candidate.offload, candidate.activation_offload, candidate.loss_chunk_tokens) == (
        "optimizer",
        "host",
        1024,
    )
    seconds = [predict_published_run(run).time.optimizer for run in (resident, offloaded)]
    # 48 bytes of each of 13 billion parameters at 47% of 410 GB/s, and copies of fp32 gradients and
    # weights of an eighth of them at 25 GB/s.
    assert seconds[1] == pytest.approx(13.0 * (48 / (0.47 * 410) + 8 / 8 / 25), rel=0.02)
    assert seconds[0] < 0.1


def test_hybrid_sharding_stays_within_a_node() -> None:
    row = ROW | FINE_TUNING | {"gpus": "32", "zero_stage": "HYBRID_SHARD"}
    layout = read_published_run("x", extract_configuration(row)).candidate.layout
    assert (layout.zero_stage, layout.dp_shard, layout.dp_replicate) == (3, 8, 4)


def test_preference_runs_have_a_reference_and_rollouts_are_refused() -> None:
    assert (
        read_published_run("x", extract_configuration(ROW | {"task": "DPO"})).candidate.reference
        == "frozen"
    )
    with_adapter = read_published_run(
        "x", extract_configuration(ROW | {"task": "DPO", "notes": "LoRA r=8"})
    ).candidate
    assert (with_adapter.reference, with_adapter.adapter) == ("adapter_off", LowRankAdapter(rank=8))
    with pytest.raises(InputError, match="generate text"):
        read_published_run("x", extract_configuration(ROW | {"task": "GRPO"}))


def test_a_stage_without_layers_has_no_quantised_weights() -> None:
    row = ROW | {
        "tp": "2",
        "pp": "32",
        "dp": "1",
        "layers": "28",
        "task": "qlora",
        "notes": "nanotron",
    }
    assert predict_row(read_published_run("x", extract_configuration(row))).memory_gib > 0


def test_a_row_that_fits_uses_at_most_the_memory_of_the_device() -> None:
    large_row = ROW | {
        "tp": "8",
        "pp": "1",
        "recompute": "unknown",
        "micro_batch": "8",
        "notes": "NeMo/Megatron-Core",
        "seq_len": "8192",
    }
    run = read_published_run("x", extract_configuration(large_row))
    row = predict_row(run)
    assert row.fits, "recomputation makes it fit"
    assert row.memory_gib <= 79.2
    stated = read_published_run("x", extract_configuration(large_row | {"recompute": "none"}))
    least = predict_least_memory(run)
    without = predict_least_memory(stated)
    assert least.fits
    assert least.time == without.time == predict_published_run(stated).time
    assert without.memory == predict_published_run(stated).memory
    assert least.memory.activations < without.memory.activations / 2


def test_the_version_of_a_benchmark_suite_is_the_release() -> None:
    row = ROW | {
        "source_group": "dgxc-benchmarking",
        "source": "NVIDIA/dgxc-benchmarking@v25.05.02 deepseek/README.md",
    }
    assert extract_configuration(row)["notes.release"] == "25.05"


def test_degrees_are_read_from_notes_if_columns_are_empty() -> None:
    row = ROW | {"tp": "", "pp": "", "gpus": "64", "notes": "TP8 PP4, ETP=1"}
    layout = read_published_run("x", extract_configuration(row)).candidate.layout
    assert (layout.tp, layout.pp) == (8, 4)
    assert (
        read_published_run("x", extract_configuration(row | {"tp": "2"})).candidate.layout.tp == 2
    ), "a column has precedence over a note"


def test_megatron_and_deepspeed_together_are_megatron_deepspeed() -> None:
    assert (
        read_published_run(
            "x", extract_configuration(ROW | {"notes": "Megatron+DeepSpeed 3D"})
        ).framework
        == "megatron-deepspeed"
    )


def test_a_pipeline_with_a_large_bubble_is_assumed_to_interleave() -> None:
    row = ROW | {
        "layers": "38",
        "pp": "4",
        "tp": "1",
        "dp": "16",
        "gpus": "64",
        "micro_batch": "1",
        "virtual_pp": "",
    }
    short, long = (
        read_published_run(
            "x", extract_configuration(row | {"global_batch": str(16 * steps)})
        ).candidate.layout
        for steps in (8, 64)
    )
    assert (short.schedule, short.virtual_stages) == ("interleaved_1f1b", 5), (
        "38 layers, one fewer in the first and the last stage"
    )
    assert long.schedule == "1f1b"


def test_a_row_without_a_batch_allows_every_micro_batch() -> None:
    row = ROW | {
        "micro_batch": "",
        "global_batch": "",
        "pp": "1",
        "tp": "1",
        "dp": "",
        "gpus": "1",
        "virtual_pp": "",
    }
    assert sorted(
        candidate.micro_batch_size
        for candidate in list_row_candidates(read_published_run("x", extract_configuration(row)))
    ) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("source", "adapts_feed_forward"),
    [("dgxc-benchmarking", False), ("NeMo Automodel docs", True), ("a paper", True)],
)
def test_nvidias_recipes_adapt_only_queries_keys_and_values(
    source: str, adapts_feed_forward: bool
) -> None:
    raw = ROW | {"source": source, "source_group": "", "notes": "", "task": "lora"}
    adapter = read_published_run("row", extract_configuration(raw)).candidate.adapter
    assert adapter is not None
    assert "query" in adapter.roles
    assert ("gate" in adapter.roles) == adapts_feed_forward
