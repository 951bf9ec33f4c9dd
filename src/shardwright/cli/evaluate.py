"""`shardwright evaluate`: exact match of a run or a Hugging Face folder on questions with known answers."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import CheckpointChoice, JsonOutput, ModelPath, show_log
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.train.exact_match import Answered
    from shardwright.train.source import ModelSource

SCHEMA_VERSION = 1
SECONDS_BETWEEN_LINES = 10.0


def evaluate_command(
    source: ModelPath,
    questions: Annotated[
        Path, typer.Option("--questions", help="Questions with answers, in any format that `data` reads.", show_default=False)
    ],
    pattern: Annotated[
        str | None, typer.Option("--answer-pattern", help="Regular expression of an answer; default gsm8k's `#### answer`.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of an answer at most.")] = 256,
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the texts; default exact-match-STEP.jsonl in the run folder.")
    ] = None,
    checkpoint: CheckpointChoice = "latest",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; auto takes CUDA where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16, fp16; auto is fp32 on a CPU, bf16 on CUDA.")] = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Answer each question by the likeliest tokens, take the answer out of the text, and count those that are right."""
    # Torch comes in only now, so that --help answers at once.
    import torch

    from shardwright.train.exact_match import ANSWER, answer_questions, load_encoder, read_questions
    from shardwright.train.source import choose_device, choose_dtype, load_decoder, open_source

    pattern = ANSWER if pattern is None else _checked(pattern)
    where = choose_device(device)
    precision = choose_dtype(dtype, torch.float32 if where.type == "cpu" else torch.bfloat16)
    show_log()
    model = open_source(source, checkpoint)
    tokenizer = model.load_tokenizer()
    asked = read_questions(questions, load_encoder(model, source, tokenizer), pattern=pattern, limit=limit)
    decoder = load_decoder(model, device=where, dtype=precision)
    began = told = time.monotonic()
    done: list[Answered] = []
    stop_ids = model.stop_ids(tokenizer)
    for answered in answer_questions(decoder, tokenizer, asked, stop_ids=stop_ids, pattern=pattern, max_new_tokens=max_new_tokens):
        done.append(answered)
        if time.monotonic() - told > SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            sys.stderr.write(f"{len(done)} of {len(asked)}: {sum(item.correct for item in done)} right\n")
    path = _write(out, source, model, done)
    score = _score(done) | {"source": model.name, "step": model.step, "seconds": time.monotonic() - began}
    if json_output:
        written = None if path is None else str(path)
        sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **score, "pattern": pattern, "texts": written}) + "\n")
    else:
        sys.stdout.write(_told(score, path))


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"no regular expression: {error}", field="--answer-pattern", got=pattern) from error
    return pattern


def _score(done: list[Answered]) -> dict[str, object]:
    """Counts, the share that is right, and its standard error as of independent questions."""
    num_correct, total = sum(item.correct for item in done), len(done)
    share = num_correct / total
    return {
        "num_questions": total,
        "num_correct": num_correct,
        "exact_match": share,
        "standard_error": math.sqrt(share * (1 - share) / total),
        "num_without_answer": sum(item.answer is None for item in done),
        "num_not_ended": sum(item.stopped != "eos" for item in done),
    }


def _told(score: dict[str, object], path: Path | None) -> str:
    text = (
        f"{score['source']}: exact match {score['exact_match']:.2%} +- {score['standard_error']:.2%}"
        f" ({score['num_correct']} of {score['num_questions']})\n"
        f"without an answer {score['num_without_answer']}, without an end {score['num_not_ended']}"
    )
    return text + (f"; texts in {path}\n" if path is not None else "\n")


def _write(out: Path | None, source: Path, model: ModelSource, done: list[Answered]) -> Path | None:
    """What was asked and said, a line for each question; a Hugging Face folder is left as it is."""
    if out is None and model.step is None:
        return None
    path = out if out is not None else source / f"exact-match-{model.step}.jsonl"
    try:
        with open(path, "w", encoding="utf-8") as stream:
            for item in done:
                line = {"file": item.question.file, "line": item.question.line, "expected": item.question.expected}
                line |= {"answer": item.answer, "correct": item.correct, "stopped": item.stopped, "text": item.text}
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field="--out", got=str(path)) from error
    return path
