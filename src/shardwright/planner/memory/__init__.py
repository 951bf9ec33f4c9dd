"""Memory of a training step on the fullest rank: parameters, activations and the peaks."""
