"""The pool is the verifier's own: what the tests run on is what users run on."""

from shardwright.verify.rank_pool import RankPool

__all__ = ["RankPool"]
