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


@pytest.mark.parametrize(("headline", "higher"), [("reward", True), ("nll", False)])
def test_the_best_outlives_the_process_that_saved_it(tmp_path, headline, higher):
    """Known in memory alone, it would go with the first save of the resumed run."""
    state = initial_state(initial_params(), learner("sft"), jax.random.key(0))
    options = {"headline": headline, "higher_is_better": higher}
    sign = 1 if higher else -1
    for run in (((1, 2.0), (2, 0.5), (3, None)), ((4, 0.75), (5, None)), ((6, 1.0), (7, 3.0))):
        with Checkpoints(tmp_path / "kept", keep=1, keep_best=True, **options) as kept:
            for step, score in run:
                scored = None if score is None else sign * score
                kept.save(state._replace(step=jnp.int32(step)), scored)
                kept.wait()
            assert kept.steps == ([7] if run[-1][0] == 7 else [1, run[-1][0]])
