"""Published rows in the planner's terms: what is read, what is blanked, and what is taken where a
row is silent.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest

from shardwright.errors import DataError, InputError
from shardwright.planner.candidate import LowRankAdapter
from shardwright.planner.published.measurements import (
    CONFIGURATION_COLUMNS,
    extract_configuration,
    read_published_run,
    read_published_runs,
    read_rows,
)
from shardwright.planner.published.model_catalogue import load_named_sizes
from shardwright.planner.published.named_models import build_row_shape
from shardwright.planner.published.predictions import list_candidates, predict_row

ROW = {
    "id": "some-0001",
    "source_group": "some-source",
    "source": "a table",
    "model_name": "LLaMA-13B-arch",
    "params_b": "13.0",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "kv_heads": "40",
    "ffn_hidden": "13824",
    "vocab": "32000",
    "seq_len": "2048",
    "num_experts": "",
    "top_k": "",
    "gpu": "A100-80GB-SXM",
    "gpus": "64",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "4",
    "cp": "1",
    "ep": "",
    "dp": "8",
    "virtual_pp": "",
    "zero_stage": "1",
    "micro_batch": "2",
    "global_batch": "512",
    "recompute": "none",
    "sequence_parallel": "no",
    "precision": "bf16",
    "flash_attention": "yes",
    "compile": "",
    "notes": "kernel=flash_attention2 + RMS kernel; grad_accum=32",
    "task": "pretrain",
    "mem_metric": "",
}

OUTCOMES = {
    "tokens_per_sec_per_gpu": "3210",
    "model_tflops_per_gpu": "199",
    "utilisation_as_reported": "MFU 63%",
    "step_time_s": "12.5",
    "peak_memory_gib_per_gpu": "77.7",
    "hw_tflops_per_gpu": "250",
    "flops_convention": "model",
    "derived_tokens_per_sec_per_gpu": "3210",
    "verification": "read twice",
}


def test_results_and_words_that_tell_the_outcome_never_get_past_the_door() -> None:
    plain = extract_configuration(ROW)
    notes = ROW["notes"]
    for words in (
        "OOM; ",
        "CRASHED/OOM (source does not separate OOM from other crash or timeout); ",
        "aggregate 4.4 PFLOP/s; ",
    ):
        told = extract_configuration(
            ROW
            | OUTCOMES
            | {"id": "oom-0001", "notes": words + notes + "; 12.3 min per 1k iterations"}
        )
        assert told == plain
    assert not any("OOM" in value or "PFLOP" in value for value in plain.values())
    assert set(OUTCOMES).isdisjoint(CONFIGURATION_COLUMNS)


def test_a_row_becomes_layout_batch_cluster_and_trainer() -> None:
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
        "a cut model whose trainer is not named is taken as Megatron's"
    )
    assert case.is_micro_batch_stated


def test_what_is_not_stated_follows_the_trainers_habits_or_is_left_to_the_planner() -> None:
    case = read_published_run(
        "x",
        extract_configuration(
            ROW | {"recompute": "unknown", "micro_batch": "", "zero_stage": "unknown"}
        ),
    )
    assert not case.is_micro_batch_stated
    assert case.candidate.recompute == "none"
    old = ROW | {"recompute": "", "notes": "Megatron+DeepSpeed 3D"}
    assert read_published_run("x", extract_configuration(old)).candidate.recompute == "full"
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
def test_the_network_between_nodes(note: str, link: str) -> None:
    cluster = read_published_run("x", extract_configuration(ROW | {"notes": note})).cluster
    assert cluster.inter is not None
    assert cluster.inter.name == link


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
def test_shapes_have_as_many_parameters_as_their_models(
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


def _spoken(pattern: str) -> str:
    """A name that a pattern of `load_named_sizes.yaml` means: its first alternative without what
    may be left out.
    """
    words = re.sub(r"\([^()]*\)\?", "", pattern)
    words = re.sub(r"\(([^()|]*)[^()]*\)", r"\1", words).split("|")[0]
    return re.sub(
        r"\w\?", "", re.sub(r"\[(.)[^]]*\]", r"\1", words).replace(" ?", "-").replace("\\d", "1")
    ).replace("\\", "")


@pytest.mark.parametrize("pattern", load_named_sizes())
def test_named_models_have_as_many_parameters_as_their_makers_say(pattern: str) -> None:
    shape = build_row_shape(
        dict.fromkeys(ROW, "") | {"model_name": _spoken(pattern), "seq_len": "2048"}
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
        ("GPT-3 6.7B", {}, 6.86),
        ("Llama-2-7B (narrow)", {"hidden": "2048", "layers": "32"}, 1.955),
        ("bigscience/bloom-7b1", {}, 7.07),
        ("Mistral-7B", {"vocab": "32768"}, 7.25),
    ],
)
def test_a_name_fills_in_what_columns_leave_out_and_never_speaks_against_them(
    name: str, stated: dict[str, str], billions: float
) -> None:
    shape = build_row_shape(
        dict.fromkeys(ROW, "") | {"model_name": name, "seq_len": "2048"} | stated
    )
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_of_which_nothing_is_known_is_refused() -> None:
    blank = dict.fromkeys(ROW, "")
    with pytest.raises(InputError, match="gives its size"):
        build_row_shape(blank | {"model_name": "Mystery"})
    with pytest.raises(InputError, match="too many layers"):
        build_row_shape(blank | {"model_name": "Mystery-7B", "hidden": "128"})


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,model\n1,x\n")
    with pytest.raises(DataError, match="not a table of measurements"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_every_published_row_can_be_read() -> None:
    folder = os.environ.get("SHARDWRIGHT_PUBLISHED")
    if not folder:
        pytest.skip("SHARDWRIGHT_PUBLISHED names no folder of published measurements")
    for name in ("measurements.csv", "failures.csv"):
        path = Path(folder) / name
        with open(path, encoding="utf-8", newline="") as file:
            gpus = {row["id"]: int(row["gpus"]) for row in csv.DictReader(file)}
        for case in read_published_runs(path):
            assert case.candidate.layout.world_size == gpus[case.id] == case.cluster.num_gpus, (
                case.id
            )


def test_however_a_table_spells_it_a_row_says_the_same() -> None:
    plain = read_published_run(
        "x",
        extract_configuration(
            ROW | {"seq_len": "8192", "recompute": "full", "sequence_parallel": "yes"}
        ),
    )
    odd = {
        "seq_len": "8k",
        "global_batch": "4.19M tokens",
        "gpus": "64.0",
        "recompute": "True",
        "sequence_parallel": "on",
    }
    odd |= {
        "precision": "BF16-mixed",
        "zero_stage": "ZeRO-1",
        "gpu": "8x A100-80GB-SXM",
        "flash_attention": "fa2",
        "params_b": "13B",
    }
    assert read_published_run("x", extract_configuration(ROW | odd)) == plain


@pytest.mark.parametrize("column", CONFIGURATION_COLUMNS)
@pytest.mark.parametrize("text", ["", "n/a", "0", "unknown"])
def test_no_field_is_needed_so_much_that_a_row_without_it_breaks(column: str, text: str) -> None:
    row = ROW | {column: text}
    if column == "gpu" and text == "0":
        with pytest.raises(InputError, match="not in the catalogue"):
            read_published_run("x", extract_configuration(row))
        return
    predicted = predict_row(read_published_run("x", extract_configuration(row)))
    assert predicted.tokens_per_second_per_gpu > 0
    assert predicted.memory_gib > 0


def test_recipes_that_leave_their_stages_unsaid_are_taken_to_interleave_where_their_trainer_does() -> (
    None
):
    named = ROW | {"notes": "NeMo/Megatron-Core", "virtual_pp": ""}
    layout = read_published_run("x", extract_configuration(named)).candidate.layout
    assert (layout.schedule, layout.virtual_stages) == ("interleaved_1f1b", 5)
    assert (
        read_published_run(
            "x", extract_configuration(named | {"virtual_pp": "1"})
        ).candidate.layout.schedule
        == "1f1b"
    )
    assert (
        read_published_run("x", extract_configuration(ROW)).candidate.layout.schedule == "1f1b"
    ), "somebody's run, whose trainer is guessed"


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


def test_notes_say_how_adapters_batches_and_optimizers_are() -> None:
    notes = "Axolotl; QLoRA r=64, q_proj, v_proj; paged_adamw_8bit; FSDP2; gradient checkpointing; mbs 2 x grad accum 4; Liger"
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


def test_columns_come_before_notes() -> None:
    notes = "gradient checkpointing; mbs 4; ZeRO-3; no flash attention"
    candidate = read_published_run("x", extract_configuration(ROW | {"notes": notes})).candidate
    assert (candidate.recompute, candidate.micro_batch_size, candidate.layout.zero_stage) == (
        "none",
        2,
        1,
    )
    assert candidate.flash_attention
    silent = dict.fromkeys(("recompute", "micro_batch", "zero_stage", "flash_attention"), "")
    told = read_published_run("x", extract_configuration(ROW | silent | {"notes": notes})).candidate
    assert (told.recompute, told.micro_batch_size, told.flash_attention) == ("full", 4, False)


def test_what_notes_deny_is_not_taken_for_said() -> None:
    notes = "full fine-tuning, not LoRA; no activation checkpointing; no CPU offload; activation ckpt not stated"
    candidate = read_published_run(
        "x", extract_configuration(ROW | FINE_TUNING | {"task": "sft", "notes": notes})
    ).candidate
    assert (candidate.adapter, candidate.recompute, candidate.offload) == (None, "none", "none")


def test_hybrid_sharding_stays_within_a_node() -> None:
    row = ROW | FINE_TUNING | {"gpus": "32", "zero_stage": "HYBRID_SHARD"}
    layout = read_published_run("x", extract_configuration(row)).candidate.layout
    assert (layout.zero_stage, layout.dp_shard, layout.dp_replicate) == (3, 8, 4)


def test_preferences_are_held_to_a_reference_and_rollouts_are_not_predicted() -> None:
    assert (
        read_published_run("x", extract_configuration(ROW | {"task": "DPO"})).candidate.reference
        == "frozen"
    )
    adapted = read_published_run(
        "x", extract_configuration(ROW | {"task": "DPO", "notes": "LoRA r=8"})
    ).candidate
    assert (adapted.reference, adapted.adapter) == ("adapter_off", LowRankAdapter(rank=8))
    with pytest.raises(InputError, match="generate text"):
        read_published_run("x", extract_configuration(ROW | {"task": "GRPO"}))


def test_quantised_weights_of_a_stage_without_layers_are_none() -> None:
    row = ROW | {
        "tp": "2",
        "pp": "32",
        "dp": "1",
        "layers": "28",
        "task": "qlora",
        "notes": "nanotron",
    }
    assert predict_row(read_published_run("x", extract_configuration(row))).memory_gib > 0


def test_a_row_that_fits_takes_no_more_than_the_device_has() -> None:
    crowded = ROW | {
        "tp": "8",
        "pp": "1",
        "recompute": "unknown",
        "micro_batch": "8",
        "notes": "NeMo/Megatron-Core",
        "seq_len": "8192",
    }
    row = predict_row(read_published_run("x", extract_configuration(crowded)))
    assert row.fits, "it recomputes what it must"
    assert row.memory_gib <= 79.2


def test_a_benchmark_suite_names_its_release_by_its_version() -> None:
    row = ROW | {
        "source_group": "dgxc-benchmarking",
        "source": "NVIDIA/dgxc-benchmarking@v25.05.02 deepseek/README.md",
    }
    assert extract_configuration(row)["notes.release"] == "25.05"


def test_degrees_that_only_the_notes_tell_are_read_there() -> None:
    row = ROW | {"tp": "", "pp": "", "gpus": "64", "notes": "TP8 PP4, ETP=1"}
    layout = read_published_run("x", extract_configuration(row)).candidate.layout
    assert (layout.tp, layout.pp) == (8, 4)
    assert (
        read_published_run("x", extract_configuration(row | {"tp": "2"})).candidate.layout.tp == 2
    ), "a column is surer than a note"


def test_megatron_turing_was_trained_by_what_trained_bloom() -> None:
    assert (
        read_published_run(
            "x", extract_configuration(ROW | {"notes": "Megatron+DeepSpeed 3D"})
        ).framework
        == "megatron-deepspeed"
    )


def test_a_pipeline_that_would_wait_long_is_taken_to_interleave_whoever_ran_it() -> None:
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
        "38 layers, the first and the last stage one fewer"
    )
    assert long.schedule == "1f1b"


def test_a_row_that_says_nothing_of_its_batch_leaves_room_for_every_micro_batch() -> None:
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
        for candidate in list_candidates(read_published_run("x", extract_configuration(row)))
    ) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("source", "feed_forward"),
    [("dgxc-benchmarking", False), ("NeMo Automodel docs", True), ("a paper", True)],
)
def test_nvidias_recipes_adapt_queries_keys_and_values_alone(
    source: str, feed_forward: bool
) -> None:
    raw = ROW | {"source": source, "source_group": "", "notes": "", "task": "lora"}
    adapter = read_published_run("row", extract_configuration(raw)).candidate.adapter
    assert adapter is not None
    assert "query" in adapter.roles
    assert ("gate" in adapter.roles) == feed_forward
