"""What trainers hold: by the words that name them, and against figures that others published and no
fit has seen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.memory import predict_memory
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.parameter_memory import StageLoad
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.published.frameworks import FRAMEWORK_DEFAULTS, find_framework_name
from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
)
from shardwright.planner.published.predictions import (
    compute_reported_memory_bytes,
    list_candidates,
    predict_run,
)
from shardwright.units import GIB_BYTES
from tests.unit.planner import models

NOTHING_BESIDE = Efficiency(
    reserve_share=0.0, reserve_bytes=0.0, context_bytes=0.0, communicator_bytes=0.0
)


def case(**row: object) -> PublishedRun:
    usual = {
        "model_name": "Llama-3-8B",
        "gpu": "H100-80GB-SXM",
        "gpus": 8,
        "seq_len": 4096,
        "micro_batch": 1,
        "precision": "bf16",
    }
    return read_published_run(
        "a row", extract_configuration({name: str(value) for name, value in (usual | row).items()})
    )


def memory(
    engine: FrameworkConventions, layout: Layout | None = None, **candidate: object
) -> MemoryParts:
    facts = ModelFacts(models.shape("llama"))
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    return predict_memory(
        facts,
        Candidate(layout or Layout(), 64, engine=engine, **candidate),
        load,
        NOTHING_BESIDE,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        ("torchtune README", "torchtune"),
        ("FSDP2, torchtitan", "torchtitan"),
        ("LLaMA-Factory", "llama-factory"),
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
def test_words_name_a_trainer(words: str, trainer: str | None) -> None:
    assert find_framework_name(words) == trainer
    assert trainer is None or trainer in FRAMEWORK_DEFAULTS


def test_bytes_of_a_parameter_in_half_precision_and_under_autocast() -> None:
    num = ModelFacts(models.shape("llama")).num_parameters
    tune, factory = (
        memory(FRAMEWORK_DEFAULTS[name].conventions, gradient_accumulation_steps=2)
        for name in ("torchtune", "llama-factory")
    )
    assert (tune.weights, tune.gradients, tune.optimizer) == (2 * num, 2 * num, 4 * num)
    assert (factory.weights, factory.gradients, factory.optimizer) == (4 * num, 4 * num, 8 * num)
    assert factory.gathered > 0  # casts
    pure = case(source="LLaMA-Factory", task="full", gpus=1, notes="pure_bf16").candidate.engine
    assert memory(pure, gradient_accumulation_steps=2).optimizer == 4 * num


def test_performance_recipes_sum_in_half_precision_and_others_in_fp32() -> None:
    recipe = case(source="dgxc-benchmarking@v25.05", source_group="dgxc-benchmarking", tp=2)
    somebody = case(source="a blog", tp=2)
    assert recipe.framework == somebody.framework == "megatron-core"
    assert (
        recipe.candidate.engine.gradient_bytes,
        somebody.candidate.engine.gradient_bytes,
    ) == (2.0, 4.0)
    kept = case(source="BLOOM", notes="BF16_Optimizer with fp32 grad accumulation").candidate.engine
    assert kept.gradient_bytes == 6.0


def test_a_run_under_deepspeed_holds_what_deepspeed_holds() -> None:
    assert (
        case(source="Hugging Face", notes="ZeRO-3").candidate.engine
        == FRAMEWORK_DEFAULTS["deepspeed"].conventions
    )
    assert (
        case(source="Hugging Face", notes="FSDP").candidate.engine
        == FRAMEWORK_DEFAULTS["huggingface"].conventions
    )


def test_fine_tuning_without_a_name_is_hugging_faces_and_copies_what_it_adapts() -> None:
    adapted = case(task="lora")
    full = case(task="full")
    pretrained = case()
    assert (adapted.framework, full.framework, pretrained.framework) == (
        "huggingface",
        "huggingface",
        "torchtitan",
    )
    assert (adapted.candidate.layout.zero_stage, full.candidate.layout.zero_stage) == (0, 3)
    assert case(task="lora", zero_stage="3").candidate.layout.zero_stage == 3


def test_gradients_find_little_room_in_what_activations_leave() -> None:
    num = ModelFacts(models.shape("llama")).num_parameters
    engine = replace(FRAMEWORK_DEFAULTS["nanotron"].conventions, micro_batch_gradient_bytes=0.0)
    fresh = replace(engine, micro_batch_gradient_bytes=2.0)
    plain, small, large = (
        memory(of, micro_batch_size=rows) for of, rows in ((engine, 32), (fresh, 32), (fresh, 512))
    )
    assert 0 < small.reserve <= 2 * num
    assert large.reserve < small.reserve
    assert plain.reserve == 0
    assert small.live == plain.live  # the allocator's, not the tensors'


def test_an_update_copies_gradients_where_logits_leave_no_block() -> None:
    num = ModelFacts(models.shape("llama")).num_parameters
    layout = Layout(dp_shard=4, zero_stage=1)
    engine = replace(FRAMEWORK_DEFAULTS["megatron-deepspeed"].conventions, logit_bytes=0.0)

    def reserve(**habits: float) -> float:
        return memory(replace(engine, **habits), layout, loss_chunk_tokens=None).reserve  # type: ignore[arg-type]

    assert reserve() == pytest.approx(6 * num / 4)
    assert reserve(logit_bytes=1e6) == 0
    assert reserve(update_copy_bytes=0.0) == 0


def test_shards_of_gradients_come_on_top_of_the_peak() -> None:
    num = ModelFacts(models.shape("llama")).num_parameters
    layout = Layout(dp_shard=4, zero_stage=3)
    apart = FRAMEWORK_DEFAULTS["torchtitan"].conventions
    assert apart.has_separate_gradient_stream
    more = memory(apart, layout, micro_batch_size=64, loss_chunk_tokens=None)
    less = memory(
        replace(apart, has_separate_gradient_stream=False),
        layout,
        micro_batch_size=64,
        loss_chunk_tokens=None,
    )
    assert more.live == less.live
    assert more.reserve - less.reserve == pytest.approx(num)  # 4 bytes over 4 ranks


def test_sequences_wait_for_another_stream_only_where_there_is_room() -> None:
    row = {
        "source_group": "nanotron-ultrascale",
        "source": "nanotron",
        "vocab": 131072,
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
    }
    row |= {
        "kv_heads": 32,
        "ffn_hidden": 14336,
        "model_name": "nanotron-llama",
        "tp": 16,
        "gpus": 32,
        "global_batch": 256,
    }
    roomy = case(**row, micro_batch=1)
    full = case(**row, micro_batch=32)
    assert [
        candidate.engine.num_unreleased_sequences > 0 for candidate in list_candidates(roomy)
    ] == [True, False]
    assert predict_run(roomy).candidate.engine.num_unreleased_sequences > 0
    assert predict_run(full).candidate.engine.num_unreleased_sequences == 0
    pipelined = case(**row | {"tp": 4, "pp": 2}, micro_batch=1)
    assert pipelined.candidate.engine.num_unreleased_sequences == 0


def test_layers_that_stay_in_bf16_keep_what_they_keep_there() -> None:
    row = {"source": "torchtitan", "gpu": "B200", "gpus": 4, "recompute": "selective"}
    floats, all_fp4 = (
        predict_run(case(**row, precision=precision)).memory.activations
        for precision in ("bf16", "nvfp4")
    )
    mixed = predict_run(
        case(**row, precision="nvfp4", notes="NVFP4 layers 0-23")
    ).memory.activations
    assert all_fp4 < floats
    assert mixed == pytest.approx(0.75 * all_fp4 + 0.25 * floats, rel=0.02)


def test_frozen_matrices_keep_no_inputs() -> None:
    adapters = {"task": "lora", "gpus": 1, "source": "torchtune", "recompute": "none"}
    attention, every = (
        case(**adapters, notes=f"LoRA r=8 {targets}")
        for targets in ("q_proj, v_proj", "all-linear")
    )
    assert predict_run(attention).memory.activations < 0.9 * predict_run(every).memory.activations
    full = case(**adapters | {"task": "full"})
    assert predict_run(every).memory.activations < predict_run(full).memory.activations


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
            ({**_QWEN_7B, **_PEFT, "seq_len": tokens}, found)
            for tokens, found in ((256, 20.1), (1024, 21.5), (4096, 29.7))
        ),
        *(
            ({**_QWEN_2B, **_PEFT, "seq_len": tokens}, found)
            for tokens, found in ((256, 6.7), (1024, 8.4), (4096, 16.2))
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
        # torchtune on an A100: all weights without and with recomputation, LoRA and QLoRA, in GiB.
        ({**_LLAMA_3B, **_TUNE, "task": "full", "recompute": "none"}, 42.9 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "full", "recompute": "full"}, 24.9 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "lora", "recompute": "full"}, 8.5 * 1.0737),
        ({**_LLAMA_3B, **_TUNE, "task": "qlora", "recompute": "full"}, 4.6 * 1.0737),
    ],
)
def test_memory_of_fine_tuning_that_others_published(
    row: dict[str, object], gigabytes: float
) -> None:
    read = case(**{"gpu": "A100-80GB", "gpus": 1, "mem_metric": "nvidia-smi", **row})
    predicted = compute_reported_memory_bytes(read, predict_run(read)) / GIB_BYTES
    assert predicted == pytest.approx(gigabytes / 1.0737, rel=0.1)
