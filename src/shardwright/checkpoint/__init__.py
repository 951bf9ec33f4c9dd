"""Checkpoints: written atomically, opened under any layout, never unpickled.

The format on disk, commit and verification need no torch; saving and loading of tensors do.
Import from the modules: this file imports nothing, so that `shardwright checkpoint verify`
starts without torch.
"""
