"""The recipe: one YAML file, checked into frozen models before anything else happens."""

from shardwright.config.load import apply_overrides, dump_recipe, load_recipe, parse_layout
from shardwright.config.schema import Recipe

__all__ = ["Recipe", "apply_overrides", "dump_recipe", "load_recipe", "parse_layout"]
