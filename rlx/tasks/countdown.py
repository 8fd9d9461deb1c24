"""The Countdown task: problems that are generated or read from files, and the prompts around them.

A problem is a few numbers and a target; an arithmetic expression is sought that uses every number
exactly once and equals the target. Two problems are the same if their numbers, in any order, and
their targets are; no problem stands in both the training and the held-out rows.
"""

import inspect
import json
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from model.errors import BadInput
from rlx.rewards import countdown as verifier
from rlx.rewards.score import RowError
from rlx.tasks.countdown_traces import demonstrate
from rlx.tasks.files import read_located_rows
from rlx.tasks.task import Task

MOST_DRAWS = 100_000
"""The search for one more new problem ends after so many draws."""


class Prompt(NamedTuple):
    system: str
    instruction: str
    """Holds `{numbers}` and `{target}`."""
    prefill: str
    """The start of the assistant's turn; its `<think>` opens the think block."""
    separator: str = ", "


PROMPTS = {
    "en": Prompt(
        system=(
            "You are a helpful assistant. You think the problem through first"
            " and then give the user the answer."
        ),
        instruction=(
            "Use the numbers [{numbers}] to make an expression that equals {target}."
            " You may use addition, subtraction, multiplication and division (+, -, *, /) and"
            " parentheses, and must use each number exactly once."
            " Write your reasoning in <think> </think> tags, and then only the final expression"
            " in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
        ),
        prefill="Let me solve this step by step.\n<think>",
    ),
    "zh": Prompt(
        system="你是一个乐于助人的助手。你会先思考推理过程，然后给出答案。",
        instruction=(
            "请用数字 [{numbers}] 写出一个等于 {target} 的算式。"
            "可以使用加减乘除（+、-、*、/）和括号，每个数字必须恰好使用一次。"
            "请在 <think> </think> 标签中写出推理过程，"
            "然后在 <answer> </answer> 标签中只写最终的算式，"
            "例如 <answer>(1 + 2) / 3</answer>。"
        ),
        prefill="让我一步一步来解。\n<think>",
    ),
    # the bundled nano model's: as few tokens as can be
    "brief": Prompt(
        system="Use each number once.",
        instruction="Write <think> and <answer> for {numbers} to make {target}.",
        prefill="<think>",
        separator=" ",
    ),
}

Problem = tuple[list[int], int]
Key = tuple[tuple[int, ...], int]


def load(
    *,
    seed: int,
    train_size: int = 16384,
    heldout_size: int = 1024,
    numbers: tuple[int, ...] = (3, 4),
    lowest: int = 1,
    highest: int = 99,
    target_lowest: int = 1,
    target_highest: int = 99,
    file: str = "",
    heldout_file: str = "",
    language: str = "en",
    format_weight: float = 0.1,
    line_weight: float = 0.0,
    give_up: float = 0.35,
    demonstrations: int = 1,
) -> Task:
    """Training and held-out problems, with one prompt each and the verifier.

    Without files both are generated: `numbers` are the counts of numbers a problem may have, in
    equal shares, each number from `lowest` to `highest`; every problem has a solution.
    The held-out problems depend on neither the seed nor `train_size`: runs with other seeds, and a
    model trained before by another, are measured on the same problems.

    `file` gives the training rows, `heldout_file` the held-out ones (fields `nums` and `target`;
    or `input` "30,100,93" and `output` "23", the target). The sizes are then upper limits
    (`train_size` 0: all of the file), and training rows that pose a held-out problem are left out.
    With `file` alone, the last `heldout_size` distinct problems of the file are set apart.

    `line_weight` is the reward for sound lines of reasoning, each earned at its own place.

    Raises BadInput for settings that can't be met, with the reason.
    """
    _check_settings(train_size, heldout_size, language, least=0 if file else 1)
    for name, weight in (("format_weight", format_weight), ("line_weight", line_weight)):
        if not 0 <= weight < float("inf"):
            raise BadInput(f"`{name}` must be a number of at least 0, not {weight}.")
    if file:
        _refuse_ignored(
            file,
            numbers=numbers,
            lowest=lowest,
            highest=highest,
            target_lowest=target_lowest,
            target_highest=target_highest,
        )
    else:
        _check_generator(numbers, lowest, highest, target_lowest, target_highest)
    draw = partial(draw_problem, values=(lowest, highest), targets=(target_lowest, target_highest))
    source = read_problems(file) if file else []
    notes: tuple[str, ...] = ()

    if heldout_file:
        heldout = read_problems(heldout_file)
    elif file:
        heldout = _last_distinct(source, heldout_size, file)
    else:
        # text seeds are hashed by SHA-512, which is the same in every process
        rng = random.Random("countdown heldout")
        heldout = generate(draw, numbers, heldout_size, set(), rng)
    taken = {key(problem) for problem in heldout}

    if file:
        left = [problem for problem in source if key(problem) not in taken]
        if not left:
            raise BadInput(f"All problems of {file} are held-out ones; none is left to train.")
        train = left[: train_size or None]
        if len(train) < len(left):
            notes = (
                f"{len(train)} of {len(left)} problems of {file} are trained on: train_size is "
                f"{train_size} (0: all).",
            )
    else:
        rng = random.Random(f"countdown train {seed}")
        train = generate(draw, numbers, train_size, taken, rng)

    return Task(
        name="countdown",
        train=[make_row(problem, language) for problem in train],
        heldout=[make_row(problem, language) for problem in heldout[:heldout_size]],
        score=partial(verifier.score, format_weight=format_weight, line_weight=line_weight),
        demonstrate=partial(demonstrate, give_up=give_up),
        demonstrations=demonstrations,
        notes=notes,
    )


