"""Hugging Face Trainer (with Accelerate), configured as its documentation says for full
fine-tuning, and with peft for adapters.

On CPU its FSDP silently runs DDP or nothing (transformers 5.23). Therefore only zero_stage 0 is
measured there, and the wrapper of the model is checked before anything is timed.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.case import Case, make_tokens, read_model_config
from benchmarks.contenders.with_torch import load_transformers_model
from benchmarks.pace import Pace


class _Sequences(Dataset[dict[str, Tensor]]):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids_T = self.tokens[index % len(self.tokens)]
        return {"input_ids": input_ids_T, "labels": input_ids_T}


class _InOrder(Trainer):
    """Trainer that reads samples in order and records the model's wrapper and the step's loss."""

    wrapped: str = ""
    last_loss: Tensor | float = float("nan")

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # Accelerate compiles the wrapper with what is in it.
        self.wrapped = type(getattr(model, "_orig_mod", model)).__name__
        self.last_loss = super().training_step(model, *args, **kwargs)
        return self.last_loss


class _Paced(TrainerCallback):
    def __init__(self, case: Case, pace: Pace) -> None:
        self.case = case
        self.pace = pace
        self.trainer: _InOrder | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.pace.begin():
            control.should_training_stop = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.trainer is not None
        expected = "DistributedDataParallel" if self.case.world_size > 1 else None
        if expected is not None and self.trainer.wrapped != expected:
            raise RuntimeError(
                f"Trainer wrapped the model in {self.trainer.wrapped}, not {expected}: "
                "this is not data parallelism"
            )
        if not self.pace.step_done(self.trainer.last_loss):
            control.should_training_stop = True


def run(case: Case, pace: Pace) -> None:
    """Train until `pace` returns False."""
    if case.zero_stage != 0:
        raise ValueError("Trainer on these devices is measured for zero_stage 0 only")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = load_transformers_model(case)
        pace.attention = [model.config._attn_implementation]
        if case.lora_rank is not None:
            model = add_adapters(model, case.lora_rank)
        tokens = make_tokens(read_model_config(case)["vocab_size"], case.sequence_length)
        callback = _Paced(case, pace)
        trainer = _InOrder(
            model=model,
            args=TrainingArguments(output_dir=folder, **settings(case)),
            train_dataset=_Sequences(tokens),
            callbacks=[callback],
        )
        callback.trainer = trainer
        trainer.train()


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the model and add peft's adapters, with the targets and the scale of our default."""
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    return get_peft_model(model, chosen)


def settings(case: Case) -> dict[str, Any]:
    """Return arguments of TrainingArguments; others keep their defaults."""
    chosen = case.optimisation
    settings: dict[str, Any] = {
        "per_device_train_batch_size": case.micro_batch_size,
        "max_steps": 100_000,
        "learning_rate": chosen.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": chosen.beta1,
        "adam_beta2": chosen.beta2,
        "adam_epsilon": chosen.eps,
        "weight_decay": chosen.weight_decay,
        "max_grad_norm": chosen.max_grad_norm,
        "optim": "adamw_torch_fused",
        "bf16": case.precision == "bf16",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        # torch 2.11 cannot trace Liger 0.8.5's loss: its users do not compile.
        "torch_compile": case.compile and case.contender != "trainer-liger",
        "gradient_checkpointing": case.recompute != "none",
        "use_liger_kernel": case.contender == "trainer-liger",
    }
    if case.device == "cpu":
        settings |= {"use_cpu": True, "dataloader_pin_memory": False}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            settings["ddp_backend"] = "gloo"
    return settings
