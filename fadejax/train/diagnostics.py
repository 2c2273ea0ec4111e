"""What a run's parameters say of it, measured now and then."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fadejax.algorithm.masses import rank_one_share
from fadejax.policy import model


@jax.jit
def head_update(params: model.Params, first: model.Params) -> dict[str, jax.Array]:
  """How the output head has moved since the start of the run.

  With a tied head the change also holds the embedding's input gradient, so it goes by another
  name: claims about rank one need an untied head.

  Args:
    params: now.
    first: at the start of the run.

  Returns:
    `head/rank_one_share` f32[], σ₁² / Σσ² of the head's change, and `head/update_share` f32[],
    the head's share of the squared change of all parameters; `tied_head/…` where it is tied.
    NaN where nothing has moved.
  """
  change = jax.tree.map(jnp.subtract, params, first)
  own = model.head(change)
  total = sum(jnp.sum(x * x) for x in jax.tree.leaves(change))
  name = "head" if "head" in params else "tied_head"
  return {
    f"{name}/rank_one_share": rank_one_share(own),
    f"{name}/update_share": jnp.sum(own * own) / total,
  }
