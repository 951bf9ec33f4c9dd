"""Record a training step of any PyTorch trainer, for `shardwright audit check`.

This file needs only torch and safetensors, so that it can be copied into another project:

    recorder = Recorder("audit", steps=[10])
    for batch in loader:
        with recorder.record_step(model):
            ...  # forward and backward passes, clipping, optimizer.step()

Every rank writes `step-NNNNNN/rank-NNNNN.safetensors` and a `.json` next to it. Nothing of the
environment is recorded. The recorder copies tensors and draws no random numbers, so the run
computes the same bits with and without it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

FORMAT_VERSION = 1
_WRAPPER_PREFIXES = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)
_PRIVATE_CONFIG_KEYS = frozenset({"_name_or_path", "name_or_path"})
_HASH_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd 64-bit factors of splitmix64, as signed integers."""


class RecorderError(ValueError):
    """A model, parameter or call that the recorder cannot describe."""


class ShardBox(NamedTuple):
    """Box of a parameter: where it begins in the local and in the whole tensor, and its size."""

    local_start: tuple[int, ...]
    global_start: tuple[int, ...]
    size: tuple[int, ...]


class ShardInfo(NamedTuple):
    """Description of a local tensor: shape of the whole parameter, and the boxes it contains."""

    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]
    kind: str = "by hand"


