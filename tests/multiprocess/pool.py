"""The pool of the verifier, so that tests run on the same code as users."""

from shardwright.verification.rank_pool import RankPool

__all__ = ["RankPool"]
