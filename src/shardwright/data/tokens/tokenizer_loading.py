"""Loading of tokenizers from a folder, and training of tokenizers on the corpus.

Imports no torch, and transformers only for folders without tokenizer.json and for the check of an
export.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from shardwright.data.tokens.tokenizer import (
    CHARACTER_SPLIT,
    AbsentTokenizer,
    CharacterTokenizer,
    FastTokenizer,
    Tokenizer,
)
from shardwright.errors import TokenizerError
from shardwright.files import read_text

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
MAX_WORD_CHARACTERS = 1024
"""Maximum length in characters of a word in BPE training; longer words are split."""
_LONG_RUN = re.compile(
    rf"(?<!\S)\S{{{MAX_WORD_CHARACTERS + 1},}}|(?<!\s)\s{{{MAX_WORD_CHARACTERS + 1},}}"
)

_PROBE_TEXTS = (
    "It's the 12,345th test: 7 + 8 = 15!",
    "Na\u00efve caf\u00e9, \u041f\u0440\u0438\u0432\u0435\u0442, \u4f60\u597d",
    "\n\n  two  spaces\tand a tab \n",
)

__all__ = [
    "AbsentTokenizer", "CharacterTokenizer", "FastTokenizer", "Tokenizer",
    "describe_tokenizer_difference", "has_tokenizer", "load_tokenizer", "train_bpe",
    "train_characters",
]  # fmt: skip


def train_bpe(texts: Iterator[str], vocab_size: int) -> FastTokenizer:
    """Train a byte-level BPE (words split as in GPT-2) with an end-of-text token as id 0.

    Deterministic. The result has fewer than `vocab_size` tokens if no further pair occurs
    twice.

    Raises:
        TokenizerError: The vocabulary is too small for 256 bytes and the end-of-text token.
    """
    if vocab_size <= NUM_BYTES:
        raise TokenizerError(
            "too small for the 256 bytes and the end-of-text token",
            field="tokenizer.vocab_size",
            got=vocab_size,
            allowed=f"{NUM_BYTES + 1} or more",
        )
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once says nothing about the language
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(_split_long_words(texts), trainer)
    return FastTokenizer(fast, "bpe", END_OF_TEXT)


def _split_long_words(texts: Iterator[str]) -> Iterator[str]:
    """Split texts inside words and runs of white space of more than `MAX_WORD_CHARACTERS`
    characters.

    The time of a merge is proportional to the word's length, so training on a long word takes
    quadratic time: hours for a megabyte of base64.
    """
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            for end in range(run.start() + MAX_WORD_CHARACTERS, run.end(), MAX_WORD_CHARACTERS):
                yield text[start:end]
                start = end
        yield text[start:]


def train_characters(texts: Iterator[str]) -> CharacterTokenizer:
    """Build a character tokenizer from all characters of the texts."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    return CharacterTokenizer(alphabet)


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has any of the files that `load_tokenizer` reads."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((folder / name).is_file() for name in names) or _find_gpt2_files(folder) is not None


def count_differing_ids(tokenizer: Tokenizer, other: Tokenizer) -> int:
    """Count the ids of `other` that stand for other text, or for none, in `tokenizer`."""
    shared = min(tokenizer.vocab_size, other.vocab_size)
    return (other.vocab_size - shared) + sum(
        tokenizer.decode([index]) != other.decode([index]) for index in range(shared)
    )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder: tokenizer.json, GPT-2's two files, or by transformers.

    Raises:
        TokenizerError: the folder has no tokenizer, or it cannot be read.
    """
    folder = Path(folder)
    try:
        if (folder / "tokenizer.json").is_file():
            return _load_fast(folder)
        if pair := _find_gpt2_files(folder):
            return _load_gpt2(*pair)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(
            f"the tokenizer cannot be read: {error}", field="tokenizer.path", got=str(folder)
        ) from error
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.model").is_file():
        return _load_with_transformers(folder)
    raise TokenizerError(
        "the folder has no tokenizer",
        field="tokenizer.path",
        got=str(folder),
        allowed="a folder with tokenizer.json, or with vocab.json and merges.txt",
        remedy="Set tokenizer.path to one, or set tokenizer.kind to bpe or character",
    )


def _load_fast(folder: Path) -> Tokenizer:
    text = read_text(folder / "tokenizer.json")
    content = json.loads(text)
    model = content["model"]
    splitter = content.get("pre_tokenizer") or {}
    if (
        model["type"] == "WordLevel"
        and splitter.get("pattern") == {"Regex": CHARACTER_SPLIT}
        and not content["added_tokens"]
    ):
        characters = sorted(model["vocab"], key=model["vocab"].get)
        tokenizer = CharacterTokenizer(characters)
        if [model["vocab"][character] for character in characters] == list(
            range(tokenizer.vocab_size)
        ):
            return tokenizer
    try:
        fast = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.json: {error}") from error
    return FastTokenizer(fast, "huggingface", _find_end_of_text(folder, fast), folder)


def _find_end_of_text(folder: Path, fast: Any) -> str | None:
    """Return the end-of-text token of the tokenizer's configuration, else of the model's."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder / name).get("eos_token")
        if token:
            return str(token["content"] if isinstance(token, dict) else token)
    for name in ("generation_config.json", "config.json"):
        index = _read_json(folder / name).get("eos_token_id")
        if isinstance(index, list):
            index = index[0] if index else None
        if index is not None and fast.id_to_token(index) is not None:
            return str(fast.id_to_token(index))
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(read_text(path))
    return content if isinstance(content, dict) else {}


