"""What follows from a configuration: its losses, what they learn from, the rows of a step."""

from rlx.algorithms.record import of_scores
from rlx.settings import Config
from rlx.signatures import ChosenTerm, SeveralTerms, chosen_term


def terms(config: Config) -> tuple[ChosenTerm, ...]:
    """The losses of the run, one in the short form. The first is its algorithm."""
    algorithm = config.algorithm
    sections = algorithm.terms if isinstance(algorithm, SeveralTerms) else (algorithm,)
    return tuple(map(chosen_term, sections))


def source(config: Config) -> str:
    """What the run learns from: `rollouts`, `pairs` or `texts`."""
    return terms(config)[0].row.source


def uses_lora(config: Config) -> bool:
    """Whether adapters are trained beside a frozen base."""
    return bool(config.lora.rank or config.lora.adapter)


def offline(config: Config) -> bool:
    """Whether the algorithm learns from data as it stands, with no text sampled."""
    return source(config) != "rollouts"


def unit(config: Config) -> int:
    """Rows that stay together when a batch is shuffled and cut: 2 where there are pairs."""
    return max(term.row.unit for term in terms(config))


def rows(config: Config) -> int:
    """Return the rows of a step, `N * G`; where nothing is sampled, those of N units."""
    return config.batch.prompts * (unit(config) if offline(config) else config.batch.samples)


def old_logprobs(config: Config) -> str:
    """`rollout.old_logprobs`, `auto` resolved: the current ones where a batch gets one update and
    nothing else reads them."""
    if config.rollout.old_logprobs != "auto":
        return config.rollout.old_logprobs
    one = config.batch.epochs * config.batch.minibatches == 1
    rollout = config.rollout
    read = rollout.replay or rollout.correction != "none" or config.reward.kl != "none"
    return "current" if one and not read else "recompute"


def updates(config: Config) -> int:
    """Return the optimizer updates of the whole run."""
    return config.loop.steps * config.batch.epochs * config.batch.minibatches


def trains_scorer(config: Config) -> bool:
    """Whether the run makes a reward model instead of a policy."""
    return terms(config)[0].row.inputs is of_scores


def needs_critic(config: Config) -> bool:
    """Whether a loss's advantages read the values of a critic."""
    return not offline(config) and any(term.row.critic for term in terms(config))


def in_streams(config: Config) -> bool:
    """Whether sampled rows lie in streams, each prompt once and without padding."""
    return not offline(config) and config.batch.packing is not False


def reads_whole_rows(config: Config) -> bool:
    """Whether a network is given rows that lie in no stream, to which a fused kernel can attend."""
    return not in_streams(config) or config.reward.source == "model"
