"""Exact match on questions with known answers: generate, extract the answer, compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.config.data import Source
from shardwright.data.chat import load_chat_template
from shardwright.data.conversation import Unusable
from shardwright.data.listing import list_files
from shardwright.data.sources import Broken, identify, read_files
from shardwright.data.supervision import Encoder
from shardwright.data.tokenizer import Tokenizer
from shardwright.errors import DataError
from shardwright.model.decoder import Decoder
from shardwright.train.folder import RunFolder
from shardwright.train.generate import Sampling, complete
from shardwright.train.source import ModelSource

ANSWER = r"####\s*(.+)"
"""Pattern of gsm8k's final answer (Cobbe et al. 2021, arXiv 2110.14168)."""
_DROPPED = str.maketrans("", "", ",$ \t")


@dataclass(frozen=True)
class Question:
    """Prompt ids to continue and the correct answer, with the file and line of the record."""

    prompt_ids: tuple[int, ...]
    expected: str
    file: str
    line: int


@dataclass(frozen=True)
class Answered:
    """Generated text for one question. `answer` is None if the pattern does not match it."""

    question: Question
    text: str
    answer: str | None
    stopped: str

    @property
    def correct(self) -> bool:
        """True if the answers agree after `normalise`."""
        return self.answer is not None and normalise(self.answer) == normalise(
            self.question.expected
        )


def find_answer(text: str, pattern: str) -> str | None:
    """Return the last match of a pattern: its first group, or the whole match without groups.

    >>> find_answer("6 x 7 = 42. #### 42", ANSWER)
    '42'
    """
    matches = list(re.finditer(pattern, text))
    return None if not matches else matches[-1].group(1 if matches[-1].re.groups else 0).strip()


def normalise(answer: str) -> str:
    """Remove thousands separators, currency signs, spaces, case and a final full stop.

    >>> normalise("$1,200."), normalise("Paris") == normalise("paris ")
    ('1200', True)
    """
    return answer.translate(_DROPPED).removesuffix(".").casefold()


def load_encoder(model: ModelSource, path: Path, tokenizer: Tokenizer) -> Encoder:
    """Load the encoder that turns records into prompts as in training.

    It uses the chat template beside the model's tokenizer, if there is one.

    Args:
        path: Folder of the model; a run's recipe has the variables of its template.
    """
    run = RunFolder(path)
    variables = run.load_recipe().data.template_variables if run.recipe.is_file() else {}
    eos_token = None if tokenizer.eos_id is None else tokenizer.decode([tokenizer.eos_id])
    return Encoder(
        tokenizer,
        load_chat_template(model.tokenizer_folder, None, variables, eos_token),
        "assistant",
    )


def read_questions(
    path: Path, encoder: Encoder, *, pattern: str = ANSWER, limit: int | None = None
) -> list[Question]:
    """Read the questions of a file in order.

    Raises:
        DataError: A record is unreadable, is no question with a response, or its response has
            no answer. Skipping records would change the score.
    """
    source = Source(path=str(path))
    files = identify(list_files([source], "questions"), [source], "questions")
    questions: list[Question] = []
    for item in read_files(files):
        if isinstance(item, Broken):
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
            prompted = encoder.prompt(item.canonical, item.text)
        except Unusable as error:
            raise DataError(str(error), field=where) from error
        expected = find_answer(prompted.response, pattern)
        if expected is None:
            raise DataError(
                "the response has no answer that matches the pattern",
                field=where,
                got=prompted.response[-80:],
                allowed=pattern,
            )
        questions.append(Question(tuple(prompted.prompt_ids), expected, item.file, item.line))
        if len(questions) == limit:
            break
    if not questions:
        raise DataError("no questions", field=str(path))
    return questions


def answer_questions(
    decoder: Decoder,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    stop_ids: frozenset[int],
    pattern: str = ANSWER,
    max_new_tokens: int = 256,
) -> Iterator[Answered]:
    """Answer each question by greedy decoding, in order."""
    greedy = Sampling(temperature=0.0)
    for question in questions:
        completion = complete(
            decoder,
            tokenizer,
            question.prompt_ids,
            greedy,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        yield Answered(
            question, completion.text, find_answer(completion.text, pattern), completion.stopped
        )