def _find_gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Find GPT-2's pair of files; a unique pair may have a prefix (gpt2_vocab.json)."""
    exact = folder / "vocab.json", folder / "merges.txt"
    if exact[0].is_file() and exact[1].is_file():
        return exact
    pairs = [
        (vocabulary, merges)
        for vocabulary in sorted(folder.glob("*vocab.json"))
        if (
            merges := vocabulary.with_name(
                vocabulary.name.removesuffix("vocab.json") + "merges.txt"
            )
        ).is_file()
    ]
    return pairs[0] if len(pairs) == 1 else None


def _load_gpt2(vocabulary: Path, merges: Path) -> FastTokenizer:
    try:
        fast = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{vocabulary.name}, {merges.name}: {error}") from error
    config = _read_json(vocabulary.parent / "tokenizer_config.json")
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=bool(config.get("add_prefix_space", False))
    )
    fast.decoder = tokenizers.decoders.ByteLevel()
    if fast.token_to_id(END_OF_TEXT) is not None:
        fast.add_special_tokens([END_OF_TEXT])
    eos_token = _find_end_of_text(vocabulary.parent, fast) or (
        END_OF_TEXT if fast.token_to_id(END_OF_TEXT) is not None else None
    )
    return FastTokenizer(fast, "huggingface", eos_token)


def _load_with_transformers(folder: Path) -> FastTokenizer:
    """Load a folder of an older format, such as SentencePiece, converted by transformers."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of any kind, also for missing optional packages
        raise TokenizerError(
            f"transformers cannot read the tokenizer: {error}",
            field="tokenizer.path",
            got=str(folder),
        ) from error
    fast = getattr(converted, "backend_tokenizer", None)
    if fast is None:
        raise TokenizerError(
            "a tokenizer without a fast version is not supported",
            field="tokenizer.path",
            got=type(converted).__name__,
            remedy="Convert it to a tokenizer.json",
        )
    return FastTokenizer(
        tokenizers.Tokenizer.from_str(fast.to_str()), "huggingface", converted.eos_token
    )


def describe_tokenizer_difference(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Describe how transformers encodes text differently with a folder; None if it does not.

    For some families, such as qwen2, AutoTokenizer takes the class of the family, which replaces
    the pre-tokenizer of tokenizer.json.
    """
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types
        return f"transformers cannot load the tokenizer of the folder: {error}"
    for text in _PROBE_TEXTS:
        try:
            expected = tokenizer.encode_pieces([text])[0].tolist()
        except TokenizerError:  # the text has characters that it does not know
            continue
        got = loaded(text, add_special_tokens=False).input_ids
        if got != expected:
            place = next(
                (index for index, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
                min(len(got), len(expected)),
            )
            return (
                f"AutoTokenizer of transformers loads {type(loaded).__name__}, which gives other "
                f"ids than in training: {got[place : place + 4]} instead of "
                f"{expected[place : place + 4]} at position {place} of {text!r}. Load the "
                "tokenizer with PreTrainedTokenizerFast.from_pretrained"
            )
    return None
