"""Recipes in other systems: launchers and schedulers, and configurations written and read."""
