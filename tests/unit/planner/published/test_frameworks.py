"""Conventions of other frameworks: their names, their memory, and published figures that no fit
uses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.predictor import predict_rank_memory
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.framework_names import find_framework_name
from shardwright.planner.published.frameworks import FRAMEWORK_DEFAULTS
from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
)
from shardwright.planner.published.predictions import (
    compute_reported_memory_bytes,
    list_row_candidates,
    predict_published_run,
)
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.memory_traffic import count_adapter_bytes
from shardwright.units import GIB_BYTES
from tests.unit.planner import models

NO_OVERHEAD = Efficiency(
    reserve_share=0.0, reserve_bytes=0.0, context_bytes=0.0, communicator_bytes=0.0
)


def read_case(**row: object) -> PublishedRun:
    defaults = {
        "model_name": "Llama-3-8B",
        "gpu": "H100-80GB-SXM",
        "gpus": 8,
        "seq_len": 4096,
        "micro_batch": 1,
        "precision": "bf16",
    }
    return read_published_run(
        "a row",
        extract_configuration({name: str(value) for name, value in (defaults | row).items()}),
    )


def predict_parts(
    conventions: FrameworkConventions,
    layout: Layout | None = None,
    *,
    efficiency: Efficiency = NO_OVERHEAD,
    **candidate: object,
) -> MemoryParts:
    facts = ModelFacts(models.read_shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    return predict_memory(
        facts,
        Candidate(layout or Layout(), 64, engine=conventions, **candidate),
        load,
        efficiency,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("torchtune README", "torchtune"),
        ("FSDP2, torchtitan", "torchtitan"),
        ("LLaMA-Factory", "llama-factory"),
        ("InternEvo", "internevo"),
        ("axolotl examples/llama-3", "axolotl"),
        ("unsloth notebook", "unsloth"),
        ("TRL SFTTrainer", "huggingface"),
        ("Hugging Face PEFT", "huggingface"),
        ("HF Trainer with DeepSpeed", "deepspeed"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("GPT-NeoX", "gpt-neox"),
        ("lit-gpt tutorials", "litgpt"),
        ("controls", None),
    ],
)
def test_names_of_frameworks_are_recognised(name: str, framework: str | None) -> None:
    assert find_framework_name(name) == framework
    assert framework is None or framework in FRAMEWORK_DEFAULTS


def test_bytes_of_a_parameter_in_half_precision_and_under_autocast() -> None:
    num = ModelFacts(models.read_shape("llama")).num_parameters
    torchtune, llama_factory = (
        predict_parts(FRAMEWORK_DEFAULTS[name].conventions, gradient_accumulation_steps=2)
        for name in ("torchtune", "llama-factory")
    )
    assert (torchtune.weights, torchtune.gradients, torchtune.optimizer) == (
        2 * num,
        2 * num,
        4 * num,
    )
    assert (llama_factory.weights, llama_factory.gradients, llama_factory.optimizer) == (
        4 * num,
        4 * num,
        8 * num,
    )
    assert llama_factory.workspaces == 4 * num  # square roots of second moments, in the update
    pure_bf16 = read_case(
        source="LLaMA-Factory", task="full", gpus=1, notes="pure_bf16"
    ).candidate.engine
    assert predict_parts(pure_bf16, gradient_accumulation_steps=2).optimizer == 4 * num


def test_performance_recipes_accumulate_in_half_precision_and_others_in_fp32() -> None:
    recipe = read_case(source="dgxc-benchmarking@v25.05", source_group="dgxc-benchmarking", tp=2)
    other = read_case(source="a blog", tp=2)
    assert recipe.framework == other.framework == "megatron-core"
    assert (
        recipe.candidate.engine.gradient_bytes,
        other.candidate.engine.gradient_bytes,
    ) == (2.0, 4.0)
    with_fp32 = read_case(
        source="BLOOM", notes="BF16_Optimizer with fp32 grad accumulation"
    ).candidate.engine
    assert with_fp32.gradient_bytes == 6.0
    sharded, replicated = (
        read_case(source="nanotron", zero_stage=stage, notes="fp32 grad accumulation").conventions
        for stage in (1, 0)
    )
    assert (sharded.gradient_bytes, sharded.reduce_bytes) == (4.0, 4.0)
    assert (replicated.gradient_bytes, replicated.reduce_bytes) == (6.0, 4.0)  # buckets of DDP
    assert (sharded.has_flat_gather, replicated.has_flat_gather) == (True, False)


@pytest.mark.parametrize(("notes", "name"), [("ZeRO-3", "deepspeed"), ("FSDP", "huggingface")])
def test_a_run_with_deepspeed_has_the_conventions_of_deepspeed(notes: str, name: str) -> None:
    engine = read_case(source="Hugging Face", notes=notes).conventions
    host_rate = FrameworkConventions().host_memory_bytes_per_second
    assert engine.host_memory_bytes_per_second > host_rate, "that of DGX H100"
    assert engine.has_device_gradient_shards == (notes == "FSDP")
    engine = replace(
        engine, host_memory_bytes_per_second=host_rate, has_device_gradient_shards=False
    )
    assert engine == FRAMEWORK_DEFAULTS[name].conventions


def test_unnamed_fine_tuning_is_that_of_hugging_face() -> None:
    adapted = read_case(task="lora")
    full = read_case(task="full")
    pretrained = read_case()
    assert (adapted.framework, full.framework, pretrained.framework) == (
        "huggingface",
        "huggingface",
        "torchtitan",
    )
    assert (adapted.candidate.layout.zero_stage, full.candidate.layout.zero_stage) == (0, 3)
    assert read_case(task="lora", zero_stage="3").candidate.layout.zero_stage == 3


def test_the_update_copies_gradients_unless_logits_leave_a_free_block() -> None:
    num = ModelFacts(models.read_shape("llama")).num_parameters
    layout = Layout(dp_shard=4, zero_stage=1)
    conventions = replace(FRAMEWORK_DEFAULTS["megatron-deepspeed"].conventions, logit_bytes=0.0)

    def predict_reserve(layout: Layout = layout, **changes: float) -> float:
        changed = replace(conventions, **changes)  # type: ignore[arg-type]
        return predict_parts(changed, layout, loss_chunk_tokens=None).reserve

    bucket = min(5e8, num)
    assert predict_reserve() == pytest.approx(6 * num / 4 + 2 * bucket)
    assert predict_reserve(reduce_bytes=4.0) == pytest.approx(6 * num / 4 + 4 * bucket)
    assert predict_reserve(reduced_elements=1e6) == pytest.approx(6 * num / 4 + 2e6)
    assert predict_reserve(Layout(dp_shard=1, zero_stage=1)) == pytest.approx(6 * num)
    assert predict_reserve(logit_bytes=1e6) == 0
    assert predict_reserve(update_copy_bytes=0.0, reduced_elements=0.0) == 0


def test_the_gather_of_weights_takes_memory_unless_logits_leave_a_block_of_its_size() -> None:
    shape = models.read_shape("llama")
    num = ModelFacts(shape).num_parameters
    conventions = read_case(**NANOTRON_ROW, tp=1, gpus=8, zero_stage=1).conventions

    def predict_reserve(layout: Layout, micro_batch: int = 1) -> float:
        parts = predict_parts(
            conventions, layout, micro_batch_size=micro_batch, loss_chunk_tokens=None
        )
        return parts.reserve

    sharded = Layout(dp_shard=4, zero_stage=1)
    assert predict_reserve(sharded) == pytest.approx(2 * num)
    assert predict_reserve(Layout(dp_shard=1, zero_stage=1)) == 0
    assert predict_reserve(Layout(dp_replicate=4)) == 0
    # The block of the fp32 logits has 4 bytes per logit, of 64 tokens per sequence.
    largest = int(2 * num / (4 * 64 * shape.vocab_size))
    assert predict_reserve(sharded, largest) == pytest.approx(2 * num)
    assert predict_reserve(sharded, largest + 1) == 0


def test_nanotrons_queries_keep_keys_and_values_unless_heads_are_grouped() -> None:
    row = NANOTRON_ROW | {"tp": 2, "pp": 2, "gpus": 8, "zero_stage": 0}
    plain, grouped = (
        read_case(**row | {"kv_heads": num_heads}).conventions for num_heads in (32, 8)
    )
    assert replace(plain, num_rotary_tensors=0.0) == grouped
    shape = models.read_shape("llama")
    more, less = (
        predict_parts(
            replace(plain, num_rotary_tensors=number), micro_batch_size=256, loss_chunk_tokens=None
        ).activations
        for number in (1.0, 0.0)
    )
    keys = shape.num_kv_heads * shape.head_dim
    per_token = shape.num_layers * (shape.query_width + keys) * 2  # bytes
    assert more - less == pytest.approx(256 * 64 * per_token)


@pytest.mark.parametrize(
    ("layout", "num_others"),
    [
        (Layout(), 0),
        (Layout(dp_shard=4, zero_stage=1), 1),  # all ranks
        (Layout(tp=2), 2),  # and those of the model copy
        (Layout(pp=2), 3),  # and the next stage
        (Layout(pp=4, tp=2, dp_shard=2, zero_stage=1), 4),  # and the stage before
    ],
)
def test_pipelines_of_deepspeed_have_communicators_of_their_own(
    layout: Layout, num_others: int
) -> None:
    conventions = FRAMEWORK_DEFAULTS["megatron-deepspeed"].conventions
    efficiency = replace(NO_OVERHEAD, communicator_bytes=1.0)
    more = predict_parts(conventions, layout, efficiency=efficiency)
    less = predict_parts(
        replace(conventions, has_pipeline_grid=False), layout, efficiency=efficiency
    )
    assert more.driver - less.driver == num_others


def test_gradient_shards_of_a_separate_stream_add_to_the_peak() -> None:
    num = ModelFacts(models.read_shape("llama")).num_parameters
    layout = Layout(dp_shard=4, zero_stage=3)
    separate = FRAMEWORK_DEFAULTS["torchtitan"].conventions
    assert separate.has_separate_gradient_stream
    more = predict_parts(separate, layout, micro_batch_size=64, loss_chunk_tokens=None)
    less = predict_parts(
        replace(separate, has_separate_gradient_stream=False),
        layout,
        micro_batch_size=64,
        loss_chunk_tokens=None,
    )
    assert more.live == less.live
    assert more.reserve - less.reserve == pytest.approx(num)  # 4 bytes over 4 ranks


NANOTRON_ROW = {
    "source_group": "nanotron-ultrascale",
    "source": "nanotron",
    "vocab": 131072,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 32,
    "ffn_hidden": 14336,
    "model_name": "nanotron-llama",
    "global_batch": 256,
}


def test_sequences_stay_unreleased_only_if_memory_suffices() -> None:
    row = NANOTRON_ROW | {"tp": 16, "gpus": 32}
    with_space = read_case(**row, micro_batch=1)
    full = read_case(**row, micro_batch=32)
    assert [
        candidate.engine.num_unreleased_sequences > 0
        for candidate in list_row_candidates(with_space)
    ] == [True, False]
    assert predict_published_run(with_space).candidate.engine.num_unreleased_sequences > 0
    assert predict_published_run(full).candidate.engine.num_unreleased_sequences == 0


@pytest.mark.parametrize(
    ("num_layers", "num_passes", "is_accumulated", "num_unreleased"),
    [
        (16, None, True, 51),
        (8, 2, True, 0),
        (6, 4, True, 26),
        (3, 8, True, 42),
        (2, 16, True, 51),
        (6, 1, True, 0),
        (16, None, False, 33),
        (28, None, False, 51),
        (10, 1, False, 21),
    ],
)
def test_sequences_of_passes_that_the_host_has_launched_early_stay_unreleased(
    num_layers: int, num_passes: float | None, num_unreleased: int, *, is_accumulated: bool
) -> None:
    conventions = read_case(**NANOTRON_ROW, gpus=128, tp=8, pp=4).conventions
    num_bytes = conventions.compute_sequence_buffer_bytes(
        2.0, num_layers=num_layers, num_passes=num_passes, is_accumulated=is_accumulated
    )
    assert num_bytes == 2.0 * (num_unreleased + 2)  # two persistent buffers


@pytest.mark.parametrize(("zero_stage", "layers"), [(0, [6, 5, 5, 0]), (1, [5, 5, 5, 1])])
def test_a_tie_gives_the_stage_one_layer_more_in_the_release_that_polled(
    zero_stage: int, layers: list[int]
) -> None:
    sizes = {"layers": 16, "hidden": 2048, "ffn_hidden": 8192}  # the head costs four layers
    row = NANOTRON_ROW | sizes | {"gpus": 32, "pp": 4, "zero_stage": zero_stage}
    run = read_case(**row)
    layout = run.candidate.layout
    stages = run.conventions.partition_layers(ModelFacts(run.shape), layout, 4096)
    assert [stage.last_layer - stage.first_layer for stage in stages] == layers


@pytest.mark.parametrize(("global_batch", "num_unreleased"), [(1, 37), (2, 0)])
def test_a_single_micro_batch_leaves_the_sequences_of_its_forward_pass(
    global_batch: int, num_unreleased: int
) -> None:
    row = NANOTRON_ROW | {"gpus": 16, "tp": 8, "pp": 2, "micro_batch": 1, "seq_len": 4096}
    run = read_case(**row | {"global_batch": global_batch})
    loaded, without = (
        predict_rank_memory(get_model_facts(run.shape), candidate)[0].activations
        for candidate in list_row_candidates(run)
    )
    assert loaded - without == num_unreleased * 4096 * 4096 * 2  # 18 layers


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "micro_batch", "is_unreleased", "is_polled"),
    [
        (256, 16, 1, 1, True, False),
        (512, 16, 1, 1, False, False),
        (512, 32, 1, 1, True, False),
        (128, 8, 2, 2, True, False),
        (128, 8, 4, 2, True, False),
        (128, 32, 4, 2, False, True),
        (256, 8, 4, 1, True, False),
        (256, 8, 4, 2, False, True),
        (512, 8, 2, 1, False, True),
        (128, 8, 2, 1, True, False),
    ],
)
def test_releases_of_nanotrons_table(
    gpus: int, tp: int, pp: int, micro_batch: int, *, is_unreleased: bool, is_polled: bool
) -> None:
    conventions = read_case(
        **NANOTRON_ROW, gpus=gpus, tp=tp, pp=pp, micro_batch=micro_batch
    ).conventions
    assert (conventions.num_unreleased_sequences > 0) == is_unreleased
    assert (conventions.poll_seconds > 0) == is_polled
    assert (conventions.stage_rule == "running_sum_reached") == is_unreleased


@pytest.mark.parametrize(
    ("gpus", "pp", "zero_stage", "is_polled"),
    [
        (64, 16, 0, True),
        (64, 16, 1, False),
        (64, 32, 0, False),  # two copies
        (64, 2, 0, False),  # 32 copies
        (8, 2, 0, False),
        (256, 32, 0, False),
    ],
)
def test_nanotrons_pipelines_with_few_copies_and_zero_0_polled(
    gpus: int, pp: int, zero_stage: int, *, is_polled: bool
) -> None:
    row = NANOTRON_ROW | {"gpus": gpus, "tp": 1, "pp": pp, "zero_stage": zero_stage}
    assert (read_case(**row).conventions.poll_seconds > 0) == is_polled


def test_layers_in_bf16_save_bf16_activations() -> None:
    row = {"source": "torchtitan", "gpu": "B200", "gpus": 4, "recompute": "selective"}
    all_bf16, all_fp4 = (
        predict_published_run(read_case(**row, precision=precision)).memory.activations
        for precision in ("bf16", "nvfp4")
    )
    mixed = predict_published_run(
        read_case(**row, precision="nvfp4", notes="NVFP4 layers 0-23")
    ).memory.activations
    assert all_fp4 < all_bf16
    assert mixed == pytest.approx(0.75 * all_fp4 + 0.25 * all_bf16, rel=0.02)


def test_frozen_matrices_save_no_inputs() -> None:
    adapters = {"task": "lora", "gpus": 1, "source": "torchtune", "recompute": "none"}
    attention, all_linear = (
        read_case(**adapters, notes=f"LoRA r=8 {targets}")
        for targets in ("q_proj, v_proj", "all-linear")
    )
    assert (
        predict_published_run(attention).memory.activations
        < 0.9 * predict_published_run(all_linear).memory.activations
    )
    full = read_case(**adapters | {"task": "full"})
    assert (
        predict_published_run(all_linear).memory.activations
        < predict_published_run(full).memory.activations
    )


_QWEN_7B = {
    "model_name": "Qwen-7B",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 32,
    "ffn_hidden": 11008,
    "vocab": 151936,
}
_QWEN_2B = {
    "model_name": "Qwen-1.8B",
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "ffn_hidden": 5504,
    "vocab": 151936,
}
_LLAMA_3B = {
    "model_name": "Llama-3.2-3B",
    "layers": 28,
    "hidden": 3072,
    "heads": 24,
    "kv_heads": 8,
    "ffn_hidden": 8192,
    "vocab": 128256,
}
_PEFT = {
    "source": "Hugging Face PEFT",
    "task": "lora",
    "recompute": "full",
    "notes": "LoRA r=64",
    "global_batch": 8,
}
_TUNE = {
    "source": "torchtune",
    "mem_metric": "max_memory_allocated",
    "seq_len": 4096,
    "micro_batch": 2,
    "compile": "yes",
}


@pytest.mark.parametrize(
    ("row", "gigabytes"),
    [
        # QwenLM/Qwen README.md, "Profiling of Memory and Speed": one A100-80GB, batch 1,
        # accumulation 8, gradient checkpointing.
        *(
            ({**_QWEN_7B, **_PEFT, "seq_len": tokens}, gigabytes)
            for tokens, gigabytes in ((256, 20.1), (1024, 21.5), (4096, 29.7))
        ),
        *(
            ({**_QWEN_2B, **_PEFT, "seq_len": tokens}, gigabytes)
            for tokens, gigabytes in ((256, 6.7), (1024, 8.4), (4096, 16.2))
        ),
        (
            {
                **_QWEN_2B,
                "source": "DeepSpeed",
                "task": "full",
                "recompute": "full",
                "seq_len": 1024,
                "global_batch": 8,
            },
            43.5,
        ),
        # torchtune on an A100: full fine-tuning without and with recomputation, LoRA, QLoRA; GiB.
        ({**_LLAMA_3B, **_TUNE, "task": "full", "recompute": "none"}, 42.9 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "full", "recompute": "full"}, 24.9 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "lora", "recompute": "full"}, 8.5 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "qlora", "recompute": "full"}, 4.6 * 1.0737),
    ],
)
def test_memory_of_fine_tuning_agrees_with_published_figures(
    row: dict[str, object], gigabytes: float
) -> None:
    published = read_case(**{"gpu": "A100-80GB", "gpus": 1, "mem_metric": "nvidia-smi", **row})
    predicted = (
        compute_reported_memory_bytes(published, predict_published_run(published)) / GIB_BYTES
    )
    assert predicted == pytest.approx(gigabytes / 1.0737, rel=0.1)


def test_deepspeed_leaves_gathered_parameters_in_memory_up_to_its_limit() -> None:
    conventions = FRAMEWORK_DEFAULTS["deepspeed"].conventions
    layout = Layout(dp_shard=4, zero_stage=3)
    elements = models.read_shape("llama").num_parameters
    released, limited, all_live = (
        predict_parts(replace(conventions, max_live_elements=limit), layout).gathered
        for limit in (0.0, 0.9 * elements, 1e9)
    )
    assert released < limited < all_live
    assert limited == pytest.approx(0.9 * elements * 2)
    assert all_live == pytest.approx(elements * 2, rel=0.01)


def test_fused_adapters_move_fewer_bytes() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    (kind, *_) = facts.kinds
    moved = {}
    for name in ("huggingface", "automodel", "unsloth"):
        engine = FRAMEWORK_DEFAULTS[name].conventions
        candidate = Candidate(Layout(), 64, adapter=LowRankAdapter(8), engine=engine)
        moved[name] = count_adapter_bytes(facts, kind, candidate)
    widths_in, widths_out = (
        sum(getattr(product, width) for product in kind.matmuls)
        for width in ("num_inputs", "num_outputs")
    )
    per_token = 64 * 2  # tokens, bytes of bf16
    assert moved["huggingface"] == (
        per_token * (widths_in + 6 * widths_out),
        per_token * (5 * widths_in + 4 * widths_out),
    )
    assert moved["automodel"] == (
        per_token * (widths_in + 4 * widths_out),
        per_token * (5 * widths_in + 2 * widths_out),
    )
    assert moved["unsloth"] == (
        per_token * (widths_in + 2 * widths_out),
        per_token * (3 * widths_in + 2 * widths_out),
    )


@pytest.mark.parametrize(
    ("model", "tokens_per_second", "tolerance"),
    [("Llama-3-8B", 12473, 0.10), ("Qwen2.5-7B", 14110, 0.15)],
)
def test_adapters_on_one_gpu_are_as_fast_as_published(
    model: str, tokens_per_second: float, tolerance: float
) -> None:
    """NeMo Automodel's performance summary: H100, bf16, LoRA, rows of 4,096 tokens."""
    run = read_case(model_name=model, gpus=1, task="lora", source="NeMo Automodel")
    predicted = predict_published_run(run).tokens_per_second_per_gpu
    assert predicted == pytest.approx(tokens_per_second, rel=tolerance)


