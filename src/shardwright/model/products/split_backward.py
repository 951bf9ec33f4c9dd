"""Compiled blocks under schedules with a split backward pass.

torch.compile makes one graph of a block's backward pass, which computes all gradients at once.
Here that graph is divided into two, compiled one by one: the first computes the gradients of
inputs, norms and biases; the second those of matrices, from its inputs and results of the first.
Under I the second waits in the `WeightGradientStore`, with the tensors that it reads, until W.
In other backward passes it follows the first at once.

torch has no public function for this: docs/decisions/0174-compiled-split-backward.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from shardwright.model.products.product import WeightGradientStore, accumulate_gradient

CompiledGraph = Callable[[list[Any]], Sequence[Any]]
"""Compiled graph; it takes a list of its inputs and empties it."""


class GraphCompiler(Protocol):
    """Compile a backward graph; its first inputs have fixed addresses if `has_static_inputs`."""

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], /, *, has_static_inputs: bool
    ) -> CompiledGraph: ...


BackwardCompiler = Callable[[fx.GraphModule, Sequence[Any], GraphCompiler], CompiledGraph]
"""Divides a backward graph and compiles both parts."""
BlockCompiler = Callable[[fx.GraphModule, Sequence[Any], BackwardCompiler], Callable[..., Any]]
"""Compiles a block's graph, and its backward graph by the given function."""


