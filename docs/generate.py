"""Write the pages that are generated from code: `python docs/generate.py`. A test fails if they are
out of date.

reference/recipe.md comes from the recipe's JSON schema, reference/verbs.md from the help of the
command line, and the table of techniques in guide.md from the planner.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from shardwright.cli.main import build_app
from shardwright.cli.verbs import VERBS
from shardwright.config import Recipe, load_recipe
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import read_planning_shape
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.units import GIB_BYTES, format_count

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PACKAGE = ROOT / "src/shardwright"
BEGIN = "<!-- table: python docs/generate.py -->"
END = "<!-- end of table -->"


def pages() -> dict[Path, str]:
    """Return the current text of every generated page."""
    guide = DOCS / "guide.md"
    architecture = DOCS / "architecture.md"
    return {
        DOCS / "reference" / "recipe.md": render_recipe_page(),
        DOCS / "reference" / "verbs.md": render_verbs_page(),
        guide: _replace_table(guide, render_techniques()),
        architecture: _replace_table(architecture, render_layers()),
    }


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


@dataclass(frozen=True)
class Row:
    """A technique, when to use it, and a layout to predict on the model of `recipe`."""

    technique: str
    does: str
    when: str
    page: str
    change: dict[str, Any]
    recipe: str = "llama3-8b"


_ZERO3 = Layout(dp_shard=8, zero_stage=3)
_FULL = {"recompute": "full"}

ROWS = (
    Row(
        "DDP",
        "every GPU has the whole model, gradients are summed",
        "the model fits with memory to spare",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_replicate=8)},
    ),
    Row(
        "ZeRO-1",
        "optimizer states are sharded over the GPUs",
        "it nearly fits",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=1)},
    ),
    Row(
        "ZeRO-2",
        "gradients are sharded too",
        "ZeRO-1 does not fit, and a step has few micro-batches",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=2)},
    ),
    Row(
        "ZeRO-3 (FSDP)",
        "parameters are sharded too, gathered for use",
        "the first choice when it does not fit",
        "parallelism/data.md",
        _FULL | {"layout": _ZERO3},
    ),
    Row(
        "tensor (tp)",
        "every matrix is sharded within a node",
        "one sequence per data rank exceeds the global batch, or one layer does not fit",
        "parallelism/tensor.md",
        _FULL | {"layout": Layout(tp=8, sequence_parallel=False)},
    ),
    Row(
        "+ sequence (sp)",
        "norms and residuals are sharded too",
        "always with tp",
        "parallelism/tensor.md",
        _FULL | {"layout": Layout(tp=8)},
    ),
    Row(
        "pipeline (pp)",
        "layers are partitioned over GPUs",
        "links between nodes are slow, many micro-batches",
        "parallelism/pipeline.md",
        _FULL | {"layout": Layout(pp=4, dp_shard=2, zero_stage=1)},
    ),
    Row(
        "context (cp)",
        "the sequence is sharded; ranks exchange keys and values, or heads",
        "one sequence is too long for a GPU",
        "parallelism/context.md",
        _FULL | {"layout": Layout(dp_shard=2, cp=4, zero_stage=3, cp_method="ring")},
    ),
    Row(
        "expert (ep)",
        "experts are placed on different GPUs, tokens are exchanged",
        "the model has experts",
        "parallelism/expert.md",
        {"layout": Layout(dp_shard=8, ep=8, zero_stage=3)} | _FULL,
        "qwen3-30b-a3b",
    ),
    Row(
        "recompute none",
        "activations are kept",
        "memory is left",
        "planning.md",
        {"layout": _ZERO3, "recompute": "none"},
    ),
    Row(
        "recompute selective",
        "everything except matmuls and attention is recomputed",
        "memory is short by a little",
        "planning.md",
        {"layout": _ZERO3, "recompute": "selective"},
    ),
    Row(
        "recompute full",
        "whole blocks are computed again",
        "memory is short",
        "planning.md",
        {"layout": _ZERO3, "recompute": "full"},
    ),
    Row(
        "precision fp32",
        "matmuls in fp32",
        "to check the others",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "fp32"},
    ),
    Row(
        "precision bf16",
        "matmuls in bf16, master weights in fp32",
        "always on GPUs that support it",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "bf16"},
    ),
    Row(
        "precision fp8",
        "matmuls in fp8",
        "on GPUs with 8-bit units; its speed is not measured here",
        "low-precision.md",
        _FULL | {"layout": _ZERO3, "precision": "fp8"},
    ),
    Row(
        "offload",
        "optimizer states in host memory or on disk",
        "the optimizer states do not fit",
        "offload.md",
        _FULL | {"layout": _ZERO3, "offload": "optimizer"},
    ),
    Row(
        "LoRA",
        "small matrices beside frozen ones are trained",
        "fine-tuning",
        "planning.md",
        _FULL | {"layout": _ZERO3, "adapter": LowRankAdapter(16)},
    ),
    Row(
        "QLoRA",
        "the frozen ones in 4 bits",
        "fine-tuning on little memory",
        "planning.md",
        _FULL | {"layout": _ZERO3, "adapter": LowRankAdapter(16, quantised=True)},
    ),
)

CLUSTER = "8xH100-80GB"
GLOBAL_BATCH = 64
SEQUENCE = 8192


def render_techniques() -> str:
    """Render the table of techniques with the planner's predictions on one node with the same
    global batch.
    """
    cluster = parse_cluster(CLUSTER)
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    recipes = {row.recipe: load_recipe(ROOT / "recipes" / f"{row.recipe}.yaml") for row in ROWS}
    predictors = {
        name: Predictor(get_model_facts(read_planning_shape(recipe)), cluster, efficiency)
        for name, recipe in recipes.items()
    }
    lines = [
        "| technique | what it does | use it when | predicted layout | GiB a GPU | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        candidate = _set_batch(
            replace(
                Candidate(Layout(), SEQUENCE if row.recipe == "llama3-8b" else 4096), **row.change
            )
        )
        prediction = predictors[row.recipe].predict(candidate)
        memory = f"{prediction.memory.total / GIB_BYTES:.0f}" + (
            "" if prediction.fits else " (does not fit)"
        )
        layout = candidate.describe() + ("" if row.recipe == "llama3-8b" else f" ({row.recipe})")
        speed = format_count(prediction.tokens_per_second) if prediction.fits else "-"
        lines.append(
            f"| [{row.technique}]({row.page}) | {row.does} | {row.when} | {layout} "
            f"| {memory} | {speed} |"
        )
    capacity_gib = next(iter(predictors.values())).capacity_bytes / GIB_BYTES
    defaults = f"llama3-8b on {cluster.name}, {SEQUENCE:,} tokens a sequence, "
    defaults += f"{GLOBAL_BATCH} sequences a step, bf16 and micro batch 1"
    limit = f"a run may fill {capacity_gib:.0f} GiB of a GPU."
    lines += ["", f"{defaults} unless noted otherwise; {limit}", ""]
    return "\n".join(lines)


def _set_batch(candidate: Candidate) -> Candidate:
    """Set the same global batch for all layouts by gradient accumulation."""
    return replace(
        candidate,
        micro_batch_size=1,
        gradient_accumulation_steps=GLOBAL_BATCH // candidate.layout.data_ranks,
    )


def main() -> None:
    """Write the pages that differ."""
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"written: {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
