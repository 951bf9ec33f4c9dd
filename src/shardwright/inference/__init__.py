"""Use a trained model: generate, evaluate, export."""
