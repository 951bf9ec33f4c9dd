"""Public Python API: `import shardwright as sw`. The verbs of the command line are built on it.

Functions that take a recipe take a `Recipe`, the path of a YAML file, or a mapping with the same
keys. Torch is imported by the functions that need it, never by the import of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.architecture import HFShape, read_recipe_shape
from shardwright.config.recipe_source import RecipeSource, check_integer, list_texts, load_recipe
from shardwright.errors import InputError
from shardwright.placement import place_model
from shardwright.plans import PrecisionChoice, complete_plan, resolve_degrees

if TYPE_CHECKING:
    from shardwright.config.run import DeviceKind
    from shardwright.data.sources.source_files import ProgressOpener
    from shardwright.hardware import Cluster
    from shardwright.inference.adapter_export import ExportedAdapters
    from shardwright.inference.generation import Completion
    from shardwright.inference.model_source import ModelSource
    from shardwright.model.hf.hf_folder import ExportedFolder
    from shardwright.planner.planning_result import PlanningResult
    from shardwright.rehearsal.rank_rehearsal import RankRehearsal
    from shardwright.rehearsal.rehearsal import Rehearsal
    from shardwright.report.recorded_run import Run
    from shardwright.verification.verification import CellResult, VerificationReport


def plan(
    recipe: RecipeSource,
    cluster: Cluster | str | None = None,
    *,
    num_nodes: int = 1,
    link: str | None = None,
    profile: str | Path | None = None,
    num_layouts: int = 10,
    precision: str | None = None,
    lora_rank: int | None = None,
    is_quantised: bool = False,
    gpu_counts: tuple[int, ...] = (),
    should_explain: bool = False,
    should_use_measured_steps: bool = True,
    should_read_data: bool = False,
    expert_load_run: str | Path | None = None,
) -> PlanningResult:
    """Rank a recipe's layouts by predicted tokens/s, with memory and time by part.

    Nothing is started, and no data is read unless `should_read_data`.

    Args:
        cluster: devices of a node such as `8xH100-80GB`, or a `Cluster`; None: the recipe's
            `cluster`.
        num_nodes, link, profile: number of such nodes, link between them, and file of measured
            rates (`doctor --calibrate`); only with the text of a cluster.
        precision: instead of the recipe's; `nvfp4` is experimental (docs/low-precision.md).
        lora_rank: train adapters of this rank; with `is_quantised` over NF4 weights (QLoRA).
        gpu_counts: numbers of devices whose throughput is predicted too.
        should_explain: add sentences that explain the choice.
        should_use_measured_steps: correct the predictions by the step times that `tune` measured
            on the same hardware, if there are any.
        should_read_data: predict times with the row lengths and documents of the recipe's data,
            which is prepared unless it is in the cache. Measured step times are then not used.
        expert_load_run: folder of an earlier run of a sparse model, whose logged loads of experts
            are used instead of even ones. Measured step times are then not used.

    Raises:
        InputError: unknown devices, link or precision, an unsupported model, data that cannot be
            prepared (with `should_read_data`), a run without loads of this model's experts, or a
            damaged file of measured step times.
    """
    from shardwright.planner.cluster_choice import choose_cluster
    from shardwright.planner.expert_loads import read_logged_loads
    from shardwright.planner.planning_result import plan_recipe
    from shardwright.planner.problem import (
        build_low_rank_adapter,
        parse_precision,
        read_planning_shape,
    )
    from shardwright.planner.step_profile import read_step_profile

    loaded = load_recipe(recipe)
    if num_layouts < 1:
        raise InputError("too small", field="num_layouts", got=num_layouts, allowed="at least 1")
    target = choose_cluster(loaded, cluster, num_nodes=num_nodes, link=link, profile=profile)
    expert_loads = (
        None
        if expert_load_run is None
        else read_logged_loads(expert_load_run, loaded, read_planning_shape(loaded))
    )
    rows = None
    if should_read_data:
        from shardwright.training.checks.row_lengths import prepare_training_rows

        rows = prepare_training_rows(loaded, target.num_gpus)
    step_profile = None
    if should_use_measured_steps and not should_read_data and expert_loads is None:
        step_profile = read_step_profile(target)
    return plan_recipe(
        loaded,
        target,
        num_layouts=num_layouts,
        precision=parse_precision(precision),
        adapter=build_low_rank_adapter(lora_rank, is_quantised=is_quantised),
        gpu_counts=gpu_counts,
        should_explain=should_explain,
        step_profile=step_profile,
        rows=rows,
        expert_loads=expert_loads,
    )


def rehearse(
    recipe: RecipeSource,
    world_size: int,
    *,
    device: DeviceKind = "auto",
    should_run_each_rank: bool | None = None,
    should_run_each_micro_batch: bool = False,
    on_start: Callable[[PrecisionChoice | None], None] = lambda _choice: None,
    on_report: Callable[[RankRehearsal], None] = lambda _report: None,
) -> Rehearsal:
    """Run one real optimizer step of each role on fake devices: memory and collectives.

    Args:
        device: whose operators run: `cpu`, `cuda`, or `auto` (CUDA if present and not excluded).
        should_run_each_rank: run every rank instead of one per role; default up to 8 ranks.
        should_run_each_micro_batch: run all micro-batches of the step. By default, those that
            repeat earlier ones are counted: two periods must be equal in memory and collectives.
        on_start: called once with the precision that `auto` resolved to, None if the recipe
            names it.
        on_report: called with each rank's report when it is finished.

    Raises:
        InputError: the recipe, its layout or its model cannot run, or the device is missing.
    """
    check_integer(world_size, "world_size")
    loaded = load_recipe(recipe)
    shape = read_recipe_shape(loaded)
    layout, batch = resolve_degrees(loaded, world_size)
    placement = place_model(shape, layout, batch.sequence_length)
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.launch.auto_layout import (
        choose_planned_precision,
        resolve_expert_dispatch_here,
        resolve_recompute_here,
        take_planned_memory,
    )
    from shardwright.rehearsal import rehearsal

    device_type = rehearsal.choose_device(device, loaded)
    choice = choose_planned_precision(loaded)
    on_start(choice)
    plan = complete_plan(loaded, placement, batch, choice)
    plan = resolve_recompute_here(loaded, resolve_expert_dispatch_here(loaded, plan))
    loaded, plan, settings = take_planned_memory(loaded, plan)
    return rehearsal.rehearse(
        loaded,
        plan,
        settings=settings,
        device=device_type,
        should_run_each_rank=should_run_each_rank,
        should_run_each_micro_batch=should_run_each_micro_batch,
        on_report=on_report,
    )


def verify(
    recipe: RecipeSource,
    layouts: Sequence[str] = (),
    *,
    max_ranks: int = 4,
    dtypes: Sequence[str] = (),
    num_layers: int | None = None,
    hidden_size: int | None = None,
    sequence_length: int | None = None,
    is_full: bool = False,
    on_start: Callable[[PrecisionChoice | None], None] = lambda _choice: None,
    on_result: Callable[[CellResult], None] = lambda _result: None,
) -> VerificationReport:
    """Compare loss, raw gradients, gradient norm and updated weights of layouts with one process.

    Layouts compile what a run of the recipe compiles on this machine.

    Args:
        layouts: such as `zero_stage=3`; default every layout of data ranks.
        max_ranks: most ranks to start, all on this machine's CPU.
        dtypes: `float32`, `float64`; default both.
        num_layers, hidden_size: verify a smaller model of the same kind.
        sequence_length: tokens per row; default the recipe's, at most 32.
        is_full: every combination of accumulation, recomputation, tying and dropout instead of
            three of them.
        on_start: called once before ranks start, with the precision that `auto` would use.

    Raises:
        InputError: the recipe, a layout or a dtype is not supported.
    """
    loaded = load_recipe(recipe)
    check_integer(max_ranks, "max_ranks")
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.launch.auto_layout import choose_planned_precision
    from shardwright.verification.cases import (
        choose_cases,
        choose_dtypes,
        choose_hf_cases,
        choose_layouts,
        read_verification_shape,
        shrink_shape,
    )
    from shardwright.verification.rank_pool import RankPool
    from shardwright.verification.verification import verify as verify_layouts

    chosen_dtypes = choose_dtypes(list_texts(dtypes, "dtypes"))
    chosen_layouts = choose_layouts(list_texts(layouts, "layouts"), max_ranks, loaded.layout)
    shape = shrink_shape(
        read_verification_shape(loaded), num_layers=num_layers, hidden_size=hidden_size
    )
    list_cases = choose_hf_cases if isinstance(shape, HFShape) else choose_cases
    on_start(choose_planned_precision(loaded))
    with RankPool(timeout_seconds=300.0) as pool:  # compiling takes long
        return verify_layouts(
            loaded,
            shape,
            chosen_layouts,
            list_cases(shape.tied_embeddings, is_full=is_full),
            chosen_dtypes,
            sequence_length=sequence_length or min(32, loaded.training.sequence_length),
            pool=pool,
            on_result=on_result,
        )


def train(
    recipe: RecipeSource,
    *,
    num_ranks: int | None = None,
    resume: bool = False,
    resume_if_started: bool = False,
    allow_drift: Sequence[str] = (),
    open_progress: ProgressOpener = nullcontext,
) -> Run | None:
    """Train a recipe, in this process unless `num_ranks` is more than one; return the run.

    Under torchrun or srun this process is one of their ranks, and ranks but the first return
    None. Ctrl-C, SIGTERM and SIGHUP save a checkpoint and raise `Preempted`; a second Ctrl-C
    raises `KeyboardInterrupt` without saving.

    Args:
        num_ranks: ranks to start on this machine; default 1, in this process.
        resume: continue the run, which must exist.
        resume_if_started: continue the run if it exists, else start it.
        open_progress: opens a progress display for reading and tokenising data.

    Raises:
        InputError: first problem found, before any rank starts.
        RunFailed, Preempted: the run failed or was stopped.
    """
    from shardwright.launch.world_sizes import resolve_training_layout

    check_integer(num_ranks, "num_ranks")
    original = load_recipe(recipe)
    loaded, _world_size = resolve_training_layout(original, num_ranks)
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.training.run import train as train_recipe

    summary = train_recipe(
        loaded,
        num_ranks=num_ranks,
        resume=resume,
        resume_if_started=resume_if_started,
        allow_drift=list_texts(allow_drift, "allow_drift"),
        open_progress=open_progress,
        planned_from=original if original.layout.auto else None,
    )
    return None if summary is None else load_run(summary["run"])


def generate(
    source: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    should_stop_at_eos: bool = True,
    should_slide: bool = False,
    checkpoint: str | int = "latest",
    device: str = "auto",
    dtype: str = "auto",
    on_load: Callable[[ModelSource], None] = lambda _model: None,
    on_text: Callable[[str], None] | None = None,
) -> Completion:
    """Continue a prompt with the model of a run folder or of a Hugging Face folder.

    Args:
        temperature: 0 takes the most likely token every time.
        top_k, top_p: sample from the k most likely tokens, from the smallest set of tokens whose
            probabilities reach p.
        seed: sampling seed; results are the same on every device.
        should_slide: at the model's maximum length, drop the older half of the text and continue.
        checkpoint: `latest`, `best` or a step; only for a run.
        device, dtype: `auto` is CUDA if available, and bf16 there, else fp32 on the CPU.
        on_load: called once with the model that was opened.
        on_text: called with the prompt and then with each piece of text when it is complete.

    Raises:
        InputError: no model there, or a value that is not allowed.
    """
    if not isinstance(prompt, str):
        raise InputError("not text", field="prompt", got=repr(prompt), allowed="a text")
    import torch

    from shardwright.inference.generation import SamplingSettings, complete_prompt, encode_prompt
    from shardwright.inference.model_source import (
        load_decoder,
        open_model_source,
        parse_device,
        parse_dtype,
    )

    torch_device = parse_device(device)
    default_dtype = torch.float32 if torch_device.type == "cpu" else torch.bfloat16
    model = open_model_source(source, str(checkpoint))
    tokenizer = model.load_tokenizer()
    decoder = load_decoder(model, device=torch_device, dtype=parse_dtype(dtype, default_dtype))
    on_load(model)
    encode_prompt(decoder, tokenizer, prompt)  # raise for an invalid prompt before it is shown
    unshown = [prompt]

    def show(text: str) -> None:
        if on_text is not None:
            # Not before the first text: the first pass logs lines, in the middle of the prompt's.
            for shown in (*unshown, text):
                on_text(shown)
            unshown.clear()

    completion = complete_prompt(
        decoder,
        tokenizer,
        prompt,
        SamplingSettings(temperature, top_k, top_p, seed),
        max_new_tokens=max_new_tokens,
        stop_ids=model.stop_ids(tokenizer) if should_stop_at_eos else (),
        should_slide=should_slide,
        on_text=show,
    )
    if unshown:
        show("")
    return completion


def export(
    source: str | Path,
    folder: str | Path,
    *,
    dtype: str = "auto",
    quantise: str | None = None,
    quantise_exclude: Sequence[str] = (),
    checkpoint: str | int = "latest",
    max_shard_bytes: int = 5_000_000_000,
    should_overwrite: bool = False,
    should_check: bool = True,
    should_merge: bool = False,
    on_load: Callable[[ModelSource], None] = lambda _model: None,
) -> ExportedFolder | ExportedAdapters:
    """Write a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads.

    A run with adapters writes the adapter folder for peft, or with `should_merge` the whole model.

    Args:
        dtype: of the written weights; `auto` is the training precision.
        quantise: `fp8-block` or `fp8-row` stores the matrices of the blocks in 8 bits, as
            inference servers read them.
        quantise_exclude: patterns of weights that stay in `dtype`.
        max_shard_bytes: maximum size of one weights file.
        should_overwrite: replace a folder that is not empty, if it contains nothing but a model.
        should_check: load the folder with transformers (or peft) and compare logits; otherwise
            the tensors are read back.

    Raises:
        InputError: no model there, a folder that must not be written, or a value that is not
            allowed.
    """
    import torch

    from shardwright.inference.adapter_export import (
        check_merged_logits,
        export_adapters,
        merge_adapters,
        refuse_quantised_adapters,
    )
    from shardwright.inference.export import export_hf_folder, select_quantisation
    from shardwright.inference.model_source import open_model_source, parse_dtype
    from shardwright.model.hf.export_folder import check_export_folder

    # Before any weights are read: merging and comparing a large model takes minutes.
    check_export_folder(folder, should_overwrite=should_overwrite, sources=(source,))
    model = open_model_source(source, str(checkpoint))
    if model.base is not None:
        check_export_folder(folder, should_overwrite=should_overwrite, sources=(model.base,))
    on_load(model)
    if model.shape.adapters is not None and not should_merge:
        refuse_quantised_adapters(quantise)
        return export_adapters(
            model,
            Path(folder),
            dtype=parse_dtype(dtype, torch.float32),
            overwrite=should_overwrite,
            check=should_check,
        )
    exported = merge_adapters(model) if should_merge else model
    quantisation = select_quantisation(
        exported, quantise, list_texts(quantise_exclude, "quantise_exclude")
    )
    if should_merge and should_check:
        check_merged_logits(model, exported)
    return export_hf_folder(
        exported,
        Path(folder),
        dtype=parse_dtype(dtype, exported.dtype),
        quantisation=quantisation,
        max_shard_bytes=max_shard_bytes,
        overwrite=should_overwrite,
        check=should_check,
    )


def load_run(path: str | Path) -> Run:
    """Read a run folder: its events, curves and summary.

    `run.table("step")` has the steps as columns, `run.table("evaluation")` the evaluations;
    docs/events.md lists kinds and fields.

    Raises:
        InputError: there are no events, or none is readable.
    """
    from shardwright.report.recorded_run import load_run as load_recorded_run

    return load_recorded_run(path)
