"""Start ranks: environment, launcher, restarts, stop signals."""
