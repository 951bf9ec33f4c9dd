"""`shardwright generate`: generate text with a run or a Hugging Face folder."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import (
    CheckpointChoice,
    DeviceChoice,
    DtypeChoice,
    JsonOutput,
    ModelPath,
    enable_log,
)
from shardwright.cli.output.json_output import print_json

if TYPE_CHECKING:
    from shardwright.inference.generation import Completion
    from shardwright.inference.model_source import ModelSource


def generate_command(
    source: ModelPath,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum number of new tokens.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy decoding."),
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Sample from the k most likely tokens only."),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", help="Sample from the smallest set of tokens with this total probability."
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", help="Sampling seed; results are the same on every device.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after an end-of-text token.")
    ] = False,
    slide: Annotated[
        bool,
        typer.Option(
            "--slide",
            help="At the model's maximum length, drop the older half of the text and continue.",
        ),
    ] = False,
    checkpoint: CheckpointChoice = "latest",
    device: DeviceChoice = "auto",
    dtype: DtypeChoice = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Continue a prompt with the model of a run or of a Hugging Face folder; print text as it
    comes."""
    # Torch is imported here, so that --help stays fast.
    from shardwright import api

    loaded: list[tuple[ModelSource, float]] = []

    def show(text: str) -> None:
        if not json_output:
            sys.stdout.write(text)
            sys.stdout.flush()

    enable_log()
    completion = api.generate(
        source,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        should_stop_at_eos=not ignore_eos,
        should_slide=slide,
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        on_load=lambda model: loaded.append((model, time.perf_counter())),
        on_text=show,
    )
    ((model, started),) = loaded
    seconds = time.perf_counter() - started
    show("\n")
    sys.stderr.write(
        f"{model.name}: {len(completion.new_ids)} tokens, "
        f"{len(completion.new_ids) / seconds:.1f} tokens/s; "
        f"stopped: {_STOP_REASONS[completion.stop_reason]}\n"
    )
    if json_output:
        content = _build_json(completion) | {
            "source": model.name,
            "step": model.step,
            "prompt": prompt,
            "seconds": seconds,
        }
        print_json(content)


_STOP_REASONS = {
    "eos": "end of text",
    "length": "--max-new-tokens reached",
    "positions": "the model's maximum length is reached (--slide continues)",
}


def _build_json(completion: Completion) -> dict[str, object]:
    return {
        "text": completion.text,
        "num_prompt_tokens": len(completion.prompt_ids),
        "num_new_tokens": len(completion.new_ids),
        "stopped": completion.stop_reason,
    }
