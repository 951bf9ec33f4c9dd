"""Tokenizer protocol and implementations: by character, and of the `tokenizers` library.

Text is encoded as text: `<|endoftext|>` in a document becomes the ids of its characters, never
the control token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from shardwright.errors import TokenizerError

IdArray = npt.NDArray[np.uint32]
CHARACTER_SPLIT = r"[\s\S]"
_NUM_CONTEXT_CHARACTERS = 64
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Tokenizer(Protocol):
    """Converter of text to ids. A document is prefix_ids, its text's ids and suffix_ids."""

    @property
    def kind(self) -> str:
        """Kind of tokenizer: huggingface, bpe, character, or none."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """The id for text that the tokenizer cannot encode, if there is one."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids before a document's text, such as a beginning-of-text token."""
        ...

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Ids after a document's text: those of the tokenizer's post-processor, else eos_id."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash (hex) of everything that affects encoding; unchanged by saving and loading."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: prefix_ids and those of the text."""
        ...

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Return the ids of each text without prefix and suffix; in parallel if supported."""
        ...

    @property
    def control_tokens(self) -> frozenset[str]:
        """Tokens with a special meaning: end of text or turn, roles, padding."""
        ...

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of rendered chat texts, which contain control tokens."""
        ...

    def is_split_safe(self, left: str, right: str) -> bool:
        """Return True if encoding `left` and `right` separately gives the ids of both together.

        Judged by the text near the boundary.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens as text."""
        ...

    def save(self, folder: Path) -> None:
        """Write a folder that `load_tokenizer` and transformers' AutoTokenizer can read."""
        ...


