"""The recipe: one YAML file, validated into frozen models before a run starts."""

from shardwright.config.load import apply_overrides, dump_recipe, load_recipe, parse_layout
from shardwright.config.schema import Recipe

__all__ = ["Recipe", "apply_overrides", "dump_recipe", "load_recipe", "parse_layout"]
