"""The best checkpoint is the one with the best headline, whichever way that points."""

import math

import jax
import jax.numpy as jnp
import pytest
from toy import initial_params, learner

from rlx.checkpoint import Checkpoints
from rlx.state import initial_state


@pytest.mark.parametrize(("headline", "higher", "best"), [("reward", True, 3), ("nll", False, 2)])
def test_the_best_is_kept_by_the_runs_headline(tmp_path, headline, higher, best):
    """A fixed pass@1 would be a KeyError; the highest nll, the worst model."""
    state = initial_state(initial_params(), learner("sft"), jax.random.key(0))
    options = {"headline": headline, "higher_is_better": higher}
    with Checkpoints(tmp_path / "kept", keep=1, keep_best=True, **options) as kept:
        for step, score in ((1, 0.5), (2, -0.25), (3, 2.0), (4, 0.75), (5, math.nan), (6, None)):
            kept.save(state._replace(step=jnp.int32(step)), score)
            kept.wait()
        assert kept.steps == [best, 6]