class Recorder:
    """Record steps of a training run; each rank has one.

    Use `record_step` around a step, or call `before_step`, `after_backward` and `after_step`, or
    pass `build_callback()` to a Hugging Face Trainer. Gradients are copied in `after_backward`;
    without that call, when `torch.nn.utils.clip_grad_norm_` is called, else when the optimizer
    steps.

    Args:
        folder: Output folder; the same on all ranks.
        steps: Numbers of the steps to record; the first step is 1.
        parameters: Patterns of parameter names to record (shell style). Others can only be
            checked with `shardwright audit check --model`.
        projections: Record this many numbers of each gradient, a random projection, in place of
            the gradient. The norm of a difference then has a relative standard error of
            1 / sqrt(2 x projections).
        config: Content of the model's config.json; default the model's own `config`.
        are_labels_shifted: True if label t is the target of position t; False if the loss shifts
            labels by one, as transformers does.
        data_rank: Number of this rank among those that read different rows. Ranks of one tensor
            parallel group have the same. Default: the rank.
        rank: Number of this rank, for trainers without torch.distributed.
        world_size: Number of ranks, for trainers without torch.distributed.
        tensor_parallel: (rank, size) in the tensor parallel group, for parameters with Megatron's
            attributes.
        shard_of: Describes parameters that the recorder does not recognise; returns None for
            those that it should describe itself.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: Collection[int] = (1,),
        parameters: str | Sequence[str] = "*",
        projections: int | None = None,
        config: Mapping[str, Any] | None = None,
        are_labels_shifted: bool = False,
        data_rank: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tensor_parallel: tuple[int, int] | None = None,
        shard_of: Callable[[str, Tensor], ShardInfo | None] | None = None,
    ) -> None:
        if projections is not None and projections < 8:
            raise RecorderError(f"projections is {projections}; give at least 8, or None")
        self.folder = Path(folder)
        if isinstance(steps, int | str) or not all(isinstance(s, int) and s >= 1 for s in steps):
            raise RecorderError(f"steps is {steps!r}; give numbers of steps from 1, such as [10]")
        self.steps = frozenset(steps)
        self.patterns = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        self.projections = projections
        self.config = config
        self.are_labels_shifted = are_labels_shifted
        self.data_rank = data_rank
        self.rank = rank
        self.world_size = world_size
        self.tensor_parallel = tensor_parallel
        self.shard_of = shard_of
        self.step = 0
        self._active: _StepRecord | None = None
        self._last: _StepRecord | None = None

    @contextlib.contextmanager
    def record_step(
        self, model: Any, batch: Any = None, optimizer: Any = None
    ) -> Iterator[Recorder]:
        """Return the context for one optimizer step, with all its micro-batches."""
        self.before_step(model, batch, optimizer)
        try:
            yield self
        except BaseException:
            self._detach()
            raise
        self.after_step(model)

    def before_step(
        self, model: Any, batch: Any = None, optimizer: Any = None, *, step: int | None = None
    ) -> None:
        """Begin a step, before its first forward pass.

        Args:
            model: The module that the training loop calls, or any object with
                `named_parameters`; then `batch` is required.
            batch: Fields that the model does not receive, such as labels or document ids: a
                mapping of tensors, or one mapping per micro-batch.
            optimizer: Records the learning rates at the start of the step, to detect a schedule
                that steps too early.
            step: Number of the step; default one more than before.
        """
        self._detach()
        self._last = None
        self.step = self.step + 1 if step is None else step
        if self.step in self.steps:
            self._active = _StepRecord(self, model, batch)
            if optimizer is not None:
                self._active.values["start_learning_rates"] = _list_learning_rates(optimizer)

    def after_backward(self, model: Any = None, **reported: float | Tensor | None) -> None:
        """Copy the gradients, after all micro-batches and before clipping."""
        if self._active is not None:
            self._active.copy_gradients("after_backward")
            self._active.report(reported)

    def after_step(self, model: Any = None, **reported: float | Tensor | None) -> None:
        """End a step after the optimizer's update, and write the files.

        Args:
            model: Not used; for symmetry with `before_step`.
            reported: `loss`, `gradient_norm` and `max_grad_norm`, as the trainer has them.
        """
        record = self._active
        if record is None:
            return
        self._detach()
        record.report(reported)
        record.finish()
        self._last = record

    def report(self, **reported: float | Tensor | None) -> None:
        """Add `loss`, `gradient_norm` or `max_grad_norm` to the current step, if it is recorded.

        The step may have ended; a later `before_step` begins another.
        """
        record = self._active or self._last
        if record is not None:
            record.report(reported)
            if record is self._last:
                record.write_values()

    def build_callback(self, trainer: Any = None) -> TrainerCallback:
        """Build the callback of a Hugging Face Trainer: `trainer.add_callback(...)`.

        Args:
            trainer: Needed with DeepSpeed only, whose engine callbacks do not get.
        """
        return TrainerCallback(self, trainer)

    def _detach(self) -> None:
        if self._active is not None:
            self._active.remove_hooks()
            self._active = None


class TrainerCallback:
    """Callback of a Hugging Face Trainer; it has the events without importing transformers.

    The logged loss is recorded if the Trainer logs every step.
    """

    def __init__(self, recorder: Recorder, trainer: Any = None) -> None:
        self.recorder = recorder
        self.trainer = trainer

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Begin to record a step."""
        optimizer = others.get("optimizer")
        accelerator = getattr(self.trainer, "accelerator", None)
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        model = model if wrapped is None else wrapped.engine
        self.recorder.before_step(model, None, optimizer, step=state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write a recorded step; the schedule has set the next learning rate by now."""
        self.recorder.after_step(max_grad_norm=args.max_grad_norm or None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Record the loss that the Trainer logs."""
        is_own_step = args.logging_steps == 1 and state.global_step in self.recorder.steps
        if is_own_step and logs and "loss" in logs:
            self.recorder.report(loss=logs["loss"], gradient_norm=logs.get("grad_norm"))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _StepRecord:
    """One step of one rank while it is recorded."""

    def __init__(self, recorder: Recorder, model: Any, batch: Any) -> None:
        self.recorder = recorder
        self.model = model
        self.tensors: dict[str, Tensor] = {}
        self.is_deepspeed = type(model).__name__ == "DeepSpeedEngine"
        self.is_fsdp1 = isinstance(model, nn.Module) and any(
            type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
        )
        is_distributed = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_distributed else 0
        rank = rank if recorder.rank is None else recorder.rank
        world_size = dist.get_world_size() if is_distributed else 1
        self.values: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": recorder.step,
            "rank": rank,
            "world_size": recorder.world_size or world_size,
            "data_rank": rank if recorder.data_rank is None else recorder.data_rank,
            "is_data_rank_given": recorder.data_rank is not None,
            "torch_version": torch.__version__,
            "are_labels_shifted": recorder.are_labels_shifted,
            "projections": recorder.projections,
            "patterns": list(recorder.patterns),
            "config": _describe_config(model) if recorder.config is None else dict(recorder.config),
            "wrapper": type(model).__name__,
            "is_training": getattr(model, "training", None),
            "dropout": _list_dropout(model),
            "adapter_scales": _list_adapter_scales(model),
            "padding_rows": _list_padding_rows(model),
            "gradients_copied_at": None,
            "compute_dtype": None,
            "micro_batches": [],
            "model_losses": [],
            "clip_calls": [],
            "optimizers": [],
            "squared_gradient_norms": {},
            "applied_scales": {},
        }
        self._handles: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._batches = [batch] if isinstance(batch, Mapping) else list(batch or ())
        self.names: dict[int, str] = {}
        with self._gather():
            self._describe_parameters()
            self._copy_parameters("before")
            self._copy_buffers()
            for name, parameter in self._list_recorded():
                if parameter.grad is not None and bool(_get_local(parameter.grad).any()):
                    self._store(f"start.{name}", parameter.grad)
        self._attach()
        if not isinstance(model, nn.Module):
            if not self._batches:
                raise RecorderError(
                    f"{type(model).__name__} is not a torch module, so its inputs cannot be seen; "
                    "give before_step the micro-batches: a list of mappings of tensors"
                )
            for index in range(len(self._batches)):
                self._add_micro_batch(index, {})

    def _list_parameters(self) -> list[tuple[str, Any]]:
        return [(strip_wrappers(name), p) for name, p in self.model.named_parameters()]

    def _list_recorded(self) -> list[tuple[str, Any]]:
        patterns = self.recorder.patterns
        return [
            (name, p)
            for name, p in self._list_parameters()
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]

    @contextlib.contextmanager
    def _gather(self) -> Iterator[None]:
        """Return the context in which parameters can be read; FSDP1 gathers them."""
        if not self.is_fsdp1:
            yield
            return
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(type(p).__name__ == "FlatParameter" for p in self.model.parameters()):
            raise RecorderError(
                "this FSDP model shows flat parameters without names; wrap it with "
                "use_orig_params=True for the recorded run"
            )
        with FullyShardedDataParallel.summon_full_params(
            self.model, writeback=False, with_grads=True
        ):
            yield

    def _describe_parameters(self) -> None:
        described: dict[str, Any] = {}
        recorded = self._list_recorded()
        if not recorded:
            raise RecorderError(
                f"no parameter matches {list(self.recorder.patterns)}; the model has "
                f"{[name for name, _ in self._list_parameters()[:5]]} and others"
            )
        for name, parameter in recorded:
            shard = self._describe_shard(name, parameter)
            described[name] = {
                "shape": list(shard.shape),
                "boxes": [[list(part) for part in box] for box in shard.boxes],
                "kind": shard.kind,
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "is_trainable": parameter.requires_grad,
            }
        self.values["parameters"] = described
        self.values["parameter_names"] = [name for name, _ in self._list_parameters()]
        self.names = {id(p): name for name, p in self._list_parameters()}
        ties = {}
        if isinstance(self.model, nn.Module):
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                owner = self.names.get(id(parameter))
                if owner is not None and strip_wrappers(name) != owner:
                    ties[strip_wrappers(name)] = owner
        self.values["ties"] = ties

    def _describe_shard(self, name: str, parameter: Any) -> ShardInfo:
        given = self.recorder.shard_of and self.recorder.shard_of(name, parameter)
        if given:
            return given
        # Before every other kind: a DTensor or an engine of DeepSpeed does not know either that
        # ranks have other experts under this name.
        if getattr(parameter, "allreduce", True) is False:
            raise RecorderError(
                f"{name} has allreduce=False: it is an expert's, and ranks have different experts "
                "under one name. Pass Recorder(shard_of=...), which returns ShardInfo(shape of "
                "all experts, boxes of them in the local tensor)"
            )
        if hasattr(parameter, "device_mesh"):
            return describe_dtensor(name, parameter)
        if self.is_deepspeed:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            return ShardInfo(shape, (_build_whole_box(shape),), "gathered by DeepSpeed")
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise RecorderError(
                f"{name} belongs to a DeepSpeed engine; give before_step the engine, not the "
                "model, and a Hugging Face Trainer's callback the trainer: build_callback(trainer)"
            )
        if getattr(parameter, "tensor_model_parallel", False):
            return self._describe_megatron(name, parameter)
        if type(parameter) not in (nn.Parameter, Tensor):
            raise RecorderError(
                f"{name} is a {type(parameter).__name__}, which the recorder does not recognise. "
                "Pass Recorder(shard_of=...): a function of name and parameter that returns "
                "ShardInfo(shape of the whole parameter, boxes of it in the local tensor)"
            )
        shape = tuple(parameter.shape)
        kind = "gathered by FSDP" if self.is_fsdp1 else "whole"
        return ShardInfo(shape, (_build_whole_box(shape),), kind)

    def _describe_megatron(self, name: str, parameter: Any) -> ShardInfo:
        if self.recorder.tensor_parallel is None or getattr(parameter, "partition_stride", 1) != 1:
            raise RecorderError(
                f"{name} has tensor_model_parallel=True. Pass Recorder(tensor_parallel=(rank, "
                "size)) and data_rank; for partition_stride other than 1, describe it by shard_of"
            )
        rank, size = self.recorder.tensor_parallel
        local = tuple(parameter.shape)
        dim = parameter.partition_dim
        start = [0] * len(local)
        start[dim] = rank * local[dim]
        shape = tuple(n * size if d == dim else n for d, n in enumerate(local))
        return ShardInfo(shape, (ShardBox((0,) * len(local), tuple(start), local),), "Megatron")

    def _store(self, key: str, tensor: Any) -> None:
        local = _get_local(tensor).detach()
        self.tensors[key] = local.to("cpu", copy=True).contiguous()

    def _copy_parameters(self, kind: str) -> None:
        for name, parameter in self._list_recorded():
            value = parameter
            if self.is_deepspeed:
                from deepspeed.utils import safe_get_full_fp32_param

                value = safe_get_full_fp32_param(parameter)
                value = parameter if value is None else value
            if kind == "before" or parameter.requires_grad:
                self._store(f"{kind}.{name}", value)

    def _copy_buffers(self) -> None:
        """Copy buffers that belong to the model's state, such as biases that balance experts."""
        if not isinstance(self.model, nn.Module):
            return
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_state = name not in module._non_persistent_buffers_set
                if is_state and buffer.is_floating_point() and not hasattr(buffer, "placements"):
                    self._store(f"buffer.{strip_wrappers(f'{path}.{name}'.lstrip('.'))}", buffer)

    def _attach(self) -> None:
        """Install the hooks that are removed when the step ends."""
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))
        modules: tuple[Any, ...] = (torch.nn.utils, torch.nn.utils.clip_grad)
        for module in modules:
            original = module.clip_grad_norm_
            self._restore.append(partial(setattr, module, "clip_grad_norm_", original))
            module.clip_grad_norm_ = self._wrap_clip(original)
        if self.is_deepspeed:
            self._wrap_engine_step()
        if not isinstance(self.model, nn.Module):
            return
        names = list(inspect.signature(_unwrap(self.model).forward).parameters)

        def before_forward(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                fields = dict(zip(names, args, strict=False)) | kwargs
                self._add_micro_batch(len(self.values["micro_batches"]), fields)

        def after_forward(_module: Any, _args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self.values["model_losses"].append(_find_loss(output))

        def after_linear(_module: Any, _args: Any, output: Any) -> None:
            if self.values["compute_dtype"] is None and isinstance(output, Tensor):
                self.values["compute_dtype"] = str(output.dtype).removeprefix("torch.")

        self._handles += [
            self.model.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(after_forward),
        ]
        linear = next((m for m in self.model.modules() if isinstance(m, nn.Linear)), None)
        if linear is not None:
            self._handles.append(linear.register_forward_hook(after_linear))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles.clear()
        self._restore.clear()

    def _add_micro_batch(self, index: int, fields: Mapping[str, Any]) -> None:
        if index < len(self._batches):
            fields = dict(self._batches[index]) | {k: v for k, v in fields.items() if v is not None}
        numbers = {}
        for key, value in fields.items():
            if isinstance(value, Tensor):
                self._store(f"input.{index}.{key}", value)
            elif isinstance(value, bool | int | float):
                numbers[key] = value
        self.tensors[f"rng.{index}"] = torch.get_rng_state()
        self.values["micro_batches"].append(numbers)

    def _wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            names = [self.names[id(p)] for p in listed if id(p) in self.names]
            if names:
                self.copy_gradients("clip_grad_norm_")
            norm = original(listed, max_norm, *args, **kwargs)
            if names:
                number = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                self.values["clip_calls"].append(
                    {"num_parameters": len(names), "max_norm": max_norm, "norm": float(number)}
                )
            return norm

        return clip

    def _wrap_engine_step(self) -> None:
        """Copy the gradients before the step in which DeepSpeed's engine clips and updates."""
        original = self.model.step
        is_managed = getattr(self.model, "managed_gradient_accumulation", lambda: True)()

        def step(*args: Any, **kwargs: Any) -> Any:
            # Without managed accumulation every call of `step` ends the accumulation.
            if not is_managed or self.model.is_gradient_accumulation_boundary():
                self.copy_gradients("engine's step")
            return original(*args, **kwargs)

        self.model.step = step
        self._restore.append(partial(delattr, self.model, "step"))

    def copy_gradients(self, moment: str) -> None:
        """Copy the gradients, unless an earlier call has."""
        if self.values["gradients_copied_at"] is not None:
            return
        self.values["gradients_copied_at"] = moment
        with self._gather():
            for name, parameter in self._list_recorded():
                gradient = self._read_gradient(parameter)
                if parameter.requires_grad and gradient is not None:
                    self._copy_gradient(name, gradient)

    def _read_gradient(self, parameter: Any) -> Any:
        if self.is_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(parameter) if parameter.requires_grad else None
        gradient = parameter.grad
        placements = getattr(gradient, "placements", ())
        if any(placement.is_partial() for placement in placements):
            whole = [_replicate() if p.is_partial() else p for p in placements]
            gradient = gradient.redistribute(placements=whole)
        return gradient

    def _copy_gradient(self, name: str, gradient: Any) -> None:
        local = _get_local(gradient).detach()
        square = float(local.double().square().sum())
        self.values["squared_gradient_norms"][name] = square
        self.values["parameters"][name]["gradient_dtype"] = str(local.dtype).removeprefix("torch.")
        if self.recorder.projections is None:
            self._store(f"gradient.{name}", local)
            return
        info = self.values["parameters"][name]
        boxes = [ShardBox(*(tuple(part) for part in box)) for box in info["boxes"]]
        self.tensors[f"projection.{name}"] = project(
            name, local.cpu(), tuple(info["shape"]), boxes, self.recorder.projections
        )

    def _before_optimizer(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Copy hyperparameters and states when an optimizer of this model steps.

        A closure given to `step` computes the gradients, so they are copied when it returns.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._copy_optimizer(optimizer)
            return None

        def run_closure() -> Any:
            loss = closure()
            self._copy_optimizer(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": run_closure}
        return (args[0], run_closure, *args[2:]), kwargs

    def _copy_optimizer(self, optimizer: Any) -> None:
        parameters = {
            self.names[id(p)]: (index, p)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if id(p) in self.names
        }
        if not parameters and not self.is_deepspeed:
            return
        self.copy_gradients("optimizer step")
        # Our optimizers multiply gradients in the update, which the check of the update notices.
        on_device = getattr(optimizer, "device_factor", None)
        factor = getattr(optimizer, "gradient_factor", 1.0)
        factor = factor if on_device is None else float(on_device.value)
        if math.isnan(factor):  # the device skips the update, as another optimizer is not called
            return
        groups = [_describe_group(group) for group in optimizer.param_groups]
        self.values["optimizers"].append(
            {
                "class": type(optimizer).__name__,
                "base_class": _find_torch_class(optimizer),
                "groups": groups,
                "group_of": {name: index for name, (index, _) in parameters.items()},
            }
        )
        self._optimizer = optimizer
        for name, (_, parameter) in parameters.items():
            is_checked = name in self.values["parameters"] and self.recorder.projections is None
            if self.is_fsdp1 or not is_checked:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                number = torch.tensor(float(value)) if isinstance(value, int | float) else value
                if isinstance(number, Tensor):
                    self._store(f"state.{name}.{key}", number)
            raw = self.tensors.get(f"gradient.{name}")
            if raw is not None and parameter.grad is not None:
                step_gradient = _get_local(parameter.grad).detach().cpu().double().flatten()
                square = float(raw.double().square().sum())
                if square > 0.0 and step_gradient.numel() == raw.numel():
                    product = float(step_gradient @ raw.double().flatten())
                    self.values["applied_scales"][name] = factor * product / square

    def report(self, reported: Mapping[str, Any]) -> None:
        unknown = set(reported) - {"loss", "gradient_norm", "max_grad_norm"}
        if unknown:
            raise RecorderError(
                f"{sorted(unknown)} cannot be reported; allowed: loss, gradient_norm, max_grad_norm"
            )
        for key, value in reported.items():
            if value is not None:
                number = value.full_tensor() if hasattr(value, "full_tensor") else value
                number = number.detach() if isinstance(number, Tensor) else number
                self.values[f"reported_{key}"] = float(number)

    def finish(self) -> None:
        """Copy the parameters after the step and write the files."""
        self.copy_gradients("end of the step")
        if not self.values["squared_gradient_norms"]:
            raise RecorderError(
                "no recorded parameter has a gradient; call after_backward before gradients are "
                "cleared, if the optimizer is not one of torch"
            )
        if self.recorder.projections is None:  # an update cannot be checked from projections
            with self._gather():
                self._copy_parameters("after")
        if self.values["optimizers"]:
            self.values["next_learning_rates"] = _list_learning_rates(self._optimizer)
        if not self.values["micro_batches"]:
            raise RecorderError(
                f"the forward pass of {type(self.model).__name__} was not called in this step; "
                "give before_step the module that the training loop calls"
            )
        path = self._path(".safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(self.tensors, partial)
        os.replace(partial, path)
        self.write_values()

    def write_values(self) -> None:
        path = self._path(".json")
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(_encode_numbers(self.values)), encoding="utf-8")
        os.replace(partial, path)

    def _path(self, suffix: str) -> Path:
        folder = self.recorder.folder / f"step-{self.values['step']:06d}"
        return folder / f"rank-{self.values['rank']:05d}{suffix}"


def strip_wrappers(name: str) -> str:
    """Remove the name parts that DDP, FSDP, torch.compile and recomputation add."""
    while (prefix := next((p for p in _WRAPPER_PREFIXES if name.startswith(p)), None)) is not None:
        name = name.removeprefix(prefix)
    for prefix in _WRAPPER_PREFIXES[1:]:
        name = name.replace(f".{prefix}", ".")
    return name


def describe_dtensor(name: str, tensor: Any) -> ShardInfo:
    """Describe the local part of a DTensor, of any placements, from its mesh coordinate.

    A strided placement (FSDP2 on a dimension that tensor parallelism shards) applies after the
    mesh dimensions to its right.
    """
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ShardInfo(shape, (), "DTensor")
    bounds = [(0, n) for n in shape]
    order = sorted(
        range(len(tensor.placements)),
        key=lambda axis: ("Strided" in type(tensor.placements[axis]).__name__, axis),
    )
    for axis in order:
        placement = tensor.placements[axis]
        if "Shard" in type(placement).__name__:
            start, length = bounds[placement.dim]
            piece = -(-length // mesh.size(axis))
            first = min(length, piece * coordinate[axis])
            bounds[placement.dim] = (start + first, min(length, first + piece) - first)
    size = tuple(length for _, length in bounds)
    if size != tuple(tensor.to_local().shape):
        raise RecorderError(
            f"{name} is a DTensor with placements {tensor.placements} whose local shape "
            f"{tuple(tensor.to_local().shape)} is not the expected {size}; describe it by "
            "Recorder(shard_of=...)"
        )
    box = ShardBox((0,) * len(shape), tuple(start for start, _ in bounds), size)
    return ShardInfo(shape, (box,) if math.prod(size) else (), "DTensor")


def project(
    name: str,
    local: Tensor,
    shape: Sequence[int],
    boxes: Sequence[ShardBox],
    num_projections: int,
) -> Tensor:
    """Project a local tensor to a few random numbers, a count sketch [num_projections], float64.

    Each element is added with a random sign to a random entry; both depend on the parameter's
    name and the element's index in the whole tensor, so projections of shards add up. Inner
    products are preserved in expectation (Charikar, Chen, Farach-Colton 2002).
    """
    out = torch.zeros(num_projections, dtype=torch.float64)
    for box in boxes:
        index = torch.zeros((), dtype=torch.int64)
        stride = 1
        part = local
        for dim in reversed(range(len(shape))):
            line = torch.arange(box.size[dim]) + box.global_start[dim]
            index = (line * stride).view(-1, *[1] * (len(shape) - 1 - dim)) + index
            stride *= shape[dim]
        for dim, (start, length) in enumerate(zip(box.local_start, box.size, strict=True)):
            part = part.narrow(dim, start, length)
        mixed = index.flatten() + zlib.crc32(name.encode()) * 0x9E3779B1
        for factor in _HASH_FACTORS:
            mixed = mixed * factor
            mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
        sign = ((mixed >> 40) & 1) * 2 - 1
        out.index_add_(0, (mixed & 0xFFFFFFF) % num_projections, part.flatten().double() * sign)
    return out


def _build_whole_box(shape: tuple[int, ...]) -> ShardBox:
    zeros = (0,) * len(shape)
    return ShardBox(zeros, zeros, shape)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _get_local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _unwrap(model: Any) -> Any:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return getattr(model, "_orig_mod", model)


def _find_loss(output: Any) -> float | None:
    """Return the loss in a model's output, if it has one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    return float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _describe_config(model: Any) -> dict[str, Any] | None:
    config: Any = getattr(_unwrap(model), "config", None)
    content = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(content, Mapping):
        return None
    plain_types = (str, int, float, bool, list, dict, type(None))
    return {
        key: value
        for key, value in content.items()
        if key not in _PRIVATE_CONFIG_KEYS and isinstance(value, plain_types)
    }


def _list_dropout(model: Any) -> dict[str, float]:
    """List modules whose dropout is active."""
    if not isinstance(model, nn.Module):
        return {}
    found = {}
    for name, module in model.named_modules():
        rate = getattr(module, "p", getattr(module, "attention_dropout", 0.0))
        is_dropout = "dropout" in type(module).__name__.lower() or hasattr(
            module, "attention_dropout"
        )
        if is_dropout and module.training and isinstance(rate, float) and rate > 0.0:
            found[strip_wrappers(name)] = rate
    return found


def _list_adapter_scales(model: Any) -> dict[str, float]:
    """List the factor of every active LoRA pair, by the name of its module."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        strip_wrappers(name): float(module.scaling[adapter])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and isinstance(getattr(module, "scaling", None), dict)
        for adapter in module.lora_A
    }


def _list_padding_rows(model: Any) -> dict[str, int] | None:
    """List the row of every embedding that gets no gradient, by the name of its module.

    None if the model is not a torch module.
    """
    if not isinstance(model, nn.Module):
        return None
    return {
        strip_wrappers(name): module.padding_idx
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }


def _to_number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _find_torch_class(optimizer: Any) -> str:
    """Return the class of torch that the optimizer is or extends."""
    bases = type(optimizer).__mro__
    return next(base.__name__ for base in bases if base.__module__.startswith("torch.optim"))


def _list_learning_rates(optimizer: Any) -> list[Any]:
    return [_to_number(group.get("lr")) for group in optimizer.param_groups]


def _describe_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the numbers of a parameter group."""
    described = {}
    for key, value in group.items():
        value = _to_number(value)
        if key != "params" and isinstance(value, bool | int | float | tuple | list):
            described[key] = [_to_number(v) for v in value] if isinstance(value, tuple) else value
    return described


def _encode_numbers(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _encode_numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_numbers(each) for each in value]
    return value
