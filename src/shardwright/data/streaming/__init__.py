"""Streaming of training data that is larger than the disk, through a bounded cache of shards."""
