"""`shardwright plan`: the best layouts of a recipe on a cluster, what they cost, and why the others lose."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.pages import HtmlOutput, write_page, write_text
from shardwright.config import load_recipe
from shardwright.errors import InputError, LayoutError

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.hardware import Cluster
    from shardwright.planner.answer import Answer
    from shardwright.planner.candidate import Adapter
    from shardwright.planner.prediction import Prediction

SCHEMA_VERSION = 1

_MOST_DIGITS = 18
"""Of a number of GPUs; int() refuses more than 4,300."""


ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="GPUS", help="Devices of a node, e.g. 8xH100-80GB; a name that is not known lists those that are."
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="How many such nodes.")]
LinkName = Annotated[
    str | None, typer.Option("--link", help="Between nodes: ib400, eth100, ... Default: what is usual.", show_default=False)
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Rates measured on the machine (doctor --calibrate).", show_default=False)
]
Top = Annotated[int, typer.Option("--top", min=1, max=100, help="Layouts to show.")]
GpuCounts = Annotated[
    str | None, typer.Option("--gpus", metavar="N,N,...", help="How throughput grows with the number of GPUs.", show_default=False)
]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", help="Instead of the recipe's; fp8 and nvfp4 are predicted only.", show_default=False)
]
LoraRank = Annotated[
    int | None, typer.Option("--lora", min=1, metavar="RANK", help="Train low-rank adapters only.", show_default=False)
]
Quantised = Annotated[bool, typer.Option("--quantised", help="With --lora: hold the frozen weights in NF4 (QLoRA).")]
Emit = Annotated[
    str | None,
    typer.Option(
        "--emit",
        metavar="SYSTEM",
        help="Write the chosen layout for deepspeed, accelerate, torchtitan or megatron, in place of the table.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="With --emit: write it there, below the table.", show_default=False)
]
Explain = Annotated[bool, typer.Option("--explain", help="Say why, with the numbers behind it.")]


def plan_command(
    recipe: RecipePath,
    cluster: ClusterText,
    nodes: Nodes = 1,
    link: LinkName = None,
    profile: ProfilePath = None,
    overrides: Overrides = None,
    top: Top = 10,
    gpus: GpuCounts = None,
    precision: PrecisionName = None,
    lora: LoraRank = None,
    quantised: Quantised = False,
    emit: Emit = None,
    out: Out = None,
    why: Explain = False,
    html: HtmlOutput = None,
    json_output: JsonOutput = False,
) -> None:
    """Rank the layouts of a recipe by predicted tokens/s, with memory and time by part; nothing is started, no data is read."""
    started = time.perf_counter()
    _check_emit(emit, out)
    checked = load_recipe(recipe, overrides or [])
    # Imported here: the catalogue and the planner cost time that `--help` need not pay.
    from shardwright.hardware.load import parse_cluster
    from shardwright.hardware.profile import load_profile
    from shardwright.planner.answer import answer

    where = parse_cluster(cluster, nodes=nodes, link=link, profile=None if profile is None else load_profile(profile))
    adapter, counts = _adapter(lora, quantised), _counts(gpus)
    found = answer(checked, where, top=top, precision=_precision(precision), adapter=adapter, gpu_counts=counts, explained=why)
    seconds = time.perf_counter() - started
    if html is not None:
        from shardwright.report.plans import render_plan

        write_page(html, render_plan(checked.name, where, found))
    written = None if emit is None or found.chosen is None else _emitted(emit, checked, found.chosen, where.num_nodes, out)
    if json_output:
        told = {"schema_version": SCHEMA_VERSION} | _as_dict(found, checked, where) | {"emitted": written, "seconds": seconds}
        sys.stdout.write(json.dumps(told) + "\n")
        _warn(found)
    elif written is not None and out is None:
        if found.precision_reason is not None:
            sys.stderr.write(f"precision auto: {found.precision_reason}\n")
        sys.stdout.write(written["text"])
        _warn(found)
    else:
        from shardwright.cli.plan_table import show

        show(found, checked, where, top=top, seconds=seconds)
    if found.chosen is None:
        raise LayoutError(
            f"nothing fits on {where.name}" if found.effort.num_too_large else f"nothing can be cut over {where.name}",
            field="--cluster",
            got=f"{where.num_gpus} GPUs of {where.accelerator.memory_bytes / 2**30:.0f} GiB",
            remedy=found.remedy,
        )


def _warn(found: Answer) -> None:
    """Say on standard error that the chosen layout is tight; the table says it itself."""
    if found.chosen is not None and found.chosen.warning is not None:
        sys.stderr.write(f"warning: the chosen layout {found.chosen.warning}\n")


def _check_emit(system: str | None, out: Path | None) -> None:
    """Refuse a system that is not known before anything is planned."""
    if system is not None:
        from shardwright.interop.emit import check_system

        check_system(system)
    elif out is not None:
        raise InputError("there is nothing to write", field="--out", got=str(out), remedy="Say for which system (--emit deepspeed)")


def _emitted(system: str, recipe: Recipe, chosen: Prediction, num_nodes: int, out: Path | None) -> dict[str, Any]:
    """The chosen layout as another system's configuration; what that cannot say goes to standard error, too."""
    from shardwright.config.adapters import AdapterSection, QuantizeKind
    from shardwright.config.training import PrecisionKind
    from shardwright.interop.emit import emit
    from shardwright.interop.emitted import Subject
    from shardwright.plan import resolve
    from shardwright.planner.automatic import put_in

    candidate = chosen.candidate
    settled = put_in(recipe, candidate)
    if candidate.adapter is not None:
        quantize: QuantizeKind | None = "nf4" if candidate.adapter.quantised else None
        settled = settled.model_copy(update={"adapters": AdapterSection(rank=candidate.adapter.rank, quantize=quantize)})
    if candidate.precision in get_args(PrecisionKind):
        settled = settled.model_copy(update={"precision": settled.precision.model_copy(update={"kind": candidate.precision})})
    else:
        raise InputError("is predicted only", field="--precision", got=candidate.precision, remedy="Leave it out to --emit a plan")
    told = emit(system, Subject(settled, resolve(settled, chosen.num_gpus), candidate.offload, num_nodes))
    for note in told.notes:
        sys.stderr.write(f"not expressed: {note}\n")
    if out is not None:
        write_text(out, told.text)
    return {"system": system, "text": told.text, "notes": list(told.notes), "out": None if out is None else str(out)}


