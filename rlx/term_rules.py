"""What training refuses of the terms: which losses can be added up, and what each of them needs."""

from collections.abc import Iterator

import jax

from rlx.algorithms import TERMS
from rlx.algorithms.record import of_logprobs
from rlx.config_problems import Problem
from rlx.derived import terms
from rlx.settings import Config
from rlx.signatures import ChosenTerm, SeveralTerms
from rlx.traced import abstract_rollout, loss_a_row, reads_old, weight_a_row
from rlx.yaml_text import shown


def term_problems(config: Config) -> Iterator[Problem]:
    """Which losses can be added up: all must be of the text that the first one brings."""
    yield from _reductions(config)
    first, *others = terms(config)
    if first.name in TERMS and first.row.source == "rollouts":
        yield Problem(
            ("algorithm.terms[0].name",),
            f"expected an algorithm, since the first term decides what text there is to learn from "
            f"and {first.name} stands beside one; came {shown(first.name)}",
        )
        return
    with_critic = [first.name] if first.row.critic else []
    for place, term in enumerate(others, start=1):
        path = f"algorithm.terms[{place}].name"
        if term.row.critic:
            with_critic.append(term.name)
        if because := _misfit(first, term):
            yield Problem((path,), f"expected another term, since {because}; came {term.name}")
        elif term.row.critic and len(with_critic) > 1:
            yield Problem(
                (path,),
                f"expected one term with a critic, since there is one critic; came "
                f"{' and '.join(with_critic)}",
            )


def _reductions(config: Config) -> Iterator[Problem]:
    """A reduction that is chosen must fit the loss."""
    algorithm = config.algorithm
    several = isinstance(algorithm, SeveralTerms)
    sections = algorithm.terms if several else (algorithm,)
    for place, (section, term) in enumerate(zip(sections, terms(config), strict=True)):
        if not getattr(section, "reduction", ""):
            continue
        bound = term.row.bind(**term.hyper)
        if weight_a_row(bound.weights) and not loss_a_row(bound.loss):
            path = f"algorithm.terms[{place}].reduction" if several else "algorithm.reduction"
            yield Problem(
                (path,),
                f"expected a mean over tokens, since the loss of {term.name} has a value for each: "
                "a mean over rows would add up what stands at padding",
            )


def _misfit(first: ChosenTerm, term: ChosenTerm) -> str:
    """Why a term can't stand behind the first one, or nothing."""
    for name in (first.name, term.name):
        if name in TERMS and TERMS[name].source != "rollouts":
            return f"{name} trains another model than the policy and stands alone"
    kind = first.row.source
    if kind == "rollouts" or term.row.source == "texts":
        return ""
    if term.row.source == "pairs":
        return "" if kind == "pairs" else f"{first.name} learns from texts, which are no pairs"
    if term.name not in TERMS:
        return f"{first.name} learns from data as it stands and {term.name} from sampled text"
    if term.row.reference and kind == "texts":
        return f"{first.name} learns from texts, for which no reference is loaded"
    # What the policy was when the text was sampled exists for sampled text only.
    if reads_old(term.row.loss):
        return f"{term.name} weighs by a ratio to the sampling policy, and {first.name} has none"
    return ""


def of_rows(term: ChosenTerm) -> bool:
    """Whether a policy term's loss is one value a row."""
    if term.row.source != "rollouts" or term.row.inputs is not of_logprobs:
        return False
    return loss_a_row(term.row.bind(**term.hyper).loss)


def compares(term: ChosenTerm) -> bool:
    """Whether the advantages compare a group: then there are none of a single sample."""
    if term.row.advantages is None:
        return False
    try:
        jax.eval_shape(term.row.advantages, abstract_rollout(1))
    except ValueError:
        return True
    return False
