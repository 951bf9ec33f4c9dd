"""Memory that PyTorch's allocator has reserved in a run of nanotron, simulated tensor by tensor.

The order is that of nanotron's code in December 2024 (models/llama.py, parallel/tensor_parallel,
parallel/pipeline_parallel, optim): the first pipeline rank, 1F1B, sequence parallelism.

Legend: N tokens of a micro-batch, n = N / tp, D hidden size, F feed-forward width. bf16 tensors
that are freed in the pass that allocates them are allocated too: they split and merge blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.planner.memory.caching_allocator import CachingAllocator, MemoryBlock
from shardwright.units import GIB_BYTES, MIB_BYTES

QUEUE_LENGTH = 1024
"""Launches that a CUDA stream queues."""
FORWARD_LAUNCHES = 40
BACKWARD_LAUNCHES = 80
"""Launches of a layer and its collectives, events included."""

_NUM_STEPS = 3
"""The trainer logs the third step. The first one allocates the optimizer's states after the
activations."""
_OTHER_BYTES = 0.15 * GIB_BYTES
"""Workspaces of cuBLAS (32 MiB for each thread and stream), and small tensors."""
_BUCKET_BYTES = 25 * MIB_BYTES
"""DDP's `bucket_cap_mb`."""
_TWO_BYTES = 2

_Tensors = dict[str, MemoryBlock | None]


