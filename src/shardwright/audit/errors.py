"""Error of an audit's input."""

from __future__ import annotations

from shardwright.errors import InputError


class AuditInputError(InputError):
    """A recorded folder that is damaged, incomplete or does not fit the model."""
