"""What a run is measured by: samples of held-out prompts, or held-out text that is given."""

import jax
from jaxtyping import Key

from rlx import assemble
from rlx.derived import source
from rlx.evaluate import Evaluation
from rlx.heldout import Heldout
from rlx.heldout_text import HeldoutPairs, HeldoutTexts
from rlx.learner import Learner
from rlx.policy import Policy
from rlx.scorers import RewardModel
from rlx.settings import Config
from rlx.stepper import given_text, with_signals
from rlx.tasks import Task


def make_evaluation(
    config: Config,
    policy: Policy,
    task: Task,
    key: Key[jax.Array, ""],
    counts: dict[str, int],
    learner: Learner,
    reward_model: RewardModel | None,
) -> Evaluation:
    """Preferences are measured on held-out pairs, fine-tuning on chats by held-out chats, all else
    by samples of the task's held-out problems. `counts` are the numbers that will be asked for."""
    if source(config) == "pairs":
        data, _ = given_text(config, policy, task, heldout=True)
        reference = policy.whole if assemble.uses_reference(config) else None
        return HeldoutPairs(learner, with_signals(data, learner), reference)
    if source(config) == "texts" and task.heldout_conversations:
        data, _ = given_text(config, policy, task, heldout=True)
        return HeldoutTexts(learner, with_signals(data, learner))
    return Heldout(config, policy, task, key, counts, reward_model)
