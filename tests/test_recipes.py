"""Published methods as settings."""

from __future__ import annotations

import pytest

from fadejax import config as configs
from fadejax import recipes


def resolved(recipe, **weight):
  c = configs.default_config()
  c.rollout.max_completion_length = 100
  for key, value in weight.items():
    c.policy_weight[key] = value
  return configs.resolve(recipes.apply(c, recipe))


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_resolves_and_leaves_nothing_of_another(name):
  run = resolved(name, name="power_asym", alpha=2.0, delta=0.5)
  assert run == resolved(name)
  assert run.policy_weight.name in (name, "grpo", "fade")


def test_recipes_say_what_the_papers_say():
  dapo = resolved("dapo")
  assert (dapo.loss.clip_low, dapo.loss.clip_high) == (0.2, 0.28)
  assert dapo.rollout.dynamic_sampling and dapo.reward.overlong_buffer == 20
  assert dapo.loss.normaliser == "token_mean" and dapo.loss.kl_coefficient == 0
  gspo = resolved("gspo")
  assert (gspo.loss.ratio_level, gspo.loss.clip_low, gspo.loss.clip_high) == (
    "sequence",
    3e-4,
    4e-4,
  )
  assert resolved("cispo").loss.form == "cispo"
  assert resolved("grpo").loss.normaliser == "sequence_mean"
  assert resolved("dr_grpo").loss.normaliser == "constant"
  assert resolved("maxpo").policy_weight.settings() == {"k": 4}
  both = resolved("fade_dapo")
  assert both.policy_weight.name == "fade" and both.loss == dapo.loss


def test_an_unknown_recipe_names_the_nearest():
  with pytest.raises(ValueError, match=r"'dapp' is not one of .*; did you mean 'dapo'"):
    resolved("dapp")
