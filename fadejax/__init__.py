"""fadejax: reinforcement learning with verifiable rewards, in JAX."""
