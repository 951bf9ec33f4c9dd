"""DeepSpeed around transformers' model, on CPU ranks.

AdamW is torch's fused one, passed as a client optimizer (`torch_adam` with its faster kernel).
With `bf16` DeepSpeed has bf16 weights for compute and fp32 master weights; gradients
are reduced in fp32, as for all contenders.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.case import Case, make_tokens, read_model_config, select_batch
from benchmarks.contenders.with_torch import (
    build_adamw_settings,
    group_parameters,
    load_transformers_model,
)
from benchmarks.pace import Pace


def run(case: Case, pace: Pace) -> None:
    """Train until `pace` returns False."""
    os.environ.setdefault("DS_ACCELERATOR", case.device)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo" if case.device == "cpu" else "nccl")
    model = load_transformers_model(case).train()
    optimizer = torch.optim.AdamW(group_parameters(case, model), **build_adamw_settings(case))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(case))
    if engine.zero_optimization_stage() != case.zero_stage:
        raise RuntimeError(
            f"DeepSpeed runs ZeRO {engine.zero_optimization_stage()}, not {case.zero_stage}"
        )
    if case.compile:
        engine.compile()
    pace.details["wrapped"] = f"{type(engine).__name__} with {type(engine.optimizer).__name__}"
    tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
    rank = int(os.environ["RANK"])
    step = 0
    is_running = pace.begin()
    while is_running:
        input_ids_BT = select_batch(tokens, case, step, rank).to(case.device)
        loss = engine(input_ids=input_ids_BT, labels=input_ids_BT).loss
        engine.backward(loss)
        engine.step()
        is_running = pace.step_done(loss.detach())
        step += 1


def settings(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's configuration of the case; other fields keep their defaults."""
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": case.optimisation.max_grad_norm,
        "zero_optimization": {"stage": case.zero_stage},
        "steps_per_print": 1_000_000,
    }
    if case.precision == "bf16":
        chosen |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    return chosen