def make_row(problem: Problem, language: str) -> dict:
    """The problem with its prompt, as chat messages that end in the assistant's prefill."""
    nums, target = problem
    prompt = PROMPTS[language]
    instruction = prompt.instruction.format(
        numbers=prompt.separator.join(map(str, nums)), target=target
    )
    messages = [
        {"role": "system", "content": prompt.system},
        {"role": "user", "content": instruction},
        {"role": "assistant", "content": prompt.prefill},
    ]
    return {"prompt": messages, "nums": nums, "target": target, "prefill": prompt.prefill}


def key(problem: Problem) -> Key:
    """What two statements of the same problem have in common."""
    nums, target = problem
    return tuple(sorted(nums)), target


def generate(
    draw: Callable[[random.Random, int], Problem | None],
    numbers: tuple[int, ...],
    size: int,
    taken: set[Key],
    rng: random.Random,
) -> list[Problem]:
    """`size` distinct problems, none of them in `taken`, with equal shares of each of `numbers`.

    A count of numbers that has no new problem left gives its share to the others.
    """
    problems: list[Problem] = []
    seen = set(taken)
    counts = list(numbers)
    while len(problems) < size:
        count = rng.choice(counts)
        draws = (draw(rng, count) for _ in range(MOST_DRAWS))
        new = next((problem for problem in draws if problem and key(problem) not in seen), None)
        if new is not None:
            seen.add(key(new))
            problems.append(new)
            continue
        counts.remove(count)
        if not counts:
            raise BadInput(
                f"Asked for {len(taken) + size} distinct countdown problems, held-out ones"
                f" included, but found only {len(seen)} within these settings; ask for fewer, or"
                " widen `numbers`, `lowest` to `highest` or `target_lowest` to `target_highest`."
            )
    return problems


def draw_problem(
    rng: random.Random, count: int, *, values: tuple[int, int], targets: tuple[int, int]
) -> Problem | None:
    """Draw `count` numbers and join two at a time at random, so that what comes out can be reached.

    None where a step has no positive whole value, or the last value is no allowed target.
    """
    nums = [rng.randint(*values) for _ in range(count)]
    pool = list(nums)
    while len(pool) > 1:
        a = pool.pop(rng.randrange(len(pool)))
        b = pool.pop(rng.randrange(len(pool)))
        match rng.choice("+-*/"):
            case "+":
                pool.append(a + b)
            case "*":
                pool.append(a * b)
            case "-":
                if a == b:
                    return None
                pool.append(abs(a - b))
            case "/":
                low, high = min(a, b), max(a, b)
                if high % low:
                    return None
                pool.append(high // low)
    target = pool[0]
    return (nums, target) if targets[0] <= target <= targets[1] else None


def read_problems(path: str) -> list[Problem]:
    """The problems of a file or folder, in either form; ValueError names the place of a bad one."""
    return [_read_problem(row, place) for place, row in read_located_rows(path)]


def _read_problem(row: dict, place: str) -> Problem:
    fields = row
    if "nums" not in row and "target" not in row and {"input", "output"} <= row.keys():
        try:
            fields = {
                "nums": [int(number) for number in row["input"].split(",")],
                "target": int(row["output"]),
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(
                f'{place}: expected `input` like "30,100,93" and `output` like "23" (the target),'
                f" got {row['input']!r} and {row['output']!r}."
            ) from error
    try:
        return verifier.problem(fields)
    except RowError as error:
        raise BadInput(f"{place}: {error}") from error


def _last_distinct(source: list[Problem], size: int, file: str) -> list[Problem]:
    distinct = list({key(problem): problem for problem in source}.values())
    if size >= len(distinct):
        raise BadInput(
            f"{file} holds {len(distinct)} distinct problems; setting `heldout_size` = {size} of"
            " them apart leaves none to train. Lower `heldout_size`, or name a `heldout_file`."
        )
    return distinct[-size:]


def _check_settings(train_size: int, heldout_size: int, language: str, *, least: int) -> None:
    """`least` training problems."""
    for name, size, lowest in (
        ("train_size", train_size, least),
        ("heldout_size", heldout_size, 1),
    ):
        if size < lowest:
            raise BadInput(f"`{name}` must be at least {lowest}, not {size}.")
    if language not in PROMPTS:
        raise BadInput(f"`language` must be one of {', '.join(PROMPTS)}, not {language!r}.")


def _check_generator(
    numbers: tuple[int, ...], lowest: int, highest: int, target_lowest: int, target_highest: int
) -> None:
    if not numbers or len(set(numbers)) < len(numbers) or not all(2 <= n <= 6 for n in numbers):
        raise BadInput(
            "`numbers`, how many numbers a problem may have, must be different counts"
            f" from 2 to 6, not {list(numbers)}."
        )
    for low_name, low, high_name, high in (
        ("lowest", lowest, "highest", highest),
        ("target_lowest", target_lowest, "target_highest", target_highest),
    ):
        if low < 1:
            raise BadInput(f"`{low_name}` must be at least 1, not {low}.")
        if high < low:
            raise BadInput(f"`{high_name}` = {high} is below `{low_name}` = {low}.")


def _refuse_ignored(file: str, **settings: int | tuple[int, ...]) -> None:
    defaults = inspect.signature(load).parameters
    ignored = [name for name in settings if settings[name] != defaults[name].default]
    if ignored:
        names = ", ".join(f"`{name}`" for name in ignored)
        unset = " ".join(
            f"task.{name}={json.dumps(defaults[name].default, separators=(',', ':'))}"
            for name in ignored
        )
        raise BadInput(
            f"{names} would be ignored: the problems come from {file}. Leave them out, or where a "
            f"recipe sets them, give the defaults: {unset}"
        )
