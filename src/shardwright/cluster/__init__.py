"""Start a recipe on a cluster: torchrun, Slurm, Kubernetes."""
