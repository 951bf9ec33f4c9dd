"""Checkpoints: written whole or not at all, opened under any layout, never unpickled.

    boxes manifest header disk verify commit drift     no torch: what a checkpoint is on disk, and whether it is whole
    exchange pieces save load background               torch: who holds what, who writes and who reads it

Import from the modules themselves; this file stays empty so that `shardwright checkpoint verify` starts without torch.
"""