class CharacterTokenizer:
    """Tokenizer with one id per character, in order of code point; no special tokens.

    >>> tokenizer = CharacterTokenizer("banana")
    >>> tokenizer.encode("nab"), tokenizer.decode([1, 0])
    ([2, 0, 1], 'ba')
    """

    kind = "character"
    control_tokens: frozenset[str] = frozenset()
    eos_id: int | None = None
    unknown_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    def __init__(self, characters: Iterable[str]) -> None:
        self._characters = "".join(sorted(set(characters)))
        points = np.array([ord(character) for character in self._characters], dtype=np.uint32)
        self._id_by_code_point = np.full(
            int(points.max(initial=0)) + 2, len(points), dtype=np.uint32
        )
        self._id_by_code_point[points] = np.arange(len(points), dtype=np.uint32)

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self._characters)

    @property
    def content_hash(self) -> str:
        """Hash of the alphabet."""
        return _hash_text("character " + self._characters)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt.

        Raises:
            TokenizerError: a character is not in the alphabet.
        """
        ids: list[int] = self._encode(text).tolist()
        return ids

    def _encode(self, text: str) -> IdArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        ids = self._id_by_code_point[np.minimum(points, len(self._id_by_code_point) - 1)]
        if len(unknown := np.flatnonzero(ids == self.vocab_size)):
            character = text[int(unknown[0])]
            raise TokenizerError(
                "the character tokenizer has no id for a character",
                field="tokenizer",
                got=f"{character!r} (U+{ord(character):04X})",
                allowed=f"the {self.vocab_size} characters of its sources",
                remedy="Remove the character, or add it to the text that the tokenizer is "
                "built from",
            )
        return ids

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Return the ids of each text."""
        return [self._encode(text) for text in texts]

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; there are no control tokens."""
        return [self.encode(text) for text in texts]

    def is_split_safe(self, left: str, right: str) -> bool:
        """Return True: characters are encoded independently."""
        return True

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return "".join(self._characters[index] for index in ids)

    def save(self, folder: Path) -> None:
        """Write the same mapping in the format of the `tokenizers` library."""
        vocabulary = {character: index for index, character in enumerate(self._characters)}
        fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocabulary))
        fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(
            tokenizers.Regex(CHARACTER_SPLIT), behavior="isolated"
        )
        fast.decoder = tokenizers.decoders.Fuse()
        _save_tokenizer(fast, {}, folder)


class AbsentTokenizer:
    """Placeholder tokenizer for data that consist of token ids only; it cannot encode text.

    Args:
        vocab_size: vocabulary size of the model.
    """

    kind = "none"
    control_tokens: frozenset[str] = frozenset()
    eos_id: int | None = None
    unknown_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    content_hash = "none"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raise an error: there is no tokenizer.

        Raises:
            TokenizerError: always.
        """
        raise _build_no_tokenizer_error()

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Raise an error, like `encode`."""
        raise _build_no_tokenizer_error()

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Raise an error, like `encode`."""
        raise _build_no_tokenizer_error()

    def is_split_safe(self, left: str, right: str) -> bool:
        """Raise an error, like `encode`."""
        raise _build_no_tokenizer_error()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as numbers.

        >>> AbsentTokenizer(100).decode([17, 3])
        '17 3'
        """
        return " ".join(str(int(index)) for index in ids)

    def save(self, folder: Path) -> None:
        """Write nothing, because there is no tokenizer."""


def _build_no_tokenizer_error() -> TokenizerError:
    return TokenizerError(
        "there is no tokenizer, but text needs one",
        field="tokenizer.path",
        remedy="Set it to the folder of the tokenizer that encoded the token ids",
    )


class FastTokenizer:
    """Tokenizer of the `tokenizers` library.

    `chat_template` is the recipe's template, saved with the tokenizer; None saves the folder's
    own template, if it has one.

    Args:
        fast: tokenizer to wrap; it is modified (truncation and padding are disabled).
        eos_token: token that ends a document, or None.
        folder: folder of its files, which `save` copies unchanged; None writes new files.
    """

    def __init__(
        self, fast: Any, kind: str, eos_token: str | None, folder: Path | None = None
    ) -> None:
        self.kind = kind
        self._fast = fast
        self._eos_token = eos_token
        self._folder = folder
        self.chat_template: str | None = None
        self._rendering_tokenizer: Any = None
        fast.no_truncation()
        fast.no_padding()
        fast.encode_special_tokens = True
        self.eos_id: int | None = None if eos_token is None else fast.token_to_id(eos_token)
        if eos_token is not None and self.eos_id is None:
            raise TokenizerError(
                "the end-of-text token is not in the vocabulary",
                field="tokenizer",
                got=eos_token,
                remedy="Correct eos_token in tokenizer_config.json",
            )
        content = json.loads(fast.to_str())
        unknown = content["model"].get("unk_token")
        if content["model"].get("type") == "Unigram" and content["model"].get("unk_id") is not None:
            unknown = content["model"]["vocab"][content["model"]["unk_id"]][0]
        self.unknown_id: int | None = fast.token_to_id(unknown) if unknown else None
        self.prefix_ids, self.suffix_ids = self._read_frame()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_tokenizer, (self._fast.to_str(), self.kind, self._eos_token, self._folder)

    def _read_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor adds before and after a text, by probing."""
        probes = ["a", *sorted(self._fast.get_vocab(with_added_tokens=False))[:200]]
        bare_ids: list[int] = []
        framed_ids: list[int] = []
        for probe in probes:
            bare_ids = self._fast.encode(probe, add_special_tokens=False).ids
            framed_ids = self._fast.encode(probe, add_special_tokens=True).ids
            if bare_ids:
                break
        first = next(
            (i for i in range(len(framed_ids)) if framed_ids[i : i + len(bare_ids)] == bare_ids), 0
        )
        suffix = tuple(framed_ids[first + len(bare_ids) :])
        if not suffix and self.eos_id is not None:
            suffix = (self.eos_id,)
        return tuple(framed_ids[:first]), suffix

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return int(max(self._fast.get_vocab(with_added_tokens=True).values())) + 1

    @property
    def content_hash(self) -> str:
        """Hash of the tokenizer's definition and its end-of-text token."""
        return _hash_text(
            f"{json.dumps(json.loads(self._fast.to_str()), sort_keys=True)} {self._eos_token}"
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with prefix_ids."""
        return [*self.prefix_ids, *self._fast.encode(text, add_special_tokens=False).ids]

    def encode_pieces(self, texts: Sequence[str]) -> list[IdArray]:
        """Return the ids of each text, encoded on all cores."""
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @property
    def control_tokens(self) -> frozenset[str]:
        """Added tokens that are special, and the end-of-text token."""
        special = {
            token.content
            for token in self._fast.get_added_tokens_decoder().values()
            if token.special
        }
        return frozenset(special | ({self._eos_token} if self._eos_token else set()))

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with control tokens as single ids."""
        if self._rendering_tokenizer is None:
            self._rendering_tokenizer = tokenizers.Tokenizer.from_str(self._fast.to_str())
            self._rendering_tokenizer.no_truncation()
            self._rendering_tokenizer.no_padding()
            self._rendering_tokenizer.encode_special_tokens = False
        return [
            encoding.ids
            for encoding in self._rendering_tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        ]

    def is_split_safe(self, left: str, right: str) -> bool:
        """Return True if both texts have the same words separately as together.

        Merges never cross words, so equal words give equal ids. False for a tokenizer without a
        split into words, whose merges may cross any boundary.
        """
        left = left[-_NUM_CONTEXT_CHARACTERS:]
        right = right[:_NUM_CONTEXT_CHARACTERS]
        normalizer = self._fast.normalizer
        splitter = self._fast.pre_tokenizer
        if splitter is None:
            return False
        parts = [left, right, left + right]
        if normalizer is not None:
            parts = [normalizer.normalize_str(part) for part in parts]
        words = [[word for word, _ in splitter.pre_tokenize_str(part)] for part in parts]
        return words[0] + words[1] == words[2]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens as text."""
        return str(self._fast.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Copy the files of the original folder, or write new ones."""
        if self._folder is not None and (self._folder / "tokenizer.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            for name in _TOKENIZER_FILES:
                if (self._folder / name).is_file():
                    shutil.copyfile(self._folder / name, folder / name)
        else:
            _save_tokenizer(
                self._fast, {"eos_token": self._eos_token} if self._eos_token else {}, folder
            )
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def _restore_tokenizer(
    definition: str, kind: str, eos_token: str | None, folder: Path | None
) -> FastTokenizer:
    """Rebuild a pickled tokenizer in another process."""
    return FastTokenizer(tokenizers.Tokenizer.from_str(definition), kind, eos_token, folder)


def _save_tokenizer(fast: Any, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Not `fast.save`, which raises no OSError.
    (folder / "tokenizer.json").write_text(fast.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
