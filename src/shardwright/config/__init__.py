"""The recipe: one YAML file, validated into frozen models before a run starts."""

from shardwright.config.overrides import apply_overrides
from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import (
    dump_recipe,
    load_recipe,
    parse_layout,
)
