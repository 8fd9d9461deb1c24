"""Writes preference pairs of worked Countdown traces, for DPO and for a reward model.

    python tools/countdown_pairs.py configs/data/countdown_pairs.jsonl

A line has `prompt` (messages, the prefill last), `chosen`, a trace whose answer is right, and
`rejected`, one whose answer is wrong: in half of the pairs because it gives up, in half because it
claims two numbers that do not make the remainder, as a trained policy does. Both have the right
form. The two are about as long in the bundled tokenizer's tokens, and which one may be the longer
is drawn, so that length decides nothing. The problems are none of the 1,024 that the countdown task
holds out with `numbers: [3]` and `highest: 10`.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import model
from model.tokenizer import Tokenizer, load_tokenizer
from rlx.rewards.countdown import score
from rlx.tasks.countdown import load
from rlx.tasks.countdown_traces import attempts, pair_expressions, redo

PAIRS = 1500
LINES = 3
"""Attempts of a trace at most."""
TOKENS = 48
"""Of a trace at most, its stop token included, as the nano recipes sample."""
TRIES = 60
"""Walks through a problem, from which its pair is taken."""


def walk(row: dict, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, trace) for each way in which a walk's first attempts may end."""
    past = ""
    for number, chain in enumerate(attempts(row["target"], tuple(row["nums"]), rng), start=1):
        if number > LINES:
            return
        pairs = pair_expressions(chain[-1].left)
        found = [pair for pair, value in pairs if value == chain[-1].rest]
        pair = rng.choice(found) if found else rng.choice(pairs)[0]
        start = past + " ".join(undo.equation for undo in chain)
        end = f"\n</think><answer>{redo(pair, chain).text}</answer>"
        if found:
            yield "right", f"{start} {pair.text}{end}"
            return
        yield "gave up", f"{start} no{end}"
        yield "claimed", f"{start} {pair.text}{end}"
        past = f"{start} no\n"


def make_pair(
    row: dict, wrong: str, longer: str, tokenizer: Tokenizer, rng: random.Random
) -> dict | None:
    """A pair whose `longer` side has as few tokens more as can be; None where there is no pair."""
    traces: dict[str, set[str]] = {"right": set(), "gave up": set(), "claimed": set()}
    for _ in range(TRIES):
        for kind, text in walk(row, rng):
            if score(text, row).correct == (kind == "right"):
                traces[kind].add(text)
    lengths = {text: len(tokenizer.encode(text)) for texts in traces.values() for text in texts}
    sides = [
        {"chosen": chosen, "rejected": rejected}
        for chosen in sorted(traces["right"])
        for rejected in sorted(traces[wrong])
        if max(lengths[chosen], lengths[rejected]) < TOKENS
    ]
    shorter = "rejected" if longer == "chosen" else "chosen"

    def gap(side: dict) -> tuple[int, int]:
        tokens = lengths[side[longer]] - lengths[side[shorter]]
        return tokens, abs(len(side["chosen"]) - len(side["rejected"]))

    sides = [side for side in sides if gap(side)[0] >= 0]
    if not sides:
        return None
    least = min(map(gap, sides))
    return rng.choice([side for side in sides if gap(side) == least])


def make(file: Path) -> None:
    task = load(
        seed=0,
        train_size=PAIRS + 100,
        heldout_size=1024,
        numbers=(3,),
        highest=10,
        language="brief",
    )
    tokenizer = load_tokenizer(Path(model.__file__).parent / "assets" / "nano")
    rng = random.Random("countdown pairs")
    lines = []
    for row in task.train:
        wrong, longer = rng.choice(("gave up", "claimed")), rng.choice(("chosen", "rejected"))
        if len(lines) < PAIRS and (pair := make_pair(row, wrong, longer, tokenizer, rng)):
            lines.append(json.dumps({"prompt": row["prompt"]} | pair, separators=(",", ":")))
    file.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
