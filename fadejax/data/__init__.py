"""Data: problem records, tasks, tokenizers and the order of draws, on the host, without jax."""