@dataclass(frozen=True)
class NanotronRank:
    """The first rank of a run. Sizes are the model's; `num_layers` are the rank's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    key_value_share: float
    """Width of keys over the width of queries."""
    vocab_size: int
    is_tied: bool
    num_layers: int
    tp: int
    pp: int
    data_ranks: int
    zero_stage: int
    sequence_length: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a whole sequence, [N, D] in bf16."""
        return _TWO_BYTES * self.micro_batch_size * self.sequence_length * self.hidden_size

    @property
    def layer_elements(self) -> tuple[int, ...]:
        """Elements of a layer's parameters: norms, queries to values, output, gate and up, down."""
        square = self.hidden_size**2
        fused = int((1 + 2 * self.key_value_share) * square) // self.tp
        inner = self.hidden_size * self.intermediate_size // self.tp
        return (self.hidden_size, fused, square // self.tp, self.hidden_size, 2 * inner, inner)

    @property
    def table_elements(self) -> int:
        return self.vocab_size * self.hidden_size // self.tp

    def list_parameters(self) -> list[int]:
        """List the elements of all parameters."""
        found = [self.table_elements, *self.layer_elements * self.num_layers]
        if self.pp == 1:
            found += [self.hidden_size, *[self.table_elements] * (not self.is_tied)]
        return found


@lru_cache(maxsize=4096)
def simulate_reserved_bytes(
    rank: NanotronRank, capacity_bytes: float, *, runs_ahead: bool = False
) -> float:
    """Return the bytes that the allocator has reserved after the update.

    Args:
        runs_ahead: the host launches as many operations as the device queues before it waits.
            Otherwise the memory of each tensor is reusable when it is freed.
    """
    allocator = CachingAllocator(capacity_bytes, QUEUE_LENGTH if runs_ahead else 0)
    step = _Step(rank, allocator)
    for _ in range(_NUM_STEPS):
        step.run()
    return allocator.reserved_bytes + _OTHER_BYTES


class _Step:
    """Allocations of one step, which may be repeated."""

    def __init__(self, rank: NanotronRank, allocator: CachingAllocator) -> None:
        self.rank = rank
        self.allocator = allocator
        self.parameters = rank.list_parameters()
        tokens = rank.micro_batch_size * rank.sequence_length
        self.sequence = rank.sequence_bytes
        self.stream = self.sequence // rank.tp
        self.keys = int(self.stream * rank.key_value_share)
        self.fused = self.stream + 2 * self.keys
        self.inner = _TWO_BYTES * tokens * rank.intermediate_size // rank.tp
        self.log_sums = 4 * tokens * rank.num_heads // rank.tp
        self.logits = _TWO_BYTES * tokens * rank.vocab_size // rank.tp
        # A non-contiguous input of the output projection is copied.
        self.attention_copy = self.stream if rank.micro_batch_size > 1 else 0
        self.is_parallel = rank.tp > 1
        self.has_head = rank.pp == 1
        self.has_buffers = False
        self.has_states = False
        self._allocate_model()

    def _allocate_model(self) -> None:
        num_elements = sum(self.parameters)
        for elements in self.parameters:
            self.allocator.allocate(_TWO_BYTES * elements)
        self.allocator.allocate(4 * num_elements)  # sums of gradients
        copies = 1 if self.rank.zero_stage == 0 else self.rank.data_ranks
        self.allocator.allocate(4 * num_elements / copies)  # master weights
        if self.rank.zero_stage == 0:
            bucket = 0
            for elements in reversed(self.parameters):
                bucket += _TWO_BYTES * elements
                if bucket >= _BUCKET_BYTES:
                    self.allocator.allocate(bucket)
                    bucket = 0
            self.allocator.allocate(bucket)

    def run(self) -> None:
        """Run the micro-batches that differ in what is in memory, and the update.

        Each send of a pipeline waits for the device (`P2P._send_meta` copies from the host).
        """
        rank = self.rank
        num_passes = min(rank.num_micro_batches, rank.pp + 1 if rank.pp > 1 else 2)
        in_flight: list[list[_Tensors]] = []
        for index in range(num_passes):
            in_flight.append(self._run_forward())
            if rank.pp > 1:
                self.allocator.synchronise()
            if index >= rank.pp - 1:
                self._run_backward(in_flight.pop(0))
        for tensors in in_flight:
            self._run_backward(tensors)
        self._update()

    def _reduce_scatter(self, launches: int) -> MemoryBlock | None:
        """Return the block of a branch's output, summed over the tensor-parallel ranks."""
        output = self.allocator.allocate(self.sequence)
        self.allocator.launch(launches)
        if not self.is_parallel:
            return output
        reduced = self.allocator.allocate(self.stream)
        self.allocator.free(output, is_shared=True)
        return reduced

    def _run_forward(self) -> list[_Tensors]:
        """Return the saved tensors of each layer, and last those of the head."""
        stream = self._reduce_scatter(4)
        layers: list[_Tensors] = []
        for _ in range(self.rank.num_layers):
            tensors, stream = self._run_layer_forward(stream)
            layers.append(tensors)
        last: _Tensors = {"stream": stream}
        if self.has_head:
            last["norm"] = self.allocator.allocate(self.stream)
            logits = self.allocator.allocate(self.logits)
            fp32_logits = self.allocator.allocate(2 * self.logits)
            last["exponentials"] = self.allocator.allocate(2 * self.logits)
            self.allocator.launch(FORWARD_LAUNCHES)
            self.allocator.free(fp32_logits)
            self.allocator.free(logits)
        return [*layers, last]

    def _run_layer_forward(self, stream: MemoryBlock | None) -> tuple[_Tensors, MemoryBlock | None]:
        allocate = self.allocator.allocate
        free = self.allocator.free
        tensors: _Tensors = {"stream": stream, "attention_norm": allocate(self.stream)}
        if self.is_parallel and not self.has_buffers:
            # Gathered inputs and gathered gradients (`MemoryBuffer`).
            allocate(self.sequence)
            allocate(self.sequence)
            self.has_buffers = True
        fused = allocate(self.fused)
        # Without grouped heads, queries are a view of a copy of everything.
        tensors["queries"] = allocate(self.fused if self.keys == self.stream else self.stream)
        free(fused)
        joined = allocate(2 * self.keys)
        tensors["keys_values"] = allocate(2 * self.keys)
        free(joined)
        tensors["attention"] = allocate(self.stream)
        tensors["log_sums"] = allocate(self.log_sums)
        copy = allocate(self.attention_copy)
        branch = self._reduce_scatter(FORWARD_LAUNCHES // 2)
        free(copy)
        tensors["middle"] = allocate(self.stream)
        free(branch, is_shared=self.is_parallel)
        tensors["inner_norm"] = allocate(self.stream)
        tensors["gate_up"] = allocate(2 * self.inner)
        tensors["activation"] = allocate(self.inner)
        tensors["product"] = allocate(self.inner)
        branch = self._reduce_scatter(FORWARD_LAUNCHES // 2)
        output = allocate(self.stream)
        free(branch, is_shared=self.is_parallel)
        return tensors, output

    def _run_backward(self, layers: list[_Tensors]) -> None:
        """Run one micro-batch backward. Its bf16 gradients are freed when all exist."""
        allocate = self.allocator.allocate
        free = self.allocator.free
        gradients: list[MemoryBlock | None] = []
        last = layers[-1]
        if self.has_head:
            logits = allocate(self.logits)
            free(last["exponentials"])
            gradient = self._reduce_scatter(FORWARD_LAUNCHES // 2)
            gradients.append(allocate(_TWO_BYTES * self.rank.table_elements))
            free(logits)
            free(last["norm"], is_shared=self.is_parallel)
            after_norm = allocate(self.stream)
            free(gradient, is_shared=self.is_parallel)
            free(last["stream"])
            gradient = after_norm
        else:
            gradient = allocate(self.stream)  # received
            free(last["stream"], is_shared=True)
        for tensors in reversed(layers[:-1]):
            gradient = self._run_layer_backward(tensors, gradient, gradients)
        whole = allocate(self.sequence) if self.is_parallel else None
        free(gradient, is_shared=self.is_parallel)
        gradients.append(allocate(_TWO_BYTES * self.rank.table_elements))
        free(whole, is_shared=True)
        self.allocator.launch(len(self.parameters))
        for block in gradients:
            free(block)

    def _run_layer_backward(
        self, tensors: _Tensors, gradient: MemoryBlock | None, gradients: list[MemoryBlock | None]
    ) -> MemoryBlock | None:
        """Return the gradient of the layer's input; append those of its weights."""
        allocate = self.allocator.allocate
        free = self.allocator.free
        _, fused_elements, output_elements, _, gate_elements, down_elements = (
            self.rank.layer_elements
        )
        product = allocate(self.inner)
        gradients.append(allocate(_TWO_BYTES * down_elements))
        free(tensors["product"])
        activation = allocate(self.inner)
        up = allocate(self.inner)
        free(product)
        free(tensors["activation"])
        gate = allocate(self.inner)
        free(activation)
        gate_up = allocate(2 * self.inner)
        free(gate)
        free(up)
        free(tensors["gate_up"])
        gradient = self._run_column_backward(
            gradient, gate_up, tensors["inner_norm"], tensors["middle"], gate_elements, gradients
        )
        output = allocate(self.stream)
        copy = allocate(self.attention_copy)
        gradients.append(allocate(_TWO_BYTES * output_elements))
        free(copy)
        attention = allocate(self.stream)
        free(output)
        queries = allocate(self.stream)
        keys_values = allocate(2 * self.keys)
        sums = allocate(2 * self.stream)  # of the queries' gradient, in fp32
        for block in (sums, attention):
            free(block)
        for name in ("attention", "log_sums", "queries", "keys_values"):
            free(tensors[name])
        separated = allocate(2 * self.keys)
        free(keys_values)
        joined = allocate(self.fused)
        free(separated)
        free(queries)
        fused = allocate(self.fused)
        free(joined)
        return self._run_column_backward(
            gradient, fused, tensors["attention_norm"], tensors["stream"], fused_elements, gradients
        )

    def _run_column_backward(
        self,
        gradient: MemoryBlock | None,
        output_gradient: MemoryBlock | None,
        norm: MemoryBlock | None,
        stream: MemoryBlock | None,
        num_elements: int,
        gradients: list[MemoryBlock | None],
    ) -> MemoryBlock | None:
        """Run the product after a norm and the norm backward, and add the residual gradient."""
        allocate = self.allocator.allocate
        free = self.allocator.free
        whole = allocate(self.sequence)
        self.allocator.launch(BACKWARD_LAUNCHES // 2)
        reduced = allocate(self.stream) if self.is_parallel else whole
        gradients.append(allocate(_TWO_BYTES * num_elements))
        free(output_gradient)
        free(norm, is_shared=self.is_parallel)
        if self.is_parallel:
            free(whole, is_shared=True)
        after_norm = allocate(self.stream)
        free(reduced, is_shared=self.is_parallel)
        free(stream)
        total = allocate(self.stream)
        free(after_norm)
        free(gradient, is_shared=self.is_parallel)
        return total

    def _update(self) -> None:
        """Allocate the states, once, and gather the weights: of each rank's part a flat copy, and
        NCCL's buffer of all (`all_gather_coalesced`, `ProcessGroupNCCL::allgather`)."""
        rank = self.rank
        self.allocator.synchronise()
        copies = rank.data_ranks if rank.zero_stage else 1
        if not self.has_states:
            self.has_states = True
            for elements in self.parameters:
                self.allocator.allocate(4 * elements / copies)
                self.allocator.allocate(4 * elements / copies)
        if copies == 1:
            return
        num_bytes = _TWO_BYTES * sum(self.parameters)
        blocks = [self.allocator.allocate(num_bytes / copies) for _ in range(1 + copies)]
        blocks.append(self.allocator.allocate(num_bytes))
        for block in blocks:
            self.allocator.free(block)
