"""`shardwright generate`: text from a run or from a Hugging Face folder."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import CheckpointChoice, JsonOutput, ModelPath, show_log

if TYPE_CHECKING:
    from shardwright.train.generate import Completion

SCHEMA_VERSION = 1


def generate_command(
    source: ModelPath,
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after this many tokens.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw among the k likeliest tokens only.")] = None,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw among the fewest tokens of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw; the same on every device.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of a text.")] = False,
    slide: Annotated[
        bool, typer.Option("--slide", help="Where the model's positions end, forget the older half of the text and go on.")
    ] = False,
    checkpoint: CheckpointChoice = "latest",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; auto takes CUDA where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16, fp16; auto is fp32 on a CPU, bf16 on CUDA.")] = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Continue a prompt with the model of a run folder (or of a Hugging Face folder), printed as it comes."""
    # Torch comes in only now, so that --help answers at once.
    import torch

    from shardwright.train.generate import Sampling, complete, encode_prompt
    from shardwright.train.source import choose_device, choose_dtype, load_decoder, open_source

    sampling = Sampling(temperature, top_k, top_p, seed)
    where = choose_device(device)
    precision = choose_dtype(dtype, torch.float32 if where.type == "cpu" else torch.bfloat16)
    show_log()
    model = open_source(source, checkpoint)
    tokenizer = model.load_tokenizer()
    decoder = load_decoder(model, device=where, dtype=precision)

    def show(text: str) -> None:
        if not json_output:
            sys.stdout.write(text)
            sys.stdout.flush()

    encode_prompt(decoder, tokenizer, prompt)  # a prompt that is refused is not echoed first
    show(prompt)
    began = time.perf_counter()
    completion = complete(
        decoder,
        tokenizer,
        prompt,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=() if ignore_eos else model.stop_ids(tokenizer),
        slide=slide,
        on_text=show,
    )
    seconds = time.perf_counter() - began
    show("\n")
    sys.stderr.write(
        f"{model.name}: {len(completion.new_ids)} tokens, {len(completion.new_ids) / seconds:.1f} tokens/s; "
        f"stopped: {_STOPPED[completion.stopped]}\n"
    )
    if json_output:
        told = _as_json(completion) | {"source": model.name, "step": model.step, "prompt": prompt, "seconds": seconds}
        sys.stdout.write(json.dumps(told) + "\n")


_STOPPED = {
    "eos": "the text ended",
    "length": "--max-new-tokens is reached",
    "positions": "the model's positions are used up (--slide goes on)",
}


def _as_json(completion: Completion) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "text": completion.text,
        "num_prompt_tokens": len(completion.prompt_ids),
        "num_new_tokens": len(completion.new_ids),
        "stopped": completion.stopped,
    }
