"""Import this module to exclude what exists from the garbage collections of the process."""

from shardwright.training.garbage_collection import freeze_imports

freeze_imports()
