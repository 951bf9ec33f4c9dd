"""Minimal hand-written PyTorch loop around transformers' model.

zero_stage 0 is DDP, 1 is DDP with ZeroRedundancyOptimizer, 3 is FSDP2 (`fully_shard` per layer and
on the root). bf16 is autocast over fp32 weights under DDP and FSDP2's MixedPrecisionPolicy under
FSDP2, both with fp32 gradients.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.case import Case, make_tokens, read_model_config, select_batch
from benchmarks.pace import Pace

ModelLoss = Callable[[nn.Module, Tensor], Tensor]
"""(module as wrapped, input ids [B, T]) -> mean token loss."""


def run(case: Case, pace: Pace) -> None:
    """Train transformers' model until `pace` returns False."""
    model = load_transformers_model(case).train()
    bf16 = case.precision == "bf16"
    train(
        case,
        pace,
        model,
        list(model.model.layers),
        compute_transformers_loss,
        autocast=bf16,
        compile_layers=case.compile,
    )


def load_transformers_model(case: Case) -> Any:
    """Load the case's model on the case's device: in fp32, or frozen in the case's precision."""
    from transformers import AutoConfig, AutoModelForCausalLM

    is_bf16 = case.lora_rank is not None and case.precision == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    if case.random_weights:
        torch.manual_seed(0)
        with torch.device(case.device):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(case.weights_dir), dtype=dtype
            )
    model: nn.Module = AutoModelForCausalLM.from_pretrained(case.weights_dir, dtype=dtype)
    return model.to(case.device)


def compute_transformers_loss(module: nn.Module, input_ids_BT: Tensor) -> Tensor:
    """Compute the mean token loss; transformers shifts the labels itself."""
    loss: Tensor = module(input_ids=input_ids_BT, labels=input_ids_BT).loss
    return loss


def train(
    case: Case,
    pace: Pace,
    model: nn.Module,
    layers: Iterable[nn.Module],
    model_loss: ModelLoss,
    *,
    autocast: bool,
    compile_layers: bool,
) -> None:
    """Train any model whose loss `model_loss` computes."""
    rank = int(os.environ.get("RANK", "0"))
    if case.world_size > 1:
        dist.init_process_group("gloo" if case.device == "cpu" else "nccl")
    if compile_layers:
        for layer in layers:
            layer.compile()
    module, optimizer = wrap(case, model, layers)
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
    pace.details["wrapped"] = type(module).__name__
    use_autocast = autocast and case.zero_stage != 3
    step = 0
    is_running = pace.begin()
    while is_running:
        input_ids_BT = select_batch(tokens, case, step, rank).to(case.device)
        with (
            torch.autocast(case.device, torch.bfloat16)
            if use_autocast
            else contextlib.nullcontext()
        ):
            loss = model_loss(module, input_ids_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), case.optimisation.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        is_running = pace.step_done(loss.detach())
        step += 1


def wrap(
    case: Case, model: nn.Module, layers: Iterable[nn.Module]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap the model according to its zero_stage; return it with its optimizer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if case.world_size == 1:
        return model, torch.optim.AdamW(group_parameters(case, model), **build_adamw_settings(case))
    if case.zero_stage == 3:
        policy = MixedPrecisionPolicy()
        if case.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model, torch.optim.AdamW(group_parameters(case, model), **build_adamw_settings(case))
    module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if case.zero_stage == 0:
        return module, torch.optim.AdamW(
            group_parameters(case, model), **build_adamw_settings(case)
        )
    if case.zero_stage != 1:
        raise ValueError(
            f"the hand-written loop supports zero_stage 0, 1 and 3, not {case.zero_stage}"
        )
    sharded: Any = ZeroRedundancyOptimizer(
        group_parameters(case, model),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=False,
        **build_adamw_settings(case),
    )
    return module, sharded


def group_parameters(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Group parameters: matrices with weight decay, norms without."""
    parameters = list(model.parameters())
    return [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": case.optimisation.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_adamw_settings(case: Case) -> dict[str, Any]:
    """Return the arguments of torch's AdamW with the fused kernel, which CPU and CUDA have."""
    chosen = case.optimisation
    return {
        "lr": chosen.learning_rate,
        "betas": (chosen.beta1, chosen.beta2),
        "eps": chosen.eps,
        "fused": True,
    }
