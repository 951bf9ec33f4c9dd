"""The command line: one file per verb. Importing it brings in no torch."""

from shardwright.cli.main import main

__all__ = ["main"]
