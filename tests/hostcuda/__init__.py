"""A CUDA device on a CPU build of torch, for tests: see README.md."""
