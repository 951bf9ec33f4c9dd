"""`shardwright schema`: the recipe's JSON schema, for editors."""

from __future__ import annotations

import json
import sys

from shardwright.cli.options import JsonOutput
from shardwright.config import Recipe

SCHEMA_VERSION = 1


def schema_command(json_output: JsonOutput = False) -> None:
    """Print the JSON schema of recipes, for completion and checks in an editor."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "shardwright recipe"
    schema["schema_version"] = SCHEMA_VERSION
    # The schema is an object with a schema_version either way; --json only puts it on one line.
    sys.stdout.write(json.dumps(schema, indent=None if json_output else 2) + "\n")
