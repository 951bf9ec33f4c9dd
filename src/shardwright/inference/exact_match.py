"""Exact match on questions with known answers: generate, extract the answer, compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config.data import DataSource
from shardwright.data.records.chat_template import load_chat_template
from shardwright.data.records.conversation import UnusableRecord
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.sources.file_listing import list_files
from shardwright.data.sources.source_reader import BrokenRecord, detect_schemas, read_files
from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.errors import DataError
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.inference.model_source import ModelSource
from shardwright.model.decoder import Decoder

DEFAULT_PATTERN = r"####\s*(.+)"
"""Pattern of gsm8k's final answer (Cobbe et al. 2021, arXiv 2110.14168)."""
_IGNORED_CHARACTERS = str.maketrans("", "", ",$ \t")


@dataclass(frozen=True)
class ExactMatchTask:
    """Prompt ids to continue and the correct answer, with the file and line of the record."""

    prompt_ids: tuple[int, ...]
    expected_text: str
    file: str
    line_number: int


@dataclass(frozen=True)
class ExactMatchResult:
    """Generated text for one question. `extracted_text` is None if the pattern does not match
    it.
    """

    task: ExactMatchTask
    completion_text: str
    extracted_text: str | None
    stop_reason: str

    @property
    def is_correct(self) -> bool:
        """True if the answers agree after `normalise_match`."""
        return self.extracted_text is not None and normalise_match(
            self.extracted_text
        ) == normalise_match(self.task.expected_text)


def extract_match(text: str, pattern: str) -> str | None:
    """Return the last match of a pattern: its first group, or the whole match without groups.

    >>> extract_match("6 x 7 = 42. #### 42", DEFAULT_PATTERN)
    '42'
    """
    matches = list(re.finditer(pattern, text))
    return None if not matches else matches[-1].group(1 if matches[-1].re.groups else 0).strip()


def normalise_match(text: str) -> str:
    """Remove thousands separators, currency signs, spaces, case and a final full stop.

    >>> normalise_match("$1,200."), normalise_match("Paris") == normalise_match("paris ")
    ('1200', True)
    """
    return text.translate(_IGNORED_CHARACTERS).removesuffix(".").casefold()


def load_prompt_encoder(model: ModelSource, path: Path, tokenizer: Tokenizer) -> RecordEncoder:
    """Load the encoder that turns records into prompts as in training.

    It uses the chat template next to the model's tokenizer, if there is one.

    Args:
        path: Folder of the model; a run's recipe has the variables of its template.
    """
    run = RunFolder(path)
    variables = run.load_recipe().data.template_variables if run.recipe_path.is_file() else {}
    eos_token = None if tokenizer.eos_id is None else tokenizer.decode([tokenizer.eos_id])
    return RecordEncoder(
        tokenizer,
        load_chat_template(model.tokenizer_folder, None, variables, eos_token),
        "assistant",
    )


def read_tasks(
    path: Path, encoder: RecordEncoder, *, pattern: str = DEFAULT_PATTERN, limit: int | None = None
) -> list[ExactMatchTask]:
    """Read the questions of a file in order.

    Raises:
        DataError: A record is unreadable, is no question with a response, or its response has
            no answer. Skipping records would change the score.
    """
    source = DataSource(path=str(path))
    files = detect_schemas(list_files([source], "questions"), [source], "questions")
    questions: list[ExactMatchTask] = []
    for item in read_files(files):
        if isinstance(item, BrokenRecord):
            raise DataError(
                item.reason, field=f"{item.file}:{item.line}", remedy="Fix or remove the record"
            )
        if item.canonical == "text":
            raise DataError(
                "plain text has no questions",
                field=str(path),
                allowed="pairs, completions or conversations",
            )
        where = f"{item.file}:{item.line}"
        try:
            prompted = encoder.build_prompt(item.canonical, item.text)
        except UnusableRecord as error:
            raise DataError(str(error), field=where) from error
        expected = extract_match(prompted.response, pattern)
        if expected is None:
            raise DataError(
                "the response has no answer that matches the pattern",
                field=where,
                got=prompted.response[-80:],
                allowed=pattern,
            )
        questions.append(ExactMatchTask(tuple(prompted.prompt_ids), expected, item.file, item.line))
        if len(questions) == limit:
            break
    if not questions:
        raise DataError("no questions", field=str(path))
    return questions


def check_prompt_lengths(tasks: Sequence[ExactMatchTask], max_tokens: int) -> None:
    """Check that the model has a position for every token of every prompt.

    Raises:
        DataError: one is too long. Skipping it would change the score.
    """
    for task in tasks:
        if len(task.prompt_ids) > max_tokens:
            raise DataError(
                "the prompt is longer than the model's maximum length",
                field=f"{task.file}:{task.line_number}",
                got=f"{len(task.prompt_ids)} tokens",
                allowed=f"at most {max_tokens}",
                remedy="Remove the record, or use a model with more positions",
            )


def run_tasks(
    decoder: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[ExactMatchTask],
    *,
    stop_ids: frozenset[int],
    pattern: str = DEFAULT_PATTERN,
    max_new_tokens: int = 256,
) -> Iterator[ExactMatchResult]:
    """Answer each question by greedy decoding, in order."""
    greedy = SamplingSettings(temperature=0.0)
    for question in tasks:
        completion = complete_prompt(
            decoder,
            tokenizer,
            question.prompt_ids,
            greedy,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        yield ExactMatchResult(
            question,
            completion.text,
            extract_match(completion.text, pattern),
            completion.stop_reason,
        )
