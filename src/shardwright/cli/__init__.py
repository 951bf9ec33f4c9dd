"""The command line, one file per verb. Importing it imports no torch."""

from shardwright.cli.main import main
