"""How text becomes ids: tokenizers from a folder, trained on the corpus, or one id per character.

No torch here, and transformers only for folders that have no tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from shardwright.errors import TokenizerError

IdArray = npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def kind(self) -> str:
        """huggingface, bpe or character."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id there is."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    @property
    def content_hash(self) -> str:
        """Hex; equal for tokenizers that encode equally because they were saved equal."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt: with the tokenizer's own first tokens, without an end. Text never becomes a special token."""
        ...

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Ids of each text alone, without special tokens at either end."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a document."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens written out."""
        ...

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, such that transformers' AutoTokenizer reads the folder."""
        ...


class CharacterTokenizer:
    """One id per character, in order of code point; no special tokens."""

    kind = "character"
    eos_id: int | None = None
    prefix_ids: tuple[int, ...] = ()

    def __init__(self, characters: Iterable[str]) -> None:
        self._characters = "".join(sorted(set(characters)))
        points = np.array([ord(character) for character in self._characters], dtype=np.uint32)
        self._id_of = np.full(int(points.max(initial=0)) + 2, len(points), dtype=np.uint32)
        self._id_of[points] = np.arange(len(points), dtype=np.uint32)

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self._characters)

    @property
    def content_hash(self) -> str:
        """Hash of the alphabet."""
        return hashlib.blake2b(self._characters.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Ids of each text."""
        return [self._encode(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        ids: list[int] = self._encode(text).tolist()
        return ids

    def _encode(self, text: str) -> IdArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        ids = self._id_of[np.minimum(points, len(self._id_of) - 1)]
        if len(unknown := np.flatnonzero(ids == self.vocab_size)):
            character = text[int(unknown[0])]
            raise TokenizerError(
                "the character tokenizer does not know this character",
                field="tokenizer",
                got=f"{character!r} (U+{ord(character):04X})",
                allowed=f"the {self.vocab_size} characters of its training sources",
                remedy="Leave the character out, or train with sources that hold it",
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return "".join(self._characters[index] for index in ids)

    def save(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = {character: index for index, character in enumerate(self._characters)}
        fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocabulary))
        fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
        fast.decoder = tokenizers.decoders.Fuse()
        fast.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that a folder holds."""
    path = Path(folder) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    return CharacterTokenizer(content["model"]["vocab"])
