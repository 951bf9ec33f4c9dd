"""TRL's SFTTrainer with DDP, accumulation and rows of unequal lengths, recorded in its second step.

    torchrun --nproc-per-node 2 docs/audit/trl_sft.py
    shardwright audit check audit

Options: `--completion-only` supervises completions, `--packing` packs rows (best-fit decreasing),
`--wrapped` splits the joined text without regard to documents, `--padding-free` joins the rows of a
micro-batch, `--lora` trains PEFT's LoRA adapters, `--own-tokens` counts tokens per rank.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardwright.audit import Recorder

NUM_WORDS = 48


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n + 2 for n in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_rows(has_prompts: bool, num_rows: int = 128) -> Dataset:
    """Build rows of 6 to 15 words; with a prompt of 1 to 5 of them on request."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(num_rows):
        length = 6 + (7 * index) % 10
        words = [f"w{n}" for n in torch.randint(0, NUM_WORDS, (length,), generator=generator)]
        split = 1 + (3 * index) % 5
        if has_prompts:
            pair = {"prompt": " ".join(words[:split]), "completion": " " + " ".join(words[split:])}
            rows.append(pair)
        else:
            rows.append({"text": " ".join(words)})
    return Dataset.from_list(rows)


def train(
    folder: Path | str, *, has_prompts: bool = False, is_lora: bool = False, **options: Any
) -> None:
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
    adapters = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with tempfile.TemporaryDirectory() as output:
        arguments = SFTConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=3,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **({"max_length": 24} | options),
        )
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=arguments,
            train_dataset=build_rows(has_prompts),
            processing_class=build_tokenizer(),
            peft_config=adapters if is_lora else None,
        )
        trainer.add_callback(Recorder(folder, steps=[2]).build_callback())
        trainer.train()


OPTIONS: dict[str, dict[str, Any]] = {
    "--completion-only": {"has_prompts": True, "completion_only_loss": True},
    "--packing": {"packing": True},
    "--wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "--padding-free": {"padding_free": True, "max_length": None},
    "--lora": {"is_lora": True},
    "--own-tokens": {"average_tokens_across_devices": False},
}

if __name__ == "__main__":
    chosen: dict[str, Any] = {}
    for argument in sys.argv[1:]:
        chosen |= OPTIONS[argument]
    train("audit", **chosen)
    dist.destroy_process_group()
