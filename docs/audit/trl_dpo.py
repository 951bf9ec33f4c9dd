"""TRL's DPOTrainer with DDP, accumulation and unequal pairs, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/trl_dpo.py
    shardwright audit check audit --objective dpo --beta 0.3 --reference reference

The reference model is the initial model, saved in `reference`. With `--lora` the trainer uses the
model without its adapters, and so does the check: leave out `--reference`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from shardwright.audit import Recorder

NUM_WORDS = 48
BETA = 0.3


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n + 2 for n in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_pairs(num_pairs: int = 64) -> Dataset:
    """Build prompts of 1 to 5 words, and two responses of different lengths to each."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> str:
        return " ".join(
            f"w{n}" for n in torch.randint(0, NUM_WORDS, (length,), generator=generator)
        )

    rows = [
        {
            "prompt": draw(1 + (3 * index) % 5),
            "chosen": " " + draw(2 + (7 * index) % 8),
            "rejected": " " + draw(2 + (5 * index) % 6),
        }
        for index in range(num_pairs)
    ]
    return Dataset.from_list(rows)


def build_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_WORDS + 2,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config)


def train(
    folder: Path | str, reference: Path | str, *, is_lora: bool = False, **options: Any
) -> None:
    state = PartialState(cpu=True)
    if state.is_main_process:
        build_model().save_pretrained(reference)
    state.wait_for_everyone()
    adapters = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with tempfile.TemporaryDirectory() as output:
        arguments = DPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            ddp_backend="gloo",
            beta=BETA,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = DPOTrainer(
            model=build_model(),
            ref_model=None if is_lora else AutoModelForCausalLM.from_pretrained(reference),
            args=arguments,
            train_dataset=build_pairs(),
            processing_class=build_tokenizer(),
            peft_config=adapters if is_lora else None,
        )
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback())
        trainer.train()


if __name__ == "__main__":
    train("audit", "reference", is_lora="--lora" in sys.argv)
    dist.destroy_process_group()
