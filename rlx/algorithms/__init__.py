"""The family of algorithms: a file each, one table.

row           advantages       ratio      clip         reduction      KL
ppo           GAE, whitened    token      +-.2         token mean     in the reward
grpo          z-score          token      +-.2         sequence mean  k3 in the loss
dr_grpo       centred          token      +-.2         budget         none
dapo          z-score          token      -.2 +.28     token mean     none
gspo          z-score          sequence   3e-4, 4e-4   row mean       none
gspo_token    reward to go     sequence   3e-4, 4e-4   sequence mean  none
rloo          leave one out    sequence   +-.2         row mean       in the reward
reinforce_pp  returns, white   token      +-.2         token mean     in the reward
cispo         z-score          token      weight <= 5  token mean     none
gmpo          z-score          geometric  e^+-.4       row mean       none
sapo          z-score          token      soft gate    sequence mean  none
dpo ...       preference       -          -            row mean       inside the sigmoid
"""

from rlx.advantages import (
    ADVANTAGES,
    best_and_worst,
    gae_whitened,
    group_centred,
    group_normalised,
    group_reward_to_go,
    leave_one_out,
    per_row,
    solved,
    whitened_group_returns,
    whitened_returns,
)
from rlx.algorithms.cispo import cispo
from rlx.algorithms.critic import value
from rlx.algorithms.dapo import dapo
from rlx.algorithms.divergence import kl_k2, kl_k3, kl_r_k3
from rlx.algorithms.dpo import cdpo, dpo, dpo_hinge, dpo_reference_free, ipo, ipo_sum, robust_dpo
from rlx.algorithms.dr_grpo import dr_grpo
from rlx.algorithms.entropy import entropy
from rlx.algorithms.gmpo import gmpo
from rlx.algorithms.grpo import grpo
from rlx.algorithms.gspo import gspo, gspo_token
from rlx.algorithms.ppo import ppo, ppo_dual_clip
from rlx.algorithms.record import Algorithm, of_entropy, of_scores, of_values
from rlx.algorithms.reinforce_pp import reinforce_pp
from rlx.algorithms.reward_model import reward_model
from rlx.algorithms.rloo import rloo
from rlx.algorithms.sapo import sapo
from rlx.algorithms.sft import sft
from rlx.ops import REDUCTIONS, budget_mean, row_mean, sequence_mean, token_mean

z_score = per_row(group_normalised)


def chosen(advantages):
    return advantages > 0


def paired(advantages):
    return advantages != 0


def preference(loss, reference: bool = True) -> Algorithm:
    """A pair's loss stands on both of its rows: the row mean is the mean over pairs."""
    return Algorithm(
        best_and_worst,
        loss,
        row_mean,
        source="pairs",
        reference=reference,
        unit=2,
        selects=paired,
    )


ALGORITHMS = {
    "ppo": Algorithm(gae_whitened, ppo, token_mean, critic=True),
    "ppo_dual_clip": Algorithm(gae_whitened, ppo_dual_clip, token_mean, critic=True),
    "grpo": Algorithm(z_score, grpo, sequence_mean, reference=True),
    "dr_grpo": Algorithm(per_row(group_centred), dr_grpo, budget_mean),
    "dapo": Algorithm(z_score, dapo, token_mean),
    "gspo": Algorithm(z_score, gspo, row_mean),
    "gspo_token": Algorithm(group_reward_to_go, gspo_token, sequence_mean),
    "rloo": Algorithm(per_row(leave_one_out), rloo, row_mean),
    "reinforce_pp": Algorithm(whitened_returns, reinforce_pp, token_mean),
    "reinforce_pp_baseline": Algorithm(whitened_group_returns, reinforce_pp, token_mean),
    "cispo": Algorithm(z_score, cispo, token_mean),
    "gmpo": Algorithm(z_score, gmpo, row_mean),
    "sapo": Algorithm(z_score, sapo, sequence_mean),
    "dpo": preference(dpo),
    "dpo_hinge": preference(dpo_hinge),
    "dpo_reference_free": preference(dpo_reference_free, reference=False),
    "ipo": preference(ipo),
    "ipo_sum": preference(ipo_sum),
    "cdpo": preference(cdpo),
    "robust_dpo": preference(robust_dpo),
    "sft": Algorithm(solved, sft, token_mean, source="texts", selects=chosen),
}

# The same records for what is no policy's algorithm: losses that stand beside one, and the
# training of a reward model.
TERMS = {
    "kl_k2": Algorithm(None, kl_k2, token_mean, reference=True),
    "kl_k3": Algorithm(None, kl_k3, token_mean, reference=True),
    "kl_r_k3": Algorithm(None, kl_r_k3, token_mean, reference=True),
    "entropy": Algorithm(None, entropy, token_mean, of_entropy),
    "value": Algorithm(gae_whitened, value, token_mean, of_values),
    "reward_model": Algorithm(
        best_and_worst,
        reward_model,
        row_mean,
        of_scores,
        source="pairs",
        unit=2,
        selects=paired,
    ),
}

__all__ = ["ADVANTAGES", "ALGORITHMS", "REDUCTIONS", "TERMS", "Algorithm"]
