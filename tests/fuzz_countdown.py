"""A program that throws odd and hostile answers at Countdown's verifier.

    python tests/fuzz_countdown.py --count 1000000

Answers are made by a grammar, then broken: characters put in, left out or doubled, tags moved. It
stops with an error at the first exception, answer over the time limit, reward out of range, or
verdict that a slow check by another way (Python's own parser) does not share.
"""

import argparse
import ast
import json
import random
import re
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlx.rewards.countdown import score

SECONDS = 0.5
BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
ODD = [
    *"+-*/() 0123456789.,=_^%eE\n\t#",
    *("**", "//", "--", "---", "++", "1_0", "0x1", "07", "(3)(4)", "1 2", "=24", "×", "÷", "−"),
    *("３", "²", "٣", "\u200b", "\ufeff", "\u2028", "\x00", "<answer>", "</answer>", "<think>"),
    *("</think>", "<!--", "__import__('os')", "9" * 400, "(" * 40, ")" * 40, "-" * 50),
]


def fuzz(count: int, seed: int) -> Counter:
    """How often each verdict came. Raises AssertionError with the input at the first fault."""
    rng, counts = random.Random(seed), Counter()
    for _ in range(count):
        row, completion = case(rng)
        started = time.perf_counter()
        found = score(completion, row)
        seconds = time.perf_counter() - started
        told = (completion, row, found)
        assert seconds < SECONDS, (seconds, told)
        assert 0 <= found.reward <= 1.1, told
        assert found.correct == slowly_right(completion, row), told
        counts["right" if found.correct else found.reason.split(":")[0][:40]] += 1
    return counts


def case(rng: random.Random) -> tuple[dict, str]:
    nums = [rng.randint(0, rng.choice((3, 12, 99))) for _ in range(rng.randint(1, 5))]
    text = expression(rng, rng.sample(nums, len(nums)))
    value = worth(text)
    target = rng.randint(0, 50)
    if value is not None and value.denominator == 1 and rng.random() < 0.8:
        target = int(value)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        place, other = rng.randint(0, len(text)), rng.choice(ODD)
        text = text[:place] + other + text[place + rng.choice((0, 0, 1)) :]
    completion = f"x</think>{rng.choice(('', ' ', chr(10)))}<answer>{text}</answer>"
    if rng.random() < 0.1:
        place = rng.randint(0, len(completion))
        completion = completion[:place] + rng.choice(ODD) + completion[place:]
    if rng.random() < 0.05:
        completion += f"<answer>{expression(rng, nums)}</answer>"
    return {"nums": nums, "target": target, "prefill": "<think>"}, completion


def expression(rng: random.Random, nums: list[int]) -> str:
    if len(nums) == 1:
        return rng.choice(("", "", "", "-")) + str(nums[0])
    cut = rng.randint(1, len(nums) - 1)
    left, right = expression(rng, nums[:cut]), expression(rng, nums[cut:])
    space = rng.choice(("", "", " "))
    text = f"{left}{space}{rng.choice('+-*/')}{space}{right}"
    return f"({text})" if rng.random() < 0.5 else text


def slowly_right(completion: str, row: dict) -> bool:
    """By Python's parser, after what the grammar excludes is refused by patterns."""
    blocks = BLOCK.findall(completion)
    if not blocks:
        return False
    # An unclosed tag after the last whole block does not undo it.
    text = blocks[-1].strip()
    if len(text) > 1000 or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return False
    numbers = re.findall(r"[0-9]+", text)
    if any(len(number) > 1 and number[0] == "0" for number in numbers):
        return False
    if sorted(map(int, numbers)) != sorted(row["nums"]) or deepest(text) > 32:
        return False
    return worth(text) == row["target"]


def deepest(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        most = max(most, depth)
    return most


def worth(text: str) -> Fraction | None:
    """The exact value, or None for what is no expression of the grammar."""
    bare = text.replace(" ", "")
    # One minus before a number or a parenthesis, no plus, no power, no floor, no call.
    if re.search(r"\*\*|//|(?:^|[-+*/(])\+|(?:^|\()--|[-+*/]--|\)\(|[0-9]\(|\)[0-9]", bare):
        return None
    if re.search(r"[0-9] +[0-9]|\* +\*|/ +/", text):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError, MemoryError, RecursionError):
        return None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError(f"{type(node).__name__} is not of the grammar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(fuzz(options.count, options.seed).most_common(12)))


if __name__ == "__main__":
    main()