class SplitBackward:
    """Backend of torch.compile that divides backward graphs.

    All blocks need the same instance: torch compiles again for another backend.
    """

    def __init__(
        self,
        store: WeightGradientStore,
        compile_block: BlockCompiler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Build a backend.

        Args:
            store: collects the gradients that I leaves to W.
            compile_block: None compiles with Inductor.
            options: options of Inductor.
        """
        self._store = store
        self.inductor_options = options or {}
        self._compile_block = compile_block or partial(
            compile_with_inductor, options=self.inductor_options
        )
        self._matrices: list[nn.Parameter] = []
        """Matrices of the block whose backward pass runs."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_parameter = [isinstance(value, nn.Parameter) for value in inputs]
        is_matrix = [
            known and value.ndim > 1 for known, value in zip(is_parameter, inputs, strict=True)
        ]
        run_block = self._compile_block(
            graph,
            inputs,
            partial(self._compile_backward, is_matrix=is_matrix, is_parameter=is_parameter),
        )

        def run(*arguments: Any) -> Any:
            outputs = run_block(*arguments)
            matrices = [
                argument for argument, chosen in zip(arguments, is_matrix, strict=True) if chosen
            ]
            nodes = {output.grad_fn for output in outputs if isinstance(output, Tensor)}
            for node in nodes:
                if node is not None:
                    node.register_prehook(partial(self._set_matrices, matrices))
            return outputs

        return run

    def _set_matrices(self, matrices: list[nn.Parameter], _gradients: Any) -> None:
        self._matrices = matrices

    def _compile_backward(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        compile_graph: GraphCompiler,
        *,
        is_matrix: Sequence[bool],
        is_parameter: Sequence[bool],
    ) -> CompiledGraph:
        """Compile both parts of a graph that returns a gradient per input of the forward pass."""
        parts = divide_backward(graph, is_matrix, is_parameter)
        run_first = compile_graph(parts.first, inputs, has_static_inputs=True)
        examples = [node.meta["val"] for node in parts.second.graph.find_nodes(op="placeholder")]
        run_second = compile_graph(parts.second, examples, has_static_inputs=False)
        num_gradients = len(parts.first_outputs)

        def run_backward(arguments: list[Any]) -> list[Tensor | None]:
            saved = [arguments[index] for index in parts.second_arguments]
            results = run_first(arguments)
            gradients: list[Tensor | None] = [None] * len(is_matrix)
            for index, gradient in zip(parts.first_outputs, results[:num_gradients], strict=True):
                gradients[index] = gradient
            matrices = [self._matrices[index] for index in parts.second_matrices]
            product = DeferredGraph(run_second, [*saved, *results[num_gradients:]], matrices)
            self._matrices = []
            if self._store.products is not None:
                self._store.add(product)
                return gradients
            for index, gradient in zip(parts.second_outputs, product.run(), strict=True):
                gradients[index] = gradient
            return gradients

        run_backward._boxed_call = True  # type: ignore[attr-defined]
        return run_backward


class DeferredGraph(NamedTuple):
    """Second part of a block's backward graph with its inputs; runs once."""

    compiled: CompiledGraph
    inputs: list[Any]
    matrices: list[nn.Parameter]

    def run(self) -> Sequence[Tensor]:
        """Compute the gradients of the matrices."""
        return self.compiled(self.inputs)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Compute the gradients, and add them to those of the matrices."""
        for matrix, gradient in zip(self.matrices, self.run(), strict=True):
            accumulate_gradient(matrix, gradient)


class BackwardParts(NamedTuple):
    """Two graphs that together compute what a backward graph computes.

    The first takes the inputs of the whole graph, and returns its own gradients and then what
    only the second reads of its results. The second takes some of the inputs, and then those.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    first_outputs: list[int]
    """Places of the first part's gradients among the outputs of the whole graph."""
    second_outputs: list[int]
    second_matrices: list[int]
    """Places of the second part's gradients among the matrices."""
    second_arguments: list[int]
    """Places of the inputs of the whole graph that the second part takes."""


def divide_backward(
    graph: fx.GraphModule, is_matrix: Sequence[bool], is_parameter: Sequence[bool]
) -> BackwardParts:
    """Divide a graph that returns a gradient or None per input of the forward pass.

    A gradient that the others need stays in the first part. So does what reads a parameter, such as
    the recomputation of a norm: ZeRO-3 frees gathered parameters before the second part runs.
    """
    nodes = list(graph.graph.nodes)
    gradients: Any = graph.graph.output_node().args[0]
    assert len(gradients) == len(is_matrix), "one output per input of the forward pass"
    others = [gradient for gradient, chosen in zip(gradients, is_matrix, strict=True) if not chosen]
    readers = [
        node
        for node in nodes
        if node.op != "output"
        and any(_is_parameter(source, is_parameter) for source in node.all_input_nodes)
    ]
    needed = _find_ancestors([*(node for node in others if isinstance(node, fx.Node)), *readers])
    second_outputs = [
        index
        for index, gradient in enumerate(gradients)
        if is_matrix[index] and isinstance(gradient, fx.Node) and gradient not in needed
    ]
    first_outputs = [index for index in range(len(gradients)) if index not in second_outputs]
    later = _find_ancestors([gradients[index] for index in second_outputs]) - needed
    placeholders = [node for node in nodes if node.op == "placeholder"]
    later -= set(placeholders)
    read = {source for node in later for source in node.all_input_nodes} - later
    # Sizes that change are inputs of both parts: shapes of tensors are stated in them.
    arguments = [
        node
        for node in placeholders
        if node in read or isinstance(node.meta.get("val"), torch.SymInt)
    ]
    passed = [node for node in nodes if node in read and node.op not in ("placeholder", "get_attr")]
    attributes = {node for node in nodes if node.op == "get_attr"}
    return BackwardParts(
        _extract(
            graph,
            placeholders,
            needed | attributes,
            [*(gradients[index] for index in first_outputs), *passed],
        ),
        _extract(
            graph,
            [*arguments, *passed],
            later | attributes,
            [gradients[index] for index in second_outputs],
        ),
        first_outputs,
        second_outputs,
        [sum(is_matrix[:index]) for index in second_outputs],
        [placeholders.index(node) for node in arguments],
    )


def _is_parameter(node: fx.Node, is_parameter: Sequence[bool]) -> bool:
    """Return True for a saved parameter: AOTAutograd names saved inputs primals_1, primals_2..."""
    name, _, number = node.name.partition("_")
    return node.op == "placeholder" and name == "primals" and is_parameter[int(number) - 1]


def _find_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Find the nodes from which any of `nodes` is computed, themselves included."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _extract(
    source: fx.GraphModule,
    inputs: Sequence[fx.Node],
    computed: set[fx.Node],
    outputs: Sequence[fx.Node | None],
) -> fx.GraphModule:
    """Extract the computation of `outputs` from `inputs`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in source.graph.nodes:
        if node in computed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(None if node is None else copies[node] for node in outputs))
    output.meta["user_visible_output_idxs"] = []
    graph.eliminate_dead_code()
    return fx.GraphModule(source, graph)


def compile_with_inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    compile_backward: BackwardCompiler,
    *,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile a block with Inductor and its options."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_part(part: fx.GraphModule, part_inputs: Sequence[Any], **details: Any) -> Any:
        if not details.get("is_backward"):
            return compile_fx_inner(part, part_inputs, **details)

        def compile_half(
            half: fx.GraphModule, half_inputs: Sequence[Any], *, has_static_inputs: bool
        ) -> CompiledGraph:
            statics = details.get("static_input_idxs", ()) if has_static_inputs else ()
            return compile_fx_inner(half, half_inputs, **{**details, "static_input_idxs": statics})

        return compile_backward(part, part_inputs, compile_half)

    # Saved tensors may be read by the second part, long after the first: the first may not write
    # to their memory. torch's cache of whole blocks would store what is no code of Inductor.
    with config.patch(donated_buffer=False, enable_autograd_cache=False):
        # Inductor measures no kernels then: its choice could differ between runs.
        patches = dict(options)
        if torch.are_deterministic_algorithms_enabled():
            patches["deterministic"] = True
        compiled: Any = compile_fx(
            graph, inputs, inner_compile=compile_part, config_patches=patches or None
        )
    return compiled
