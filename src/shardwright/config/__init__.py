"""The recipe: one YAML file, validated into frozen models before a run starts."""

from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import (
    apply_overrides,
    dump_recipe,
    load_recipe,
    parse_layout,
)
