"""Unknown keys are answered with the key that their user probably means."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.config.test_recipe_loading import MINIMAL

from shardwright.config import Recipe
from shardwright.config.key_suggestions import KEYS_OF_OTHER_TRAINERS, find_models
from shardwright.config.overrides import apply_overrides
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import RecipeError


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("checkpoint.async", "`asynchronous`"),
        ("checkpoint.interval", "`every_steps`"),
        ("checkpoint.folder", "`dir`"),
        ("checkpoint.asyn", "`asynchronous`"),  # by its beginning
        ("training.lr", "`learning_rate`"),
        ("training.batch_size", "`micro_batch_size`"),
        ("optimizer.lr", "`training.learning_rate`"),
        ("adapters.lora_r", "`rank`"),
        ("lora", "`adapters`"),
        ("layout.tensor-parallel-degree", "`tp`"),
        ("gradient_checkpointing", "`recompute`"),
        ("model.torch_dtype", "`precision` at the top level of the recipe"),
        ("training.seed", "`seed` at the top level of the recipe"),
        ("training.dropout", "`model.dropout`"),
        ("training.max_step", "`max_steps`"),
    ],
)
def test_names_of_other_trainers_and_misspelt_keys_have_a_suggestion(key: str, remedy: str) -> None:
    with pytest.raises(RecipeError, match="unknown key") as caught:
        validate_recipe(apply_overrides(MINIMAL, [f"{key}=1"]))
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith(f"Did you mean {remedy}?")


@pytest.mark.parametrize("key", ["optimizer.type", "layout.world_size", "training.clip", "resume"])
def test_a_key_that_is_like_none_has_no_suggestion(key: str) -> None:
    """`optimizer.type` was answered with `layout.tp`."""
    with pytest.raises(RecipeError, match="unknown key") as caught:
        validate_recipe(apply_overrides(MINIMAL, [f"{key}=1"]))
    assert caught.value.remedy is None


def test_every_suggested_key_exists_and_none_is_replaced() -> None:
    sections = {
        name: {key for model in find_models(info.annotation) for key in model.model_fields}
        for name, info in Recipe.model_fields.items()
    }
    for other, key in KEYS_OF_OTHER_TRAINERS.items():
        section, _, last = key.rpartition(".")
        if section:
            assert last in sections[section], key
        else:
            assert last in sections or any(last in keys for keys in sections.values()), key
        assert other not in sections.get(section, sections), other


@pytest.mark.parametrize(
    ("sources", "override", "expected"),
    [
        ({"path": "a"}, "data.sources.0.path=b", {"path": "b"}),
        ("a", "data.sources.path=b", {"path": "b"}),
        ("a", "data.sources.0.weight=2", {"path": "a", "weight": 2}),
        (["a", {"path": "c"}], "data.sources.1.path=b", ["a", {"path": "b"}]),
        (["a", "c"], "data.sources.1=b", ["a", "b"]),
    ],
)
def test_set_changes_an_item_of_a_list(sources: Any, override: str, expected: Any) -> None:
    """Messages name `data.sources.0.path`, which `--set` did not know."""
    document = {**MINIMAL, "data": {"sources": sources}}
    assert apply_overrides(document, [override])["data"]["sources"] == expected
    assert document["data"] == {"sources": sources}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources.2.path=b", "`data.sources.2` is not a mapping"),
        ("data.sources.0.path=b", "`data.sources.0` is not a mapping"),
        ("data.sources.path=b", "`data.sources` is a list, and `path` is none of its items"),
        ("training..max_steps=3", "a part of the key is empty"),
        (".training=3", "a part of the key is empty"),
        ("training.=3", "a part of the key is empty"),
    ],
)
def test_set_refuses_other_places(override: str, message: str) -> None:
    document = {**MINIMAL, "data": {"sources": ["a", {"path": "c"}]}}
    with pytest.raises(RecipeError, match=message) as caught:
        apply_overrides(document, [override])
    assert caught.value.field == "--set"
    assert caught.value.got == override
