"""Training of a run: one step, the loop, the policy after a step, checkpoints and recovery."""