def test_megatron_recomputes_only_attention_scores_selectively() -> None:
    """Bytes per layer and token row of arXiv 2205.05198: 34 s b h + 5 a s^2 b, of which selective
    recomputation leaves the first term. Scores differ: softmax is saved in fp32 and cast.
    """
    megatron = FRAMEWORK_DEFAULTS["megatron-lm"].conventions
    activations = {
        (flash, recompute): predict_parts(
            megatron, flash_attention=flash, recompute=recompute
        ).activations
        for flash in (True, False)
        for recompute in ("none", "selective", "full")
    }
    explicit, fused = (activations[flash, "selective"] for flash in (False, True))
    assert fused == pytest.approx(activations[True, "none"])
    assert activations[False, "full"] < explicit < activations[False, "none"]
    matmuls_only = predict_parts(
        replace(megatron, should_recompute_attention_only=False),
        flash_attention=True,
        recompute="selective",
    ).activations
    assert matmuls_only < fused


@pytest.mark.parametrize("framework", ["deepspeed", "huggingface", "torchtitan", "Megatron-LM"])
def test_states_in_bf16_take_eight_bytes_with_any_trainer(framework: str) -> None:
    for note in ("bf16 optimizer states", "pure bf16", "weights and states in bf16"):
        run = read_case(gpus=1, zero_stage=0, notes=f"{framework}; {note}", recompute="full")
        parts = predict_published_run(run).memory
        total = parts.weights + parts.gradients + parts.optimizer
        assert total <= 8.01 * run.shape.num_parameters
    mixed = read_case(gpus=1, zero_stage=0, notes=f"{framework}; bf16", recompute="full")
    parts = predict_published_run(mixed).memory
    assert parts.weights + parts.optimizer > 10 * mixed.shape.num_parameters
