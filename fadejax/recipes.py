"""Published methods as settings: `apply(config, "dapo")` sets the fields that make it.

Every method is a row of RECIPES, a fragment of a config; nothing else in the code knows their
names. Config files take one as an argument, `--config=configs/countdown_tiny.py:dapo`, and flags
still change any field after it. What a paper leaves to the user (learning rate, lengths, batch)
stays as the config has it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fadejax.config import PolicyWeightConfig

# What all start from: one switch each, so that a recipe says everything that it is.
PLAIN: dict[str, Any] = {
  "loss.clip_low": 0.2,
  "loss.clip_high": 0.2,
  "loss.ratio_cap": 0.0,
  "loss.ratio_level": "token",
  "loss.form": "clip",
  "loss.normaliser": "token_mean",
  "loss.kl_coefficient": 0.0,
  "loss.mask_truncated": False,
  "reward.overlong_buffer": 0,
  "rollout.dynamic_sampling": False,
}


def _fifth(config: ConfigDict) -> int:
  """DAPO's buffer: 4096 of 20480 tokens."""
  return max(1, config.rollout.max_completion_length // 5)


# DAPO (arXiv:2503.14476): clip-higher, token mean, dynamic sampling, overlong shaping, no KL.
_DAPO: dict[str, Any] = {
  "loss.clip_high": 0.28,
  "rollout.dynamic_sampling": True,
  "reward.overlong_buffer": _fifth,
}

# name -> fields that differ from PLAIN; a function takes the config that it is laid over.
RECIPES: Mapping[str, Mapping[str, Any]] = {
  # arXiv:2402.03300: each completion by its own length, KL to the reference in the loss.
  "grpo": {
    "policy_weight.name": "grpo",
    "loss.normaliser": "sequence_mean",
    "loss.kl_coefficient": 0.04,
    "loss.kl_estimator": "k3_value_k2_gradient",
  },
  # arXiv:2503.20783: no division by σ nor by the own length.
  "dr_grpo": {"policy_weight.name": "dr_grpo", "loss.normaliser": "constant"},
  "dapo": {"policy_weight.name": "grpo", **_DAPO},
  # arXiv:2507.18071: the ratio of whole sequences, clipped tightly.
  "gspo": {
    "policy_weight.name": "grpo",
    "loss.ratio_level": "sequence",
    "loss.normaliser": "sequence_mean",
    "loss.clip_low": 3e-4,
    "loss.clip_high": 4e-4,
  },
  # arXiv:2506.13585: no clipped surrogate, a capped ratio with stopped gradient.
  "cispo": {"policy_weight.name": "grpo", "loss.form": "cispo", "loss.ratio_cap": 5.0},
  # arXiv:2402.14740: a completion is one action.
  "rloo": {"policy_weight.name": "rloo", "loss.normaliser": "constant"},
  "reinforce": {"policy_weight.name": "reinforce", "loss.normaliser": "constant"},
  # arXiv:2606.07950; its second, focused update on the best prompts is not here yet.
  "codapo": {"policy_weight.name": "codapo"},
  # arXiv:2606.06080, the unbiased form of hard focus.
  "maxpo": {"policy_weight.name": "maxpo", "policy_weight.k": 4},
  # arXiv:2607.01490.
  "fade": {"policy_weight.name": "fade"},
  "fade_dapo": {"policy_weight.name": "fade", **_DAPO},
}


def apply(config: ConfigDict, name: str) -> ConfigDict:
  """Sets a recipe's fields, and those of PLAIN that it leaves alone, in place.

  Args:
    config: of `default_config()`, its lengths set; what it says of PLAIN's fields is overwritten.
    name: of RECIPES.

  Returns:
    The same config.

  Raises:
    ValueError: an unknown name; names the nearest.
  """
  if name not in RECIPES:
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"recipe {name!r} is not one of {', '.join(RECIPES)}{hint}")
  for key, default in dataclasses.asdict(PolicyWeightConfig()).items():
    config.policy_weight[key] = default  # no setting of another weight stays
  for path, value in {**PLAIN, **RECIPES[name]}.items():
    section, field = path.split(".")
    config[section][field] = value(config) if isinstance(value, Callable) else value  # type: ignore[arg-type]
  return config
