"""Write the pages that are read off the code: `python docs/generate.py`. A test fails when what
stands there is no longer that.

reference/recipe.md from the recipe's JSON schema, reference/verbs.md from the command line's own
help, and the table of techniques in guide.md from the planner.
"""

from __future__ import annotations

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
from shardwright.planner.calibration import load_efficiencies
from shardwright.planner.candidate import LowRankAdapter, Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import read_planning_shape
from shardwright.units import GIB_BYTES, format_count

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BEGIN = "<!-- table: python docs/generate.py -->"
END = "<!-- end of table -->"


def pages() -> dict[Path, str]:
    """Every page with its text as it should be."""
    guide = DOCS / "guide.md"
    before, _, rest = guide.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        DOCS / "reference" / "recipe.md": recipe_page(),
        DOCS / "reference" / "verbs.md": verbs_page(),
        guide: f"{before}{BEGIN}\n\n{techniques()}\n{END}{after}",
    }


def recipe_page() -> str:
    """All keys of a recipe, section by section."""
    schema = Recipe.model_json_schema()
    lines = [
        "# The recipe, key by key",
        "",
        "Written by `python docs/generate.py` from the JSON schema that `shardwright schema` prints, which is what editors read.",
        "",
    ]
    lines += _section("Recipe", schema, schema["$defs"])
    for name, definition in schema["$defs"].items():
        keys = [key for key, found in schema["properties"].items() if name in str(found)]
        title = f"{keys[0]}" if keys else name.removesuffix("Section")
        if "properties" in definition:
            lines += _section(title, definition, schema["$defs"])
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, definition: dict[str, Any], known: dict[str, Any]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        _one_line(definition.get("description", "")),
        "",
        "| key | value | default | |",
        "|---|---|---|---|",
    ]
    needed = definition.get("required", ())
    for key, found in definition["properties"].items():
        default = "needed" if key in needed else f"`{_shown(found.get('default'))}`"
        if isinstance(found.get("default"), dict) or ("default" not in found and key not in needed):
            default = ""
        text = _one_line(found.get("description", "")).replace("|", "\\|")
        lines.append(f"| `{key}` | {_kind(found, known)} | {default} | {text} |")
    return [*lines, ""]


def _kind(found: dict[str, Any], known: dict[str, Any]) -> str:
    """What a key takes, in words."""
    if "$ref" in found:
        name = found["$ref"].rpartition("/")[2]
        return _kind(known[name], known) if "properties" not in known[name] else "a section"
    for words in ("anyOf", "allOf", "oneOf"):
        if words in found:
            return " or ".join(dict.fromkeys(_kind(item, known) for item in found[words]))
    if "enum" in found:
        return ", ".join(f"`{_shown(item)}`" for item in found["enum"])
    if "const" in found:
        return f"`{_shown(found['const'])}`"
    if found.get("type") == "array":
        return f"a list of {_kind(found.get('items', {}), known)}"
    limits = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {found[key]:g}" for key, sign in limits.items() if key in found]
    kinds = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false", "null": "null"}
    kind = kinds.get(str(found.get("type")), "a mapping")
    return f"{kind} {' and '.join(bounds)}".rstrip()


