"""Fine-tuning held step by step against transformers and a plain loop, and with LoRA against peft,
under several layouts.

    python -m benchmarks.fine_tuning --model MODEL --text tinyshakespeare.txt --out docs/fine-tuning

Three runs of a small Hugging Face model, 50 steps each in float32: on text that the model itself
has written, on the text that is given, and on the latter with LoRA. The plain side is
`AutoModelForCausalLM`, `peft.get_peft_model`, `torch.optim.AdamW` and a loop of a few lines; it
reads the same rows, and what is compared is every step's loss. Writes OUT.json, OUT-losses.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.conditions import read_conditions
from shardwright.config.recipe_loading import parse_layout, validate_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import RankGrid
from shardwright.optim import compute_learning_rate
from shardwright.train.run_checks import ValidatedRun, validate_run
from shardwright.train.setup import build_state
from shardwright.train.step import accumulate_gradients, update_parameters
from shardwright.verify.rank_pool import RankPool

STEPS = 50
LAYOUTS = {
    "one process": (1, ""),
    "zero 3": (2, "dp_shard=2,zero_stage=3"),
    "tp 2": (2, "tp=2"),
    "pp 2": (2, "pp=2"),
    "cp 2": (2, "cp=2"),
}
TOLERANCE = 1e-4
"""Largest difference of any step's loss, in nats, that is called equal."""
LORA = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def main() -> None:
    """Run everything, print a table, write the numbers and the curves; an error where a loss
    differs.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fine_tuning", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face folder that our decoder knows"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="*", default=["own text", "given text", "LoRA"])
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, RankPool(timeout_seconds=900.0) as pool:
        folder = Path(name)
        documents = recipes(options.model, options.text, folder)
        for run in options.runs:
            found[run] = {"transformers": pool.run(1, plain_losses, documents[run])[0]}
            table[run] = {}
            for layout, (num_ranks, degrees) in LAYOUTS.items():
                document = documents[run] | {"layout": parse_layout(degrees) if degrees else {}}
                found[run][layout] = pool.run(num_ranks, our_losses, document)[0]
                table[run][layout] = difference(found[run], layout)
                print(f"{run}: {layout}: {table[run][layout]:.1e}", flush=True)
            told = {
                "conditions": read_conditions(),
                "steps": STEPS,
                "largest_difference": table,
                "losses": found,
            }
            options.out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    draw(found, options.out.with_name(f"{options.out.name}-losses.png"))
    if any(value > TOLERANCE for row in table.values() for value in row.values()):
        raise SystemExit(f"a loss differs by more than {TOLERANCE:g}: {table}")


def difference(losses: dict[str, list[float]], layout: str) -> float:
    """Largest distance of a step's loss from the plain side's, in nats."""
    return max(abs(a - b) for a, b in zip(losses[layout], losses["transformers"], strict=True))


def recipes(model: Path, text: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The three recipes; writes what they read into `folder`."""
    own = folder / "own.txt"
    own.write_text(write_text(model, num_rows=96), encoding="utf-8")
    adapter = folder / "adapter"
    save_adapter(model, adapter)

    def recipe(source: Path, rate: float) -> dict[str, Any]:
        return {
            "model": {"path": str(model)},
            "data": {
                "sources": str(source),
                "packing": "windows",
                "cache_dir": str(folder / "cache"),
            },
            "precision": "fp32",
            "training": {
                "sequence_length": 128,
                "global_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "learning_rate": rate,
                "warmup_steps": 5,
                "max_steps": STEPS,
                "weight_decay": 0.1,
            },
        }

    given = recipe(text, 1e-3)
    return {
        "own text": recipe(own, 3e-4),
        "given text": given,
        "LoRA": given | {"adapters": {"path": str(adapter)}},
    }


