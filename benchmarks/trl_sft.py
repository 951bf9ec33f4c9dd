"""The same fine-tuning by TRL's SFTTrainer and by shardwright: supervised tokens, losses and
tokens/s.

    python -m benchmarks.trl_sft --model MODEL --text tinyshakespeare.txt

Needs `pip install trl datasets`. A file of prompts and completions is made from the text's lines,
each completed by the next. All sides read that file with their own code from text to gradients:
TRL's tokenisation, mask and loss are its own. Both sides read rows in the file's order, because TRL
shuffles otherwise; settings are equal (float32, AdamW, constant rate, no decay, the same clip). The
sides run in turn, `--visits` times, each from the same start. Losses of the first visit are
compared. Speed is in tokens of the file (without padding) per second, of whole steps after the
first three of a visit, without data loading and logs on either side. Both sides pad a batch to its
longest row (ours to a multiple of 8), the fastest mode of TRL on a CPU (packing and padding-free
batches need a flash kernel). Two more sides are ours, with rows of one length and with packed
documents. Writes OUT.json, OUT.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch

from benchmarks.conditions import read_conditions
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.loader import collate
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters

TOLERANCE = 1e-4
BATCH = 32
RATE = 3e-4
CLIP = 1.0
LENGTH = 128
WARM_UP = 3
"""Steps of a visit that are not timed."""


class StepRecords(NamedTuple):
    """Supervised tokens, tokens of the file, loss and seconds of every step."""

    supervised: list[int]
    tokens: list[int]
    losses: list[float]
    seconds: list[float]

    def compute_speeds(self) -> list[float]:
        """Return tokens per second of the timed steps."""
        return [
            tokens / seconds
            for tokens, seconds in zip(self.tokens[WARM_UP:], self.seconds[WARM_UP:], strict=True)
        ]


def main() -> None:
    """Train all sides, print the page; fail if tokens or losses differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trl_sft", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face folder with a tokenizer"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--out", type=Path, help="OUT.json and OUT.md are written")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        path = write_pairs(options.text, Path(name) / "pairs.jsonl", options.steps * BATCH)
        sides = {
            "shardwright": lambda: train_with_shardwright(options.model, path, options.steps),
            "TRL": lambda: train_with_trl(options.model, path, options.steps, Path(name)),
            "shardwright, rows of one length": lambda: train_with_shardwright(
                options.model, path, options.steps, padding="max_length"
            ),
            "shardwright, packed": lambda: train_with_shardwright(
                options.model, path, options.steps, packing="documents"
            ),
        }
        visits: dict[str, list[StepRecords]] = {side: [] for side in sides}
        for _ in range(options.visits):
            for side, run in sides.items():
                visits[side].append(run())
    our_records = visits["shardwright"][0]
    trl_records = visits["TRL"][0]
    worst = max(abs(a - b) for a, b in zip(our_records.losses, trl_records.losses, strict=True))
    result = {
        "conditions": read_conditions()
        | {"trl": metadata.version("trl"), "threads": torch.get_num_threads(), "load_before": load},
        "rows_a_step": BATCH,
        "row_length": LENGTH,
        "steps": options.steps,
        "visits": options.visits,
        "supervised_tokens": {"shardwright": our_records.supervised, "TRL": trl_records.supervised},
        "losses": {"shardwright": our_records.losses, "TRL": trl_records.losses},
        "largest_difference": worst,
        "tokens_per_second": {
            side: quantiles([speed for visit in records for speed in visit.compute_speeds()], n=4)
            for side, records in visits.items()
        },
    }
    page = render(result)
    print(page)
    if options.out is not None:
        options.out.with_suffix(".json").write_text(
            json.dumps(result, indent=1) + "\n", encoding="utf-8"
        )
        options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    if our_records.supervised != trl_records.supervised or worst > TOLERANCE:
        raise SystemExit("the two sides differ")


