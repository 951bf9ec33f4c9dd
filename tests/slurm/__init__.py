"""Jobs under a real Slurm on this machine: `make slurm` installs it and runs them."""
