"""Write the pages that are generated from code: `python docs/generate.py`. A test fails if they are
out of date.

reference/recipe.md comes from the recipe's JSON schema, reference/verbs.md from the help of the
command line, the tables of techniques in guide.md and of settings in offload.md from the planner.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shardwright.cli.main import build_app
from shardwright.cli.verbs import VERBS
from shardwright.config import Recipe

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PACKAGE = ROOT / "src/shardwright"
BEGIN = "<!-- table: python docs/generate.py -->"
END = "<!-- end of table -->"


def pages() -> dict[Path, str]:
    """Return the current text of every generated page."""
    guide = DOCS / "guide.md"
    offload = DOCS / "offload.md"
    architecture = DOCS / "architecture.md"
    return {
        DOCS / "reference" / "recipe.md": render_recipe_page(),
        DOCS / "reference" / "verbs.md": render_verbs_page(),
        guide: _replace_table(guide, _run("techniques.py", "render_techniques")),
        offload: _replace_table(offload, _run("offload_settings.py", "render_offload_settings")),
        architecture: _replace_table(architecture, render_layers()),
    }


def _run(script: str, function: str) -> str:
    """Return the table that `function` of a script in this folder renders."""
    table: str = runpy.run_path(str(DOCS / script))[function]()
    return table


def _replace_table(page: Path, table: str) -> str:
    """Return the text of a page with the table between its two marks replaced."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def render_layers() -> str:
    """Render the layers that `tests/architecture` enforces, the highest first."""
    layers = runpy.run_path(str(ROOT / "tests/architecture/imports.py"))["LAYERS"]
    lines = ["| layer | package | contents |", "|---|---|---|"]
    for depth, packages in reversed(list(enumerate(layers))):
        for package in packages:
            module = PACKAGE / package / "__init__.py"
            path = module if module.is_file() else PACKAGE / f"{package}.py"
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            summary = " ".join(docstring.partition("\n\n")[0].split())
            target = f"../src/shardwright/{path.relative_to(PACKAGE)}".removesuffix("/__init__.py")
            lines.append(f"| {depth} | [`{package}`]({target}) | {summary} |")
    return "\n".join(lines) + "\n"


def render_recipe_page() -> str:
    """Render all keys of a recipe, section by section."""
    schema = Recipe.model_json_schema()
    lines = [
        "# The recipe, key by key",
        "",
        "Written by `python docs/generate.py` from the JSON schema of `shardwright schema`, which "
        "editors read.",
        "",
        "Relative paths start at the current folder. A leading `~` in a path becomes the home "
        "folder, and `${NAME}` in any text the value of the environment variable.",
        "",
    ]
    lines += _render_section("Recipe", schema, schema["$defs"])
    for name, definition in schema["$defs"].items():
        keys = [
            key
            for key, property_schema in schema["properties"].items()
            if name in str(property_schema)
        ]
        title = f"{keys[0]}" if keys else name.removesuffix("Section")
        if "properties" in definition:
            lines += _render_section(title, definition, schema["$defs"])
    return "\n".join(lines).rstrip() + "\n"


def _render_section(
    title: str, definition: dict[str, Any], definitions: dict[str, Any]
) -> list[str]:
    lines = [
        f"## {title}",
        "",
        _join_lines(definition.get("description", "")),
        "",
        "| key | value | default | |",
        "|---|---|---|---|",
    ]
    needed = definition.get("required", ())
    for key, property_schema in definition["properties"].items():
        default = (
            "needed" if key in needed else f"`{_format_value(property_schema.get('default'))}`"
        )
        if isinstance(property_schema.get("default"), dict) or (
            "default" not in property_schema and key not in needed
        ):
            default = ""
        text = _join_lines(property_schema.get("description", "")).replace("|", "\\|")
        lines.append(
            f"| `{key}` | {_describe_values(property_schema, definitions)} | {default} | {text} |"
        )
    return [*lines, ""]


def _describe_values(property_schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe the values of a key in words."""
    if "$ref" in property_schema:
        name = property_schema["$ref"].rpartition("/")[2]
        return (
            _describe_values(definitions[name], definitions)
            if "properties" not in definitions[name]
            else "a section"
        )
    for words in ("anyOf", "allOf", "oneOf"):
        if words in property_schema:
            return " or ".join(
                dict.fromkeys(
                    _describe_values(item, definitions) for item in property_schema[words]
                )
            )
    if "enum" in property_schema:
        return ", ".join(f"`{_format_value(item)}`" for item in property_schema["enum"])
    if "const" in property_schema:
        return f"`{_format_value(property_schema['const'])}`"
    if property_schema.get("type") == "array":
        return f"a list of {_describe_values(property_schema.get('items', {}), definitions)}"
    if property_schema.get("format") == "size":
        return "a size such as `64MiB`"
    limits = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [
        f"{sign} {property_schema[key]:g}" for key, sign in limits.items() if key in property_schema
    ]
    kinds = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    kind = kinds.get(str(property_schema.get("type")), "a mapping")
    return f"{kind} {' and '.join(bounds)}".rstrip()


def _format_value(value: Any) -> str:
    """Format a value as in YAML."""
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def render_verbs_page() -> str:
    """Render all verbs with the options of their --help."""
    lines = [
        "# The verbs",
        "",
        "Written by `python docs/generate.py` from `shardwright VERB --help`.",
        "",
    ]
    for name, summary in VERBS.items():
        command: Any = typer.main.get_command(build_app(name))
        lines += [f"## {name}", "", summary, ""]
        lines += list(_render_options(command.commands[name], f"shardwright {name}"))
    return "\n".join(lines).rstrip() + "\n"


def _render_options(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from (f"### {path} {name}", "")
            yield from _render_options(inner, f"{path} {name}")
        return
    context = command.make_context(path, [], resilient_parsing=True)
    places = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    arguments = " ".join(parameter.metavar or parameter.name.upper() for parameter in places)
    yield from (f"`{path} {arguments}`".replace(" `", "`"), "")
    if command.help:
        yield from (_join_lines(command.help), "")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            yield f"- `{_join_lines(record[0])}` {_join_lines(record[1])}".rstrip()
    yield ""


def main() -> None:
    """Write the pages that differ."""
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"written: {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
