"""The policy: a Flax transformer, where its arrays live, and how it samples."""
