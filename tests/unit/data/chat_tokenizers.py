"""Small tokenizers with chat templates, written as folders."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

END = "<|im_end|>"
START = "<|im_start|>"
OTHER_END = "<|eot|>"

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>\n' }}{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
) + PROMPT
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
) + PROMPT
FORGETS_REASONING = CHATML.replace(
    "{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}"
)
FINAL_TOKEN = CHATML.removesuffix("{% endif %}") + "{% else %}{{ '<|eot|>' }}{% endif %}"
ALWAYS_PROMPTS = (
    CHATML.removesuffix(PROMPT).replace("m.role + '\n'", "m.role + '<|eot|>\n'")
    + "{{ '<|im_start|>assistant<|eot|>\n' }}"
)
NO_END = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
THROWS = (
    "{%- for m in messages %}{% if 'bomb' in m.content %}"
    "{{ raise_exception('no bombs') }}{% endif %}{% endfor %}" + CHATML
)
SPACE_BEFORE_ANSWER = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat_folder(folder: Path, template: str | None = CHATML, *, text: str = "") -> Path:
    """Write a tokenizer folder: byte-level BPE of a few merges, ChatML tokens, chat template."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[START, END, OTHER_END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(
        [
            text
            or "the user and the assistant talk about the weather, the answer and the end\n" * 20
        ],
        trainer,
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Build a conversation in which user and assistant alternate."""
    first = [{"role": "system", "content": system}] if system else []
    return first + [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def write_records(path: Path, *records: object) -> str:
    """Write records as JSON lines; a string is written as a line unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(
            (record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records
        )
    )
    return str(path)
