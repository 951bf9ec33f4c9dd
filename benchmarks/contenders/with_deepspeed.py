"""DeepSpeed around transformers' model, on CPU ranks.

AdamW is torch's fused one, handed over as a client optimizer (`torch_adam` with its faster kernel).
With `bf16` DeepSpeed keeps the weights it computes with in bf16 and fp32 masters beside them;
gradients are reduced in fp32 as everybody's are.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.case import Case, batch_of_step, read_model_config, synthetic_tokens
from benchmarks.contenders.with_torch import adamw_settings, decay_groups, load_transformers_model
from benchmarks.pace import Pace


def run(case: Case, pace: Pace) -> None:
    """Train until the pace says stop."""
    os.environ.setdefault("DS_ACCELERATOR", case.device)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo" if case.device == "cpu" else "nccl")
    model = load_transformers_model(case).train()
    optimizer = torch.optim.AdamW(decay_groups(case, model), **adamw_settings(case))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(case))
    if engine.zero_optimization_stage() != case.zero_stage:
        raise RuntimeError(
            f"DeepSpeed runs ZeRO {engine.zero_optimization_stage()}, not {case.zero_stage}"
        )
    pace.details["wrapped"] = f"{type(engine).__name__} with {type(engine.optimizer).__name__}"
    tokens = synthetic_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
    rank = int(os.environ["RANK"])
    step = 0
    going = pace.begin()
    while going:
        input_ids_BT = batch_of_step(tokens, case, step, rank).to(case.device)
        loss = engine(input_ids=input_ids_BT, labels=input_ids_BT).loss
        engine.backward(loss)
        engine.step()
        going = pace.step_done(loss.detach())
        step += 1


def settings(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration of the case; what is not named keeps its default."""
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