def render(result: dict[str, Any]) -> str:
    """Render the page of a result."""
    losses = result["losses"]["TRL"]
    tokens = result["supervised_tokens"]
    conditions = result["conditions"]
    same = "the same" if tokens["shardwright"] == tokens["TRL"] else "not the same"
    lines = [
        "# Compared with TRL's SFTTrainer",
        "",
        f"Made by `python -m benchmarks.trl_sft`: {result['steps']} steps of "
        f"{result['rows_a_step']} prompts with completions,",
        f"rows of at most {result['row_length']} tokens, float32, AdamW, one process.",
        "",
        f"Supervised tokens of every step: {same} ({sum(tokens['TRL']):,} in total). Largest "
        "difference of a step's loss, which decreases",
        f"from {losses[0]:.4f} to {losses[-1]:.4f}: {result['largest_difference']:.1e}.",
        "",
        "| | tokens/s, median | quartiles |",
        "| --- | ---: | --- |",
    ]
    for side, (low, middle, high) in result["tokens_per_second"].items():
        lines.append(f"| {side} | {middle:,.0f} | {low:,.0f} to {high:,.0f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"The sides ran in turn, {result['visits']} visits each. Tokens are those of the file, "
            "without padding. Both",
            "pad a batch to its longest row; two more sides are ours with rows of one length and "
            "with packed documents, which do",
            "not attend to each other. Whole steps without data loading and logs on either side; "
            "TRL also computes the entropy and",
            "accuracy of tokens, which cannot be switched off.",
            "",
            f"{conditions['date']}, {conditions['cores']} cores ({conditions['processor']}), "
            f"{conditions['threads']} threads, load before",
            f"{conditions['load_before']:.1f}, torch {conditions['packages']['torch']}, "
            f"transformers {conditions['packages']['transformers']},",
            f"TRL {conditions['trl']}, commit {conditions['commit']}.",
            "",
        ]
    )


def write_pairs(text: Path, path: Path, num_rows: int) -> Path:
    """Write lines of the text as prompts, each with the next line as its completion."""
    lines = [
        line.strip()
        for line in text.read_text(encoding="utf-8").splitlines()
        if len(line.strip()) > 10
    ]
    rows = [{"prompt": a[:60], "completion": f" {b[:60]}"} for a, b in pairwise(lines)][:num_rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_with_shardwright(
    model: Path, path: Path, steps: int, *, packing: str = "none", padding: str = "longest"
) -> StepRecords:
    """Train with shardwright on rows in the file's order; packed rows are fewer and repeat."""
    training = {
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "max_steps": steps,
        "learning_rate": RATE,
        "schedule": "constant",
    }
    recipe = {
        "model": {"path": str(model)},
        "data": {
            "sources": str(path),
            "packing": packing,
            "padding": padding,
            "overlong": "refuse",
            "cache_dir": str(path.parent / "cache"),
        },
        "precision": "fp32",
        "training": training | {"max_grad_norm": CLIP},
        "optimizer": {"beta2": 0.999},
    }
    validated = validate_run(validate_recipe(recipe), 1)
    state = build_state(validated, torch.device("cpu"))
    train = validated.data.train
    records = StepRecords([], [], [], [])
    for step in range(steps):
        rows = [
            train.get_sample(row % len(train)) for row in range(step * BATCH, (step + 1) * BATCH)
        ]
        batch = collate(
            rows, range(step * BATCH, (step + 1) * BATCH), validated.plan.batch.row_multiple
        )
        start_seconds = time.perf_counter()
        loss = accumulate_gradients(state.model, [batch], seed=0, step=step)
        update_parameters(state.model, state.optimizer, learning_rate=RATE, max_grad_norm=CLIP)
        records.losses.append(loss.mean())
        records.seconds.append(time.perf_counter() - start_seconds)
        records.supervised.append(batch.num_supervised)
        records.tokens.append(sum(LENGTH - row.num_padding for row in rows))
    return records


def train_with_trl(model: Path, path: Path, steps: int, folder: Path) -> StepRecords:
    """Train with TRL. Its trainer reads rows in order and reports supervised tokens; the rest is
    TRL's own.
    """
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    records = StepRecords([], [], [], [])

    class OrderedTrainer(SFTTrainer):  # type: ignore[misc, unused-ignore]
        def _get_train_sampler(self, *_arguments: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            records.supervised.append(int((inputs["labels"][:, 1:] != -100).sum()))
            records.tokens.append(
                int(inputs["attention_mask"].sum()) - len(inputs["attention_mask"])
            )  # inputs, as on our side
            return super().compute_loss(model, inputs, *arguments, **named)

    class TimingCallback(TrainerCallback):
        def on_step_begin(self, *_arguments: Any, **_named: Any) -> None:
            records.seconds.append(time.perf_counter())

        def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
            records.seconds[-1] = time.perf_counter() - records.seconds[-1]

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        logging_steps=1,
        max_length=LENGTH,
        packing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
    )
    trainer = OrderedTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[TimingCallback()],
    )
    trainer.train()
    records.losses.extend(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return records


if __name__ == "__main__":
    main()
