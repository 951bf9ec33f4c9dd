"""Recipe section of offloading: state that is moved to host memory or to disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.recipe_section import LocalFolderText, RecipeSection, SizeWithUnit

OffloadTier = Literal["none", "host", "disk"]
UpdatePlace = Literal["auto", "device", "host"]
DEFAULT_BUFFER_BYTES = 64 * 2**20
DISK_BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket of state on disk, for buffers that are 4 to 16 times as large."""
_BufferBytes = Annotated[int, Field(ge=4096, le=2**32, multiple_of=4096, strict=True)]
"""Buffers are multiples of the unit of direct I/O."""
_AheadBytes = Literal["auto"] | Annotated[int, Field(ge=0, le=2**40, strict=True)]
_BUCKETS_READ_AHEAD = 32
"""Number of buckets that are read ahead, if buffers of `buffer_bytes` would be more. With half as
many the last block waits longer (docs/decisions/0238-equal-buckets-and-one-launch-each.md)."""


class OffloadSection(RecipeSection):
    """Optimizer states, weights and saved tensors of blocks in host memory or on disk. The
    results are the same bits; docs/offload.md has memory, transfers and requirements."""

    optimizer: OffloadTier = "none"
    """Tier of the optimizer's moments between updates: `none` is the device; `host` in host
    memory (pinned with CUDA); `disk` in a scratch file per rank. They are moved to the device
    in buckets, during the update of other buckets."""
    parameters: OffloadTier = "none"
    """Tier of the matrices of blocks: they arrive before their block computes, one block ahead,
    and leave after it. With adapters the frozen ones, which `disk` reads from the model's own
    files where these have the bytes that products read, otherwise from a scratch file. Without
    adapters all of them and their gradients, with an offloaded `optimizer`."""
    activations: OffloadTier = "none"
    """Tier of the tensors that a block saves for its backward pass: they leave behind its forward
    pass and return one block ahead of its backward pass. Parameters, and what all blocks share,
    stay on the device."""
    update_on: UpdatePlace = "auto"
    """Place of the optimizer's update with `optimizer: host` or `disk` on a GPU. `device`: the
    moments pass through it. `host`: gradients and weights are copied to pinned host memory during
    the backward pass, the CPU updates them (adamw, adamw_8bit, sgd), and the weights return; those
    that `parameters` moves are updated in their tier. Its kernels may round differently. `auto` is
    `device`, unless the rates of `cluster.profile` say that `host` is faster. On a CPU the two are
    the same."""
    dir: LocalFolderText | None = None
    """Folder on a local disk for the scratch files of `disk`; default the run folder. The files
    have no name, and the operating system removes them when the run ends, however it ends."""
    buffer_bytes: Annotated[_BufferBytes, SizeWithUnit()] = DEFAULT_BUFFER_BYTES
    """Size of a staging buffer: a multiple of 4096. State in host memory moves in buckets of this
    size, with CUDA through three in device memory. State on disk moves in buckets of 4 MiB, but
    at least a sixteenth and at most a quarter of this size, through the memory of three buffers on
    the host, with CUDA also through three buckets on the device. What they have beyond the moments
    of a block, at most two of the three, keeps its buckets from step to step, so larger buffers
    move fewer bytes.
    `activations: disk` has two buffers in host memory; `parameters: disk` has one, for trained
    weights two, and with `update_on: host` at least this size."""
    read_ahead_bytes: Annotated[_AheadBytes, SizeWithUnit()] = "auto"
    """Device memory beyond the three buffers for moments in host memory that are read during the
    passes before an update on the device, which then waits for fewer. `auto` is what remains free
    of the device at the start of a run, at most half of a rank's moments; 0 in a plan. Buckets are
    a thirty-second of it if that is more than `buffer_bytes`."""

    @model_validator(mode="after")
    def _check_consistency(self) -> OffloadSection:
        if self.dir is not None and "disk" not in self.tiers.values():
            raise ValueError(
                "`dir` is the folder of scratch files, and nothing is offloaded to disk: set "
                "`optimizer`, `parameters` or `activations` to `disk`, or remove `dir`"
            )
        if self.update_on == "host" and self.optimizer == "none":
            raise ValueError("`update_on: host` needs `optimizer: host` or `optimizer: disk`")
        if self.read_ahead_bytes != "auto" and (
            self.optimizer != "host" or self.update_on == "host"
        ):
            raise ValueError(
                "`read_ahead_bytes` is for moments in host memory that the device updates: set "
                "`optimizer: host` without `update_on: host`, or remove `read_ahead_bytes`"
            )
        return self

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket of state.

        On disk it is a fraction of a buffer, because an update waits until its first bucket is
        written and another one is read into that memory (docs/decisions/0180-smaller-buckets.md).
        Smaller buckets than 4 MiB cost processor time, of the update and of requests
        (docs/decisions/0228-fewer-buckets-on-disk.md). In host memory a bucket is larger if much
        is read ahead, because the host launches each.
        """
        if self.optimizer != "disk":
            ahead_bytes = self.ahead_bytes // _BUCKETS_READ_AHEAD // 4096 * 4096
            return max(self.buffer_bytes, ahead_bytes)
        num_bytes = min(max(DISK_BUCKET_BYTES, self.buffer_bytes // 16), self.buffer_bytes // 4)
        return max(1, num_bytes // 4096) * 4096

    @property
    def fills_buckets(self) -> bool:
        """True if buckets have equal sizes. Then as many bytes are read ahead as buffers have.

        On disk each further part of a bucket would be a request of its own.
        """
        return self.optimizer == "host"

    @property
    def ahead_bytes(self) -> int:
        """Bytes of `read_ahead_bytes`; 0 for `auto`, which takes more only at the start of a
        run."""
        return 0 if self.read_ahead_bytes == "auto" else self.read_ahead_bytes

    @property
    def device_buffer_bytes(self) -> int:
        """Bytes of the buffers on a GPU through which moments pass."""
        if self.optimizer == "disk":
            return 3 * self.bucket_bytes
        return 3 * self.buffer_bytes + self.ahead_bytes

    @property
    def tiers(self) -> dict[str, OffloadTier]:
        """Tier of each kind of offloaded state."""
        return {
            "optimizer": self.optimizer,
            "parameters": self.parameters,
            "activations": self.activations,
        }

    @property
    def is_enabled(self) -> bool:
        """True if anything is offloaded."""
        return set(self.tiers.values()) != {"none"}

    def list_tiers(self) -> tuple[OffloadTier, ...]:
        """List the tiers of optimizer, parameters and activations."""
        return tuple(self.tiers.values())

    def change_tiers(self, **tiers: OffloadTier) -> OffloadSection:
        """Return the section with other tiers by name, without what these do not use."""
        changed = self.tiers | tiers
        unused: dict[str, str | None] = {} if "disk" in changed.values() else {"dir": None}
        if changed["optimizer"] != "host":
            unused["read_ahead_bytes"] = "auto"
        return self.model_copy(update=tiers | unused)

    def replace_idle_host(self) -> OffloadSection:
        """Return the section with `disk` for weights and activations in `host`, for a CPU, where
        `host` would move nothing, and with scratch files in the caller's folder."""
        moving: dict[str, OffloadTier] = {
            name: "disk"
            for name, tier in self.tiers.items()
            if tier == "host" and name != "optimizer"
        }
        return self.model_copy(update={**moving, "dir": None})

    def without_host(self) -> OffloadSection:
        """Return the section with `none` for `host`, for a CPU: its memory is the host's, so
        nothing moves."""
        resident: dict[str, OffloadTier] = {
            name: "none" for name, tier in self.tiers.items() if tier == "host"
        }
        return self.change_tiers(**resident)


NOT_OFFLOADED = OffloadSection()