def _shown(value: Any) -> str:
    """As YAML has it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def verbs_page() -> str:
    """All verbs with their options, as --help has them."""
    lines = ["# The verbs", "", "Written by `python docs/generate.py` from `shardwright VERB --help`.", ""]
    for name, verb in VERBS.items():
        command: Any = typer.main.get_command(build_app(name))
        lines += [f"## {name}", "", verb.summary, ""]
        lines += list(_options(command.commands[name], f"shardwright {name}"))
    return "\n".join(lines).rstrip() + "\n"


def _options(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from (f"### {path} {name}", "")
            yield from _options(inner, f"{path} {name}")
        return
    context = command.make_context(path, [], resilient_parsing=True)
    places = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    arguments = " ".join(parameter.metavar or parameter.name.upper() for parameter in places)
    yield from (f"`{path} {arguments}`".replace(" `", "`"), "")
    if command.help:
        yield from (_one_line(command.help), "")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            yield f"- `{_one_line(record[0])}` {_one_line(record[1])}".rstrip()
    yield ""


@dataclass(frozen=True)
class Row:
    """A technique, when it is the one to take, and a run of it to predict; `recipe` is another
    model's where it must be.
    """

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
        "the model fits with room to spare",
        "cuts/data.md",
        _FULL | {"layout": Layout(dp_replicate=8)},
    ),
    Row(
        "ZeRO-1",
        "optimizer states are cut over the GPUs",
        "it nearly fits",
        "cuts/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=1)},
    ),
    Row(
        "ZeRO-2",
        "gradients, too",
        "it does not fit yet, few micro-batches",
        "cuts/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=2)},
    ),
    Row(
        "ZeRO-3 (FSDP)",
        "parameters, too: gathered when used",
        "the first thing to try when it does not fit",
        "cuts/data.md",
        _FULL | {"layout": _ZERO3},
    ),
    Row(
        "tensor (tp)",
        "every matrix is cut within a node",
        "ZeRO's batch gets too large, or a layer too large",
        "cuts/tensor.md",
        _FULL | {"layout": Layout(tp=8, sequence_parallel=False)},
    ),
    Row(
        "+ sequence (sp)",
        "norms and residuals are cut as well",
        "always with tp",
        "cuts/tensor.md",
        _FULL | {"layout": Layout(tp=8)},
    ),
    Row(
        "pipeline (pp)",
        "layers are dealt to GPUs",
        "links between nodes are slow, many micro-batches",
        "cuts/pipeline.md",
        _FULL | {"layout": Layout(pp=4, dp_shard=2, zero_stage=1)},
    ),
    Row(
        "context (cp)",
        "the sequence is cut, keys go round",
        "one sequence is too long for a GPU",
        "cuts/context.md",
        _FULL | {"layout": Layout(dp_shard=2, cp=4, zero_stage=3, cp_method="ring")},
    ),
    Row(
        "expert (ep)",
        "experts are dealt to GPUs, tokens travel",
        "the model has experts",
        "cuts/expert.md",
        {"layout": Layout(dp_shard=8, ep=8, zero_stage=3)} | _FULL,
        "qwen3-30b-a3b",
    ),
    Row("recompute none", "activations are kept", "memory is left", "planning.md", {"layout": _ZERO3, "recompute": "none"}),
    Row(
        "recompute selective",
        "all but products and attention are computed again",
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
        "products in 32 bits",
        "to check the others against",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "fp32"},
    ),
    Row(
        "precision bf16",
        "products in 16 bits, masters in 32",
        "always on a GPU that has it",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "bf16"},
    ),
    Row("precision fp8", "products in 8 bits", "predicted only", "planning.md", _FULL | {"layout": _ZERO3, "precision": "fp8"}),
    Row(
        "offload",
        "optimizer states on the host",
        "predicted only",
        "planning.md",
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


def techniques() -> str:
    """The table of techniques with what the planner predicts of each, on one node and with the same
    global batch.
    """
    cluster = parse_cluster(CLUSTER)
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    recipes = {row.recipe: load_recipe(ROOT / "recipes" / f"{row.recipe}.yaml") for row in ROWS}
    predictors = {name: Predictor(get_model_facts(read_planning_shape(recipe)), cluster, efficiency) for name, recipe in recipes.items()}
    lines = ["| technique | what it does | take it when | predicted layout | GiB a GPU | tokens/s |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        candidate = _with_batch(replace(Candidate(Layout(), SEQUENCE if row.recipe == "llama3-8b" else 4096), **row.change))
        prediction = predictors[row.recipe].predict(candidate)
        memory = f"{prediction.memory.total / GIB_BYTES:.0f}" + ("" if prediction.fits else " (does not fit)")
        layout = candidate.describe() + ("" if row.recipe == "llama3-8b" else f" ({row.recipe})")
        speed = format_count(prediction.tokens_per_second) if prediction.fits else "-"
        lines.append(f"| [{row.technique}]({row.page}) | {row.does} | {row.when} | {layout} | {memory} | {speed} |")
    room = next(iter(predictors.values())).capacity_bytes / GIB_BYTES
    told = f"llama3-8b on {cluster.name}, {SEQUENCE:,} tokens a sequence, {GLOBAL_BATCH} sequences a step, bf16 and micro batch 1"
    lines += ["", f"{told} where not said otherwise; a run may fill {room:.0f} GiB of a GPU.", ""]
    return "\n".join(lines)


def _with_batch(candidate: Candidate) -> Candidate:
    """The same global batch for all: accumulation takes what the data ranks leave."""
    return replace(candidate, micro_batch_size=1, gradient_accumulation_steps=GLOBAL_BATCH // candidate.layout.data_ranks)


def main() -> None:
    """Write what differs."""
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"written: {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
