"""The training loop and what it keeps: state, checkpoints, metrics."""
