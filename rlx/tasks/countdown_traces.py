"""Worked Countdown traces for a supervised start: a solver that undoes the last operation.

With target 24 and numbers 3 5 9, two attempts and the answer read

    24-3=21 no
    24-9=15 5*3
    </think><answer>5*3+9</answer>

An attempt supposes which number came last, and how: it writes the equation that undoes that step,
and so on until two numbers are left, which either make the remainder or do not. Moves are drawn at
random and never by looking ahead, and the solver soon gives up with a wrong guess of the right
form. So a model that has learnt from traces knows the form and the arithmetic, while persistence
and choice are left to be learnt from reward.
"""

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from model.errors import BadInput
from rlx.rewards.countdown import problem

LARGEST = 100
"""Of a remainder: longer ones are seldom of use, and cost a small model most of its arithmetic."""

ADDITIVE, MULTIPLICATIVE = 1, 2


class Expression(NamedTuple):
    text: str
    precedence: int


class Undo(NamedTuple):
    """One step backwards: `number` entered last, by `form`, and `rest` was there before it."""

    equation: str
    form: str
    number: int
    rest: int
    left: tuple[int, ...]
    """The numbers not yet placed."""


def demonstrate(row: Mapping, rng: random.Random, *, give_up: float) -> str:
    """The completion after the prefill `<think>`.

    `give_up` is the probability of giving up after a failed attempt. An answer after success is
    right; one after failure uses each number once and is wrong.
    """
    if not 0 <= give_up <= 1:
        raise BadInput(f"`give_up` is a probability, so {give_up} is out of range.")
    nums, target = problem(row)
    if len(nums) < 2:
        raise BadInput(f"A trace needs at least two numbers; the row has {nums}.")
    lines = []
    # what is answered if there is no step that could be undone at all
    answer = Expression("+".join(map(str, nums)), ADDITIVE)
    for chain in attempts(target, tuple(nums), rng):
        rest, left = (chain[-1].rest, chain[-1].left) if chain else (target, tuple(nums))
        pairs = pair_expressions(left)
        found = [pair for pair, value in pairs if value == rest]
        pair = rng.choice(found) if found else rng.choice(pairs)[0]
        answer = redo(pair, chain)
        words = [undo.equation for undo in chain] + [pair.text if found else "no"]
        lines.append(" ".join(words) + "\n")
        if found or rng.random() < give_up:
            break
    return "".join(lines) + f"</think><answer>{answer.text}</answer>"


def attempts(
    target: int, numbers: tuple[int, ...], rng: random.Random
) -> Iterator[tuple[Undo, ...]]:
    """Chains of steps that leave two numbers: each chain once, each step drawn at random."""
    if len(numbers) == 2:
        yield ()
        return
    moves = undo_moves(target, numbers)
    tails: dict[Undo, Iterator[tuple[Undo, ...]]] = {}
    while moves:
        move = rng.choice(moves)
        tail = tails.setdefault(move, attempts(move.rest, move.left, rng))
        chain = next(tail, None)
        if chain is None:
            moves.remove(move)
        else:
            yield (move, *chain)


def undo_moves(target: int, numbers: tuple[int, ...]) -> list[Undo]:
    """Every step that may have been the last, with a whole positive remainder up to LARGEST."""
    moves: dict[str, Undo] = {}
    for number in dict.fromkeys(numbers):
        place = numbers.index(number)
        left = numbers[:place] + numbers[place + 1 :]
        candidates = [
            ("rest+a", f"{target}-{number}", target - number),
            ("rest-a", f"{target}+{number}", target + number),
            ("a-rest", f"{number}-{target}", number - target),
            ("rest/a", f"{target}*{number}", target * number),
        ]
        if number and target % number == 0:
            candidates.append(("rest*a", f"{target}/{number}", target // number))
        if target and number % target == 0:
            candidates.append(("a/rest", f"{number}/{target}", number // target))
        for form, undoing, rest in candidates:
            if 0 < rest <= LARGEST:
                # one of a kind: for a number that equals the target, both divisions read alike
                equation = f"{undoing}={rest}"
                moves.setdefault(equation, Undo(equation, form, number, rest, left))
    return list(moves.values())


def pair_expressions(pair: tuple[int, ...]) -> list[tuple[Expression, int | None]]:
    """The ways to join two numbers, the larger first, with their values; None: not whole."""
    low, high = sorted(pair)
    quotient = high // low if low and high % low == 0 else None
    return [
        (Expression(f"{high}+{low}", ADDITIVE), high + low),
        (Expression(f"{high}-{low}", ADDITIVE), high - low),
        (Expression(f"{high}*{low}", MULTIPLICATIVE), high * low),
        (Expression(f"{high}/{low}", MULTIPLICATIVE), quotient),
    ]


def redo(rest: Expression, chain: tuple[Undo, ...]) -> Expression:
    """The whole expression: put back what the chain took off, with no parenthesis too many."""
    for undo in reversed(chain):
        bracketed = f"({rest.text})"
        factor = bracketed if rest.precedence == ADDITIVE else rest.text
        match undo.form:
            case "rest+a":
                rest = Expression(f"{rest.text}+{undo.number}", ADDITIVE)
            case "rest-a":
                rest = Expression(f"{rest.text}-{undo.number}", ADDITIVE)
            case "a-rest":
                rest = Expression(f"{undo.number}-{factor}", ADDITIVE)
            case "rest*a":
                rest = Expression(f"{factor}*{undo.number}", MULTIPLICATIVE)
            case "rest/a":
                rest = Expression(f"{factor}/{undo.number}", MULTIPLICATIVE)
            case "a/rest":
                rest = Expression(f"{undo.number}/{bracketed}", MULTIPLICATIVE)
    return rest
