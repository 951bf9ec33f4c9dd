"""Chat templates against transformers: ids, and the assistant's tokens where the template marks
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shardwright.data.records.chat_template import load_chat_template
from shardwright.data.records.conversation import read_conversation
from shardwright.data.records.supervision import RecordEncoder
from shardwright.data.tokens.tokenizer_loading import load_tokenizer
from tests.unit.data.chat_tokenizers import CHATML, MARKED, THROWS, chat_folder, turns

CONVERSATIONS = [
    turns("What is the weather?", "The sun is out."),
    turns("one", "two\n\n", "  three", "four é \N{GRINNING FACE}", system="Be kind."),
    turns(*[f"turn {number} of the end" for number in range(12)]),
]
MARKED_WHOLE = MARKED.replace(
    "{% endgeneration %}", "{{ '<|im_end|>' }}{% endgeneration %}"
).replace(
    "{{ '<|im_end|>\n' }}{% endfor %}",
    "{% if m.role != 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}",
)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "several", "long"])
@pytest.mark.parametrize(
    "template", [CHATML, MARKED, THROWS], ids=["prefixes", "markers", "throws"]
)
def test_ids_are_those_of_apply_chat_template(
    tmp_path: Path, template: str, messages: list[dict[str, str]]
) -> None:
    folder = chat_folder(tmp_path, template)
    encoder = RecordEncoder(
        load_tokenizer(folder), load_chat_template(folder, None, {}, None), "assistant"
    )
    encoded = encoder.encode("chat", json.dumps(read_conversation(messages)))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, return_dict=True)
    assert encoded.ids.tolist() == expected["input_ids"]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "several", "long"])
def test_supervised_tokens_are_the_assistants_of_transformers(
    tmp_path: Path, messages: list[dict[str, str]]
) -> None:
    folder = chat_folder(tmp_path / "marked", MARKED_WHOLE)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    for name, template in (("ours", CHATML), ("same", MARKED_WHOLE)):
        here = chat_folder(tmp_path / name, template)
        encoder = RecordEncoder(
            load_tokenizer(here), load_chat_template(here, None, {}, None), "assistant"
        )
        encoded = encoder.encode("chat", json.dumps(read_conversation(messages)))
        assert encoded.ids.tolist() == expected["input_ids"]
        assert encoded.supervised_mask.tolist() == expected["assistant_masks"]