def _adapter(rank: int | None, quantised: bool) -> Adapter | None:
    from shardwright.planner.candidate import Adapter

    if rank is None:
        if quantised:
            raise InputError("frozen weights are what adapters leave", field="--quantised", remedy="Give --lora RANK with it")
        return None
    return Adapter(rank, quantised=quantised)


def _precision(text: str | None) -> Any:
    from shardwright.planner.candidate import Precision

    if text is not None and text not in get_args(Precision):
        raise InputError("not a precision", field="--precision", got=text, allowed=", ".join(get_args(Precision)))
    return text


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= _MOST_DIGITS and int(word) > 0 for word in words):
        raise InputError("numbers of GPUs are wanted", field="--gpus", got=text, allowed="e.g. 8,16,32,64")
    return tuple(sorted({int(word) for word in words}))


def _as_dict(found: Answer, recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    from shardwright.planner.prediction import MEMORY_ERROR_SHARE

    steps = recipe.training.max_steps
    chosen = found.chosen

    def told(prediction: Any) -> dict[str, Any]:
        told: dict[str, Any] = prediction.as_dict()
        if steps is not None:
            told |= {"days": prediction.days(steps), "gpu_hours": prediction.gpu_hours(steps)}
        return told

    return {
        "recipe": recipe.name,
        "cluster": {
            "name": cluster.name,
            "num_gpus": cluster.num_gpus,
            "memory_bytes": cluster.accelerator.memory_bytes,
            "rates": cluster.rates,
        },
        "num_steps": steps,
        "chosen": None if chosen is None else told(chosen),
        "memory_error_share": MEMORY_ERROR_SHARE,
        "warning": None if chosen is None or chosen.warning is None else f"the chosen layout {chosen.warning}",
        "layouts": [told(prediction) for prediction in found.layouts],
        "as_the_recipe_has_it": None if found.stated is None else told(found.stated),
        "why_not_as_the_recipe_has_it": found.impossible,
        "rejected": [
            {
                "name": rejection.name,
                "reason": rejection.reason,
                "needed_bytes": rejection.needed_bytes,
                "change": rejection.change,
                "changed": None if rejection.changed is None else told(rejection.changed),
            }
            for rejection in found.rejections
        ],
        "scaling": [
            {
                "num_gpus": point.num_gpus,
                "efficiency": point.efficiency,
                "chosen": None if point.prediction is None else told(point.prediction),
            }
            for point in found.points
        ],
        "explanation": list(found.sentences),
        "search": asdict(found.effort),
        "precision_reason": found.precision_reason,
        "remedy": found.remedy,
    }