def write_text(model: Path, num_rows: int) -> str:
    """Text that a model samples from itself, one story a row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    begin = torch.full((num_rows, 1), theirs.config.bos_token_id)
    with torch.inference_mode():
        rows = theirs.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            do_sample=True,
            max_new_tokens=200,
            pad_token_id=0,
        )
    return "\n".join(tokenizer.batch_decode(rows, skip_special_tokens=True))


def save_adapter(model: Path, folder: Path) -> None:
    """peft's adapters as they begin, B away from zero so that A has a gradient at once."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM", **LORA)
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    theirs.save_pretrained(folder)


def ready(document: dict[str, Any]) -> ValidatedRun:
    """The recipe checked for the ranks that run."""
    return validate_run(
        validate_recipe(document), dist.get_world_size() if dist.is_initialized() else 1
    )


def rate_at(checked: ValidatedRun, step: int) -> float:
    """The learning rate of a step."""
    return compute_learning_rate(
        step, checked.recipe.training, checked.total_steps, checked.plan.batch.global_batch_size
    )


def our_losses(document: dict[str, Any]) -> list[float]:
    """Every step's loss, as the trainer computes it."""
    checked = ready(document)
    state = build_state(checked, torch.device("cpu"))
    order = SampleOrder(checked.recipe.seed, len(checked.data.train))
    rank = RankGrid(checked.plan.layout).data_rank(dist.get_rank() if dist.is_initialized() else 0)
    found = []
    for step in range(STEPS):
        batches = read_step_micro_batches(checked.data.train, order, checked.plan.batch, step, rank)
        found.append(
            accumulate_gradients(state.model, batches, seed=checked.recipe.seed, step=step).mean()
        )
        limit = checked.recipe.training.max_grad_norm
        update_parameters(
            state.model, state.optimizer, learning_rate=rate_at(checked, step), max_grad_norm=limit
        )
    return found


def plain_losses(document: dict[str, Any]) -> list[float]:
    """Every step's loss by transformers (and peft), PyTorch's AdamW and a plain loop over the same
    rows.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checked = ready(document)
    training = checked.recipe.training
    optimizer_section = checked.recipe.optimizer
    model: Any = AutoModelForCausalLM.from_pretrained(
        checked.recipe.model.path, dtype=torch.float32
    )
    if checked.recipe.adapters is not None:
        model = PeftModel.from_pretrained(model, checked.recipe.adapters.path, is_trainable=True)
    parameters: list[nn.Parameter] = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (optimizer_section.beta1, optimizer_section.beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=betas, eps=optimizer_section.eps
    )
    order = SampleOrder(checked.recipe.seed, len(checked.data.train))
    found = []
    for step in range(STEPS):
        batches = read_step_micro_batches(checked.data.train, order, checked.plan.batch, step, 0)
        ids_BT, labels_BT = (
            torch.cat([getattr(batch, name) for batch in batches])
            for name in ("input_ids_BT", "labels_BT")
        )
        loss: Tensor = F.cross_entropy(
            model(input_ids=ids_BT).logits.flatten(0, 1), labels_BT.flatten()
        )
        loss.backward()
        assert training.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(checked, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Curves of every run, the plain side's as a broad line beneath the layouts', and the
    differences below them.
    """
    import matplotlib as mpl

    mpl.purpose("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(found), figsize=(4 * len(found), 5), sharex=True, squeeze=False, height_ratios=(2, 1)
    )
    for column, (run, losses) in enumerate(found.items()):
        above, below = axes[:, column]
        plain = losses["transformers"]
        above.plot(
            plain,
            linewidth=5,
            alpha=0.3,
            color="black",
            label="peft" if run == "LoRA" else "transformers",
        )
        for layout in LAYOUTS:
            above.plot(losses[layout], linewidth=1, label=layout)
            below.plot(
                [max(abs(a - b), 1e-9) for a, b in zip(losses[layout], plain, strict=True)],
                linewidth=1,
            )
        below.axhline(TOLERANCE, color="black", linestyle=":", linewidth=1)
        below.set(yscale="log", xlabel="step", ylim=(1e-9, 1e-3))
        above.set_title(run)
    axes[0, 0].set_ylabel("loss, nats a token")
    axes[1, 0].set_ylabel("difference")
    axes[0, -1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
