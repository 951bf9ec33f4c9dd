"""Rows of fine-tuning trainers: kernels, host time, updates and quantised weights, against counts
from the trainers' code and published figures that no fit uses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.hardware import find_node, parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.memory.attention_activations import compute_attention_bytes
from shardwright.planner.memory.block_weights import compute_adapter_input_bytes
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.published.frameworks import FRAMEWORK_DEFAULTS
from shardwright.planner.published.predictions import (
    compute_reported_memory_bytes,
    predict_published_run,
)
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.compute import compute_layer_seconds
from shardwright.planner.time.memory_traffic import (
    count_adapter_bytes,
    count_adapter_operations,
    count_dequantisation_bytes,
    count_elementwise_bytes,
)
from shardwright.planner.time.operation_passes import FEW_PASSES
from shardwright.units import GIB_BYTES
from tests.unit.planner import models
from tests.unit.planner.published.test_frameworks import predict_parts, read_case


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        ({"source": "DeepSpeed"}, "FlashAttention-2 on Hopper"),
        ({"source": "LLaMA-Factory", "gpu": "A100-80GB"}, "FlashAttention-2 on Ampere"),
        ({"source": "torchtune", "gpu": "RTX 4090"}, "FlashAttention-2 on Ada"),
        ({"source": "litgpt"}, "FlashAttention-2 on Hopper"),
        ({"source": "torchtitan"}, "Ampere attention on Hopper"),
        ({"source": "DeepSpeed", "notes": "FlashAttention-3"}, "FlashAttention-3 on Hopper"),
        (
            {"source": "torchtitan", "gpu": "B200", "notes": "Liger; FA4"},
            "FlashAttention-4 on Blackwell",
        ),
        # The only fused kernel with a mask, also on Hopper.
        (
            {"source": "Hugging Face", "notes": "SDPA; padding mask"},
            "memory-efficient attention on Hopper",
        ),
        (
            {"gpu": "A100", "precision": "fp32", "notes": "SDPA; padding mask", "source": "TRL"},
            "memory-efficient attention in fp32 on Ampere",
        ),
        # cuDNN's kernel.
        ({"source": "TRL", "notes": "SDPA", "task": "sft"}, None),
        ({"source": "NeMo Automodel"}, None),
        # FlashAttention of 2022, as fitted.
        ({"source": "mosaicml/llm-foundry", "gpu": "A100-80GB"}, None),
    ],
)
def test_attention_kernel_follows_from_the_trainer(row: dict[str, str], kernel: str | None) -> None:
    named = [name for name in read_case(**row).features if "ttention" in name]
    assert named == ([] if kernel is None else [kernel])


@pytest.mark.parametrize(
    ("gpu", "tokens", "tera_flops_forward", "tera_flops_backward"),
    [
        # Pull request 1791 of Dao-AILab/flash-attention: H100, causal, heads of 128.
        ("H100-80GB-SXM", 8192, 284.1, 287.1),
        # arXiv 2307.08691: at most 73% and 63% of 312 TFLOP/s.
        ("A100-80GB", 1 << 20, 0.73 * 312, 0.63 * 312),
    ],
)
def test_flash_attention_2_is_as_fast_as_its_authors_measured(
    gpu: str, tokens: int, tera_flops_forward: float, tera_flops_backward: float
) -> None:
    accelerator = find_node(gpu).accelerator
    kernel = f"FlashAttention-2 on {accelerator.generation}"
    efficiency = load_efficiencies().get_efficiency(accelerator, "deepspeed", (kernel,))
    rates = DeviceRates(parse_cluster(f"1x{gpu}"), efficiency, "bf16")
    seconds = [
        rates.time_attention(factor * 1e15, tokens, 128, is_backward=is_backward)
        for factor, is_backward in ((1.0, False), (2.5, True))
    ]
    measured = 1e3 / tera_flops_forward + 2.5e3 / tera_flops_backward
    assert sum(seconds) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("tokens", "tera_flops"), [(8192, 602.0), (16384, 616.0)])
def test_flash_attention_3_is_as_fast_as_its_authors_measured(
    tokens: int, tera_flops: float
) -> None:
    """arXiv 2407.08608, figure 5: H100, causal, heads of 128, forward."""
    accelerator = find_node("H100-80GB-SXM").accelerator
    kernel = ("FlashAttention-3 on Hopper",)
    efficiency = load_efficiencies().get_efficiency(accelerator, "deepspeed", kernel)
    rates = DeviceRates(parse_cluster("1xH100-80GB-SXM"), efficiency, "bf16")
    seconds = rates.time_attention(1e15, tokens, 128, is_backward=False)
    assert seconds == pytest.approx(1e3 / tera_flops, rel=0.03)


@pytest.mark.parametrize(
    ("precision", "tokens", "tera_flops", "is_backward"),
    [
        # Pull requests 389 and 557 of facebookresearch/xformers: A100, heads of 128, no causal
        # order: 160 heads in 49.8 ms and, in fp32, 208 ms; 320 heads backward in 93.6 ms.
        ("bf16", 8096, 107.8, False),
        ("fp32", 8096, 25.8, False),
        ("bf16", 4096, 73.5, True),
    ],
)
def test_attention_with_a_mask_is_as_fast_as_its_authors_measured(
    precision: str, tokens: int, tera_flops: float, is_backward: bool
) -> None:
    accelerator = find_node("A100-80GB").accelerator
    kernel = f"memory-efficient attention{' in fp32' * (precision == 'fp32')} on Ampere"
    efficiency = load_efficiencies().get_efficiency(accelerator, "huggingface", (kernel,))
    rates = DeviceRates(parse_cluster("1xA100-80GB"), efficiency, precision)
    seconds = rates.time_attention(1e15, tokens, 128, is_backward=is_backward)
    assert seconds == pytest.approx(1e3 / tera_flops, rel=0.07)


def test_a_padding_mask_computes_the_whole_square_of_repeated_keys() -> None:
    run = read_case(gpus=1, source="TRL", task="full", seq_len=8192, notes="SDPA; padding mask")
    facts = ModelFacts(run.shape)
    (kind, *_) = facts.kinds
    masked = run.candidate
    causal = replace(masked, engine=replace(run.conventions, has_padding_mask=False))
    efficiency = load_efficiencies().get_efficiency(run.cluster.accelerator, "huggingface")
    rates = DeviceRates(run.cluster, efficiency, "bf16")
    seconds = [
        compute_layer_seconds(facts, kind, candidate, rates).attention_forward
        for candidate in (masked, causal)
    ]
    assert 1.9 < seconds[0] / seconds[1] < 2.0
    saved = [compute_attention_bytes(facts, kind, each).saved for each in (masked, causal)]
    repeated = run.shape.query_width - run.shape.kv_width
    assert repeated > 0
    assert saved[0] - saved[1] == masked.micro_batch_tokens * 2 * repeated * 2


@pytest.mark.parametrize(
    ("precision", "bytes_in", "bytes_out"), [("bf16", 19 + 29, 28 + 28), ("fp32", 13 + 29, 32 + 16)]
)
def test_adapters_without_autocast_run_in_fp32(
    precision: str, bytes_in: int, bytes_out: int
) -> None:
    row = {"gpus": 1, "task": "lora", "source": "Hugging Face PEFT", "precision": precision}
    run = read_case(**row, notes="LoRA r=8, all-linear; no autocast")
    facts = ModelFacts(run.shape)
    (kind, *_) = facts.kinds
    tokens = run.candidate.micro_batch_tokens
    num_in = sum(product.num_inputs for product in kind.matmuls)
    num_out = sum(product.num_outputs for product in kind.matmuls)
    counted = sum(count_adapter_bytes(facts, kind, run.candidate))
    assert counted == tokens * (bytes_in * num_in + bytes_out * num_out)
    assert compute_adapter_input_bytes(facts, kind, run.candidate) == tokens * 5 * num_in
    # Three tensors of logits.
    logit_bytes = run.conventions.compute_full_logit_bytes(1, 1, 1)
    assert logit_bytes == 3 * run.candidate.activation_bytes


@pytest.mark.parametrize(("gpu", "bandwidth"), [("A100", 410), ("H200", 614), ("RTX 4090", 256)])
def test_a_host_updates_at_a_share_of_its_memorys_rate(gpu: str, bandwidth: float) -> None:
    conventions = read_case(gpu=gpu, source="DeepSpeed", task="full").conventions
    seconds = conventions.compute_offloaded_update_seconds(0.0, 1e9, 12e9, 1e30, 8)
    # States and master weights twice, gradients and copies: 48 bytes.
    assert seconds == pytest.approx(48e9 * 8 / (0.47e9 * bandwidth))


def test_adapters_and_their_operations_take_host_time() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    (kind, *_) = facts.kinds
    counts = {}
    for name in ("huggingface", "automodel"):
        engine = FRAMEWORK_DEFAULTS[name].conventions
        candidate = Candidate(Layout(), 64, adapter=LowRankAdapter(8), engine=engine)
        counts[name] = count_adapter_operations(facts, kind, candidate)
    # Seven matrices. PEFT: two matmuls, a scale, a sum; backward two gradients of each matmul, the
    # scale's, and a sum.
    assert counts["huggingface"] == (7 * 4, 7 * 6)
    assert counts["automodel"] == (7 * 2, 7 * 4)
    assert count_adapter_operations(facts, kind, replace(candidate, adapter=None)) == (0, 0)
    run = read_case(gpu="A100-80GB", gpus=1, seq_len=256, task="lora", source="Hugging Face PEFT")
    engine = run.conventions
    free = engine.adapter_passes._replace(forward_operations=0, backward_operations=0)
    uncounted = replace(run.candidate, engine=replace(engine, adapter_passes=free))
    speeds = [
        predict_published_run(replace(run, candidate=candidate)).tokens_per_second
        for candidate in (run.candidate, uncounted)
    ]
    # 62 operations of a layer, and 70 of its adapters; without these the device is the limit.
    assert 1.4 < speeds[1] / speeds[0] < (62 + 70) / 62


def test_transformers_norms_move_more_bytes_unless_they_are_compiled() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    (kind, *_) = facts.kinds
    shape = facts.shape
    fused, eager, compiled = (
        count_elementwise_bytes(
            facts,
            kind,
            Candidate(
                Layout(), 64, engine=FRAMEWORK_DEFAULTS[name].conventions, compile=is_compiled
            ),
        )
        for name, is_compiled in (("unsloth", False), ("deepspeed", False), ("deepspeed", True))
    )
    heads = shape.query_width + shape.kv_width
    difference = 64 * 2 * (2 * 16 * shape.hidden_size + 7 * heads)
    assert eager[0] - fused[0] == pytest.approx(difference)
    difference = 64 * 2 * (2 * 34 * shape.hidden_size + 12 * heads)
    assert eager[1] - fused[1] == pytest.approx(difference)
    assert compiled == fused


def test_deepspeed_updates_a_billion_parameters_at_a_time() -> None:
    conventions = FRAMEWORK_DEFAULTS["deepspeed"].conventions
    num = ModelFacts(models.read_shape("llama")).num_parameters / 4
    reserves = {
        (stage, share): predict_parts(
            replace(conventions, update_group_elements=share * num, max_live_elements=0.0),
            Layout(dp_shard=4, zero_stage=stage),
        ).reserve
        for stage in (2, 3)
        for share in (0.5, 1.0)
    }
    saved = reserves[3, 1.0] - reserves[3, 0.5]
    assert saved == pytest.approx(0.5 * num * 6, rel=0.02)
    assert reserves[2, 1.0] == reserves[2, 0.5]


@pytest.mark.parametrize(
    ("row", "gib", "tolerance"),
    [
        # foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv, peak of
        # torch's allocator: all states in bf16, and square roots of second moments.
        ({"task": "full", "gpus": 1, "micro_batch": 8}, 67.46, 0.005),
        ({"task": "full", "gpus": 2, "micro_batch": 2, "zero_stage": "3"}, 33.74, 0.005),
        # torchtune's README: RTX 4090, peak reserved memory.
        (
            {
                "model_name": "Llama-3.1-8B",
                "gpu": "RTX 4090",
                "source": "torchtune",
                "task": "full",
                "gpus": 1,
                "seq_len": 2048,
                "micro_batch": 2,
                "compile": "yes",
                "mem_metric": "reserved",
                "notes": "paged_adamw_8bit; optimizer in backward",
            },
            18.9,
            0.05,
        ),
        # ljm565/universal-llm-trainer, docs/gpu_test.md: peak with a model of 25.5 GiB.
        (
            {
                "model_name": "Llama-2-13B",
                "task": "lora",
                "gpus": 1,
                "seq_len": 8192,
                "micro_batch": 2,
                "global_batch": 64,
                "mem_metric": "reserved",
                "notes": "LoRA r=8, all-linear; no autocast; SDPA; padding mask",
            },
            43.0,
            0.05,
        ),
        # QwenLM/Qwen README, one A100-80GB.
        (
            {
                "model_name": "Qwen-7B",
                "task": "qlora",
                "gpus": 1,
                "seq_len": 1024,
                "global_batch": 8,
                "precision": "fp16",
                "mem_metric": "nvidia-smi",
                "notes": "LoRA r=64, all-linear; int4 (GPTQ)",
            },
            12.3 / 1.0737,
            0.05,
        ),
        (
            {
                "model_name": "Qwen-1.8B",
                "task": "lora",
                "gpus": 1,
                "seq_len": 1024,
                "global_batch": 8,
                "mem_metric": "nvidia-smi",
                "notes": "LoRA r=64, all-linear",
            },
            8.4 / 1.0737,
            0.05,
        ),
    ],
)
def test_memory_agrees_with_published_figures(
    row: dict[str, object], gib: float, tolerance: float
) -> None:
    defaults = {
        "model_name": "Mistral-7B-v0.1",
        "gpu": "A100-80GB-SXM",
        "source": "Hugging Face",
        "recompute": "full",
        "mem_metric": "max_memory_allocated",
        "notes": "everything in bf16",
    }
    run = read_case(**defaults | row)
    predicted = compute_reported_memory_bytes(run, predict_published_run(run)) / GIB_BYTES
    assert predicted == pytest.approx(gib, rel=tolerance)


def test_gptq_unpacks_weights_in_separate_operations() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    (kind, *_) = facts.kinds
    counted = {}
    for notes in ("int4 (GPTQ)", "nf4"):
        run = read_case(task="qlora", gpus=1, source="Hugging Face PEFT", notes=notes)
        candidate = replace(run.candidate, layout=Layout())
        counted[notes] = count_dequantisation_bytes(facts, kind, candidate)
    assert counted["int4 (GPTQ)"] == pytest.approx(16.5 / 6 * counted["nf4"])


@pytest.mark.parametrize(
    ("source", "notes", "offload"),
    [
        ("torchtune", "FSDP; CPU offload", "parameters"),
        ("torchtune", "FSDP; optimizer offload", "optimizer"),
        ("DeepSpeed", "ZeRO-3; CPU offload", "optimizer"),
    ],
)
def test_fsdp_offloads_parameters_with_their_states(source: str, notes: str, offload: str) -> None:
    assert read_case(source=source, notes=notes, task="full").candidate.offload == offload


def test_the_first_fsdp_leaves_shards_of_gradients_on_the_device() -> None:
    row = {"task": "full", "gpus": 2, "zero_stage": 3, "micro_batch": 1, "seq_len": 256}
    found = {
        (source, sharding): predict_published_run(
            read_case(source=source, notes=f"pure bf16; {sharding}; CPU offload", **row)
        )
        for source, sharding in (
            ("Hugging Face", "FSDP"),
            ("Hugging Face", "FSDP2"),
            ("torchtune", "FSDP"),
        )
    }
    gradients = {key: prediction.memory.gradients for key, prediction in found.items()}
    weights = predict_published_run(
        read_case(source="Hugging Face", notes="pure bf16; FSDP", **row)
    ).memory
    assert gradients.pop(("Hugging Face", "FSDP")) == weights.weights > 0
    assert set(gradients.values()) == {0.0}


def test_ligers_kernels_replace_those_of_transformers() -> None:
    eager, liger = (read_case(source="DeepSpeed", notes=notes) for notes in ("", "Liger"))
    assert (
        liger.conventions.elementwise_passes == FEW_PASSES != eager.conventions.elementwise_passes
    )
    saved = [case.conventions.count_saved_tensors(None) for case in (eager, liger)]
    assert [(each.norm, each.gated) for each in saved] == [(4.0, 4.0), (2.0, 3.0)]
    chunked = read_case(source="DeepSpeed", notes="chunked loss")
    assert chunked.conventions == eager.conventions, "only the loss"
    others = [read_case(source="torchtune", notes=notes).conventions for notes in ("", "Liger")]
    assert others[0] == others[1], "no models of transformers"


@pytest.mark.parametrize(("notes", "logit_bytes"), [("torch 2.9", 5.0), ("torch 2.7", 14.0)])
def test_torch_states_the_release_of_torchtitan(notes: str, logit_bytes: float) -> None:
    run = read_case(source="torchtitan", gpu="MI300X", notes=f"FSDP2; {notes}")
    assert run.conventions.logit_bytes == logit_bytes


def test_litgpt_updates_states_of_the_weights_precision() -> None:
    stated, silent = (read_case(source="litgpt", notes=notes) for notes in ("bf16-true", ""))
    assert stated.conventions.get_optimizer_bytes("adamw", 4) == 4.0
    assert silent.conventions.get_optimizer_bytes("adamw", 4) == 8.0


@pytest.mark.parametrize(("layers", "planned"), [(94, 94), (95, 95), (93, 96), (96, 96)])
def test_stages_of_embedding_and_head_may_have_no_layer(layers: int, planned: int) -> None:
    case = read_case(
        source="Megatron-Core", layers=layers, gpus=32, gpus_per_node=8, pp=32, virtual_pp=3
    )
    assert case.shape.num_layers == planned


def test_unsloth_offloads_inputs_of_blocks() -> None:
    row = {"gpus": 1, "task": "qlora", "notes": "QLoRA r=8"}
    assert read_case(source="unsloth", **row).candidate.activation_offload == "host"
    assert read_case(source="LLaMA-Factory", **row).candidate.activation_offload == "none"
