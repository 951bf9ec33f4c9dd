"""`shardwright evaluate`: exact match of a model on questions with known answers."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
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
from shardwright.cli.output.page_output import check_not_input, check_output_file, write_text
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.inference.exact_match import ExactMatchResult
    from shardwright.inference.model_source import ModelSource

PROGRESS_INTERVAL_SECONDS = 10.0


def evaluate_command(
    source: ModelPath,
    questions: Annotated[
        Path,
        typer.Option(
            "--questions", help="File with questions and answers, in any format that `data` reads."
        ),
    ],
    pattern: Annotated[
        str | None,
        typer.Option(
            "--answer-pattern",
            help="Regular expression that extracts the answer; default gsm8k's `#### answer`.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of questions.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum number of tokens per answer.")
    ] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help=(
                "File for the generated texts; default exact-match-STEP.jsonl in the run folder."
            ),
        ),
    ] = None,
    checkpoint: CheckpointChoice = "latest",
    device: DeviceChoice = "auto",
    dtype: DtypeChoice = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Answer each question by greedy decoding, extract the answer from the text, and count
    exact matches."""
    # Torch is imported here, so that --help stays fast.
    import torch

    from shardwright.inference.exact_match import (
        DEFAULT_PATTERN,
        check_prompt_lengths,
        load_prompt_encoder,
        read_tasks,
        run_tasks,
    )
    from shardwright.inference.model_source import (
        load_decoder,
        open_model_source,
        parse_device,
        parse_dtype,
    )

    pattern = DEFAULT_PATTERN if pattern is None else _check_pattern(pattern)
    torch_device = parse_device(device)
    precision = parse_dtype(dtype, torch.float32 if torch_device.type == "cpu" else torch.bfloat16)
    enable_log()
    model = open_model_source(source, checkpoint)
    tokenizer = model.load_tokenizer()
    selected = read_tasks(
        questions, load_prompt_encoder(model, source, tokenizer), pattern=pattern, limit=limit
    )
    # Before texts are generated, which may take hours.
    check_prompt_lengths(selected, model.shape.max_position_embeddings)
    path = _choose_output(out, source, questions, model)
    decoder = load_decoder(model, device=torch_device, dtype=precision)
    started = time.monotonic()
    printed = started
    completions: list[ExactMatchResult] = []
    for answered in run_tasks(
        decoder,
        tokenizer,
        selected,
        stop_ids=model.stop_ids(tokenizer),
        pattern=pattern,
        max_new_tokens=max_new_tokens,
    ):
        completions.append(answered)
        if time.monotonic() - printed > PROGRESS_INTERVAL_SECONDS:
            printed = time.monotonic()
            sys.stderr.write(
                f"{len(completions)} of {len(selected)}: "
                f"{sum(item.is_correct for item in completions)} correct\n"
            )
    if path is not None:
        _write_completions(path, completions)
    score = _compute_score(completions) | {
        "source": model.name,
        "step": model.step,
        "seconds": time.monotonic() - started,
    }
    if json_output:
        written = None if path is None else str(path)
        print_json({**score, "pattern": pattern, "texts": written})
    else:
        sys.stdout.write(_format_score(score, path))


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"not a regular expression: {error}", field="--answer-pattern", got=pattern
        ) from error
    return pattern


def _compute_score(completions: list[ExactMatchResult]) -> dict[str, object]:
    """Return counts, the exact-match fraction, and its standard error for independent
    questions."""
    total = len(completions)
    num_correct = sum(item.is_correct for item in completions)
    share = num_correct / total
    return {
        "num_questions": total,
        "num_correct": num_correct,
        "exact_match": share,
        "standard_error": math.sqrt(share * (1 - share) / total),
        "num_without_answer": sum(item.extracted_text is None for item in completions),
        "num_not_ended": sum(item.stop_reason != "eos" for item in completions),
    }


def _format_score(score: dict[str, object], path: Path | None) -> str:
    text = (
        f"{score['source']}: exact match {score['exact_match']:.2%} +- "
        f"{score['standard_error']:.2%}"
        f" ({score['num_correct']} of {score['num_questions']})\n"
        f"without an answer: {score['num_without_answer']}, not ended: {score['num_not_ended']}"
    )
    return text + (f"; texts in {path}\n" if path is not None else "\n")


def _choose_output(
    out: Path | None, source: Path, questions: Path, model: ModelSource
) -> Path | None:
    """Return the path for the texts; without --out, None unless the model is a run's.

    Raises:
        InputError: it cannot be written, or is the file with the questions.
    """
    if out is None and model.step is None:
        return None
    path = out if out is not None else source / f"exact-match-{model.step}.jsonl"
    check_not_input(path, questions, option="--out", read_by="--questions")
    check_output_file(path, option="--out")
    return path


def _write_completions(path: Path, completions: list[ExactMatchResult]) -> None:
    """Write one line per question."""
    lines = []
    for item in completions:
        line = {
            "file": item.task.file,
            "line": item.task.line_number,
            "expected": item.task.expected_text,
            "answer": item.extracted_text,
            "correct": item.is_correct,
            "stopped": item.stop_reason,
            "text": item.completion_text,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))
