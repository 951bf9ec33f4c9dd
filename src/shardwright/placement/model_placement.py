"""Placement of a model under a layout, computed once for planner, engine and verifier. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.architecture import HFShape, ModelShape
from shardwright.layout import Layout, ParameterLayout, PipelineStage
from shardwright.layout.context_method import ContextChoice, check_context_parallel
from shardwright.placement.parameter_layouts import build_parameter_layouts
from shardwright.placement.rules import check_hf_degrees, check_model_degrees
from shardwright.placement.stages import partition_stages


@dataclass(frozen=True)
class Placement:
    """A model under a layout that supports it."""

    shape: ModelShape
    layout: Layout
    stages: tuple[PipelineStage, ...] | None
    """Pipeline stages in the order in which tokens pass them; None without a pipeline."""
    context: ContextChoice | None
    """Method of context parallelism; None if one rank has whole rows."""

    @cached_property
    def parameters(self) -> dict[str, ParameterLayout]:
        """Descriptor of every parameter of the whole model, by name."""
        return build_parameter_layouts(self.shape, self.layout, self.stages)


def place_model(shape: ModelShape, layout: Layout, sequence_length: int) -> Placement:
    """Place a model under a layout, for rows of `sequence_length` tokens.

    Raises:
        LayoutError: the layout does not divide the model; names the numbers and the nearest
            degree that works.
        ScheduleError: an unknown schedule, or unsupported virtual stages.
    """
    if isinstance(shape, HFShape):
        check_hf_degrees(shape, layout)
        return Placement(shape, layout, None, None)
    stages = partition_stages(shape, layout, sequence_length)
    check_model_degrees(shape, layout, sequence_length)
    context = None
    if layout.cp > 1:
        context = check_context_parallel(
            layout,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            windows=tuple(layer.window for layer in shape.layers),
            sequence_length=sequence_length,
        )
    return Placement(shape, layout, stages, context)
