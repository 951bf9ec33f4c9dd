"""`shardwright schema`: print the JSON schema of recipes, for editors."""

from __future__ import annotations

import json
import sys

from shardwright.cli.options import JsonOutput
from shardwright.config import Recipe

SCHEMA_VERSION = 1


def schema_command(json_output: JsonOutput = False) -> None:
    """Print the JSON schema of recipes, for completion and validation in an editor."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "shardwright recipe"
    schema["schema_version"] = SCHEMA_VERSION
    # The schema always has a schema_version; --json only prints it on one line.
    sys.stdout.write(json.dumps(schema, indent=None if json_output else 2) + "\n")
