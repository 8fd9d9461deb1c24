"""A run's data as the model will see it: what `data` on the command line shows.

Reads the task and the tokenizer; loads no weights and compiles nothing.
"""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from model.config import read_config
from model.errors import BadInput
from model.tokenizer import Tokenizer, load_tokenizer
from rlx.data import encode_conversation
from rlx.derived import source
from rlx.policy import checkpoint_folder
from rlx.rewards.host import HostVerifier
from rlx.settings import Config
from rlx.task_loading import load_task
from rlx.tasks import Pair, Task
from rlx.tasks.task import Answered, Messages

NAMED = 5
"""So many of the rows that do not fit are named."""
WIDTH = 200
"""Characters of a row's field that a person is shown."""


class Text(NamedTuple):
    """One row's pieces as ids by their names, and what else is shown of it."""

    pieces: dict[str, list[int]]
    shown: Mapping[str, Any] = {}


class Kind(NamedTuple):
    """What a run learns from or is measured on."""

    name: str
    train: list[Text]
    heldout: list[Text]
    limits: dict[str, int]
    """Most tokens of a piece."""
    beyond: dict[str, str]
    """What training does with a longer piece."""


def inspect(config: Config, count: int) -> dict[str, Any]:
    """The first `count` training rows as text, numbers of rows and tokens, and notes."""
    if count < 0:
        raise BadInput(f"--show: expected at least 0; came {count}.")
    folder = checkpoint_folder(config.model.path)
    tokenizer = load_tokenizer(folder, config.model.chat_template_kwargs)
    task = load_task(config)
    kind = _kind(config, task, tokenizer)
    notes = [*task.notes, *_long(kind)]
    if (folder / "config.json").is_file():  # a tokenizer alone is enough to look at data
        longest = max(_longest(kind, config.sampling.max_new_tokens), default=0)
        positions = read_config(folder).max_positions
        if longest > positions:
            notes.append(
                f"A text may come to {longest} tokens, and the model has {positions} positions; "
                "training refuses that."
            )
    first = kind.train[:count]
    if task.mixture is not None:  # its rows lie task by task
        first = [text for name in task.mixture.tasks for text in _of(name, kind.train)[:count]]
    result = {
        "task": task.name,
        "model": config.model.path,
        "kind": kind.name,
        "train": _counted(kind.train, kind.limits),
        "heldout": _counted(kind.heldout, kind.limits),
        "limits": kind.limits,
        "first": [_as_text(text, tokenizer) for text in first],
        "notes": notes,
    }
    if task.mixture is not None:
        result["tasks"] = {
            name: {"train": len(_of(name, kind.train)), "heldout": len(_of(name, kind.heldout))}
            for name in task.mixture.tasks
        }
    if kind.name == "prompts" and task.score is not None and config.reward.source == "verifier":
        # As training does at its start: a verifier that cannot read the rows says so here.
        verifier = HostVerifier(task.score, task.train[:1], tokenizer.decode, tokenizer.stop_ids)
        result["components"] = list(verifier.components)
    return result


def told(result: dict[str, Any]) -> str:
    """The same for a person to read."""
    lines = [f"task {result['task']}  model {result['model']}  {result['kind']}", ""]
    for i, row in enumerate(result["first"], start=1):
        for name, value in row.items():
            if name == "tokens":
                continue
            tokens = f", {row['tokens'][name]} tokens" if name in row["tokens"] else ""
            lines += [f"---- row {i}: {name}{tokens}", *_as_lines(value)]
        lines.append("")
    lines.append(f"{'':24}{'rows':>8}{'min':>8}{'median':>8}{'max':>8}{'over':>8}{'limit':>8}")
    for part in ("train", "heldout"):
        counted = result[part]
        for name, tokens in counted["tokens"].items():
            numbers = [tokens[key] for key in ("min", "median", "max", "over")]
            columns = [counted["rows"], *numbers, result["limits"].get(name, "")]
            lines.append(f"{f'{part} {name}':24}" + "".join(f"{_number(x):>8}" for x in columns))
        if not counted["rows"]:
            lines.append(f"{part:24}{0:>8}")
    for name, counts in result.get("tasks", {}).items():
        lines.append(f"{name}: {counts['train']} rows to train, {counts['heldout']} held out")
    if "components" in result:
        lines += ["", f"components of a score: {', '.join(result['components'])}"]
    if result["notes"]:
        lines += ["", *(f"note: {note}" for note in result["notes"])]
    return "\n".join(lines)


# ---- what there is to learn from ---------------------------------------------------------------


def _kind(config: Config, task: Task, tokenizer: Tokenizer) -> Kind:
    """Raises BadInput where the task has nothing of what the algorithm learns from."""
    sampling = config.sampling
    prompt, completion = sampling.max_prompt_tokens, sampling.max_new_tokens
    long = (
        "training leaves them out" if sampling.long_prompts == "skip" else "training refuses them"
    )
    if source(config) == "pairs":
        if not task.pairs:
            raise BadInput(f"task.name: {task.name} has no preference pairs to learn from.")
        return Kind(
            "pairs",
            _texts(_pair, task.pairs, tokenizer, "preference pair"),
            _texts(_pair, task.heldout_pairs or (), tokenizer, "held-out preference pair"),
            {"prompt": prompt, "chosen": completion, "rejected": completion},
            {"prompt": "training leaves their pairs out"}
            | dict.fromkeys(("chosen", "rejected"), "training cuts them there"),
        )
    if source(config) == "texts" and task.conversations:
        return Kind(
            "chats",
            _texts(_chat, task.conversations, tokenizer, "conversation"),
            _texts(_chat, task.heldout_conversations or (), tokenizer, "held-out conversation"),
            {"text": prompt + completion},
            {"text": "training leaves them out"},
        )
    heldout = _texts(_prompt, task.heldout, tokenizer, "held-out row")
    if source(config) == "rollouts":
        train = _texts(_prompt, task.train, tokenizer, "training row")
        return Kind("prompts", train, heldout, {"prompt": prompt}, {"prompt": long})
    if task.demonstrate is None:
        raise BadInput(f"task.name: {task.name} has no worked examples to be fine-tuned on.")
    rng = random.Random(config.run.seed)  # what is drawn is what training draws
    worked = functools.partial(_worked, task, rng, prompt)
    return Kind(
        "worked examples",
        _texts(worked, task.train, tokenizer, "training row"),
        heldout,
        {"prompt": prompt, "completion": completion},
        {"prompt": long, "completion": "training leaves them out"},
    )


def _texts(
    of: Callable[[Any, Tokenizer], Iterable[Text]],
    rows: Iterable[Any],
    tokenizer: Tokenizer,
    what: str,
) -> list[Text]:
    texts = []
    for i, row in enumerate(rows):
        try:
            texts += of(row, tokenizer)
        except BadInput as error:
            raise BadInput(f"{what} {i}: {error}") from error
    return texts


def _prompt(row: Mapping[str, Any], tokenizer: Tokenizer) -> list[Text]:
    fields = {name: value for name, value in row.items() if name != "prompt"}
    return [Text({"prompt": tokenizer.encode_prompt(row["prompt"])}, {"fields": fields})]


def _pair(pair: Pair, tokenizer: Tokenizer) -> list[Text]:
    answers = {"chosen": pair.chosen, "rejected": pair.rejected}
    pieces = {name: tokenizer.encode_answer(pair.prompt, text) for name, text in answers.items()}
    margin = {"margin": pair.margin} if pair.margin else {}
    return [Text({"prompt": tokenizer.encode_prompt(pair.prompt)} | pieces, margin)]


def _chat(chat: Messages | Answered, tokenizer: Tokenizer) -> list[Text]:
    return [
        Text({"text": ids}, {"learnt": _runs(ids, assistant, tokenizer)})
        for ids, assistant in encode_conversation(chat, tokenizer)
    ]


def _runs(ids: list[int], assistant: list[bool], tokenizer: Tokenizer) -> list[str]:
    """The stretches that the mask is true on."""
    edges = np.flatnonzero(np.diff([0, *assistant, 0]))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2).tolist()]


def _worked(
    task: Task, rng: random.Random, longest: int, row: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[Text]:
    prompt = tokenizer.encode_prompt(row["prompt"])
    if len(prompt) > longest:
        rng = random.Random(0)  # training, which leaves the row out, draws nothing for it
    for _ in range(task.demonstrations):
        completion = tokenizer.encode_answer(row["prompt"], task.demonstrate(row, rng))
        yield Text({"prompt": prompt, "completion": completion})


# ---- numbers and text --------------------------------------------------------------------------


def _counted(texts: Sequence[Text], limits: dict[str, int]) -> dict[str, Any]:
    tokens = {}
    for name in texts[0].pieces if texts else ():
        lengths = np.array([len(text.pieces[name]) for text in texts])
        tokens[name] = {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
            "over": int((lengths > limits[name]).sum()),
        }
    return {"rows": len(texts), "tokens": tokens}


def _long(kind: Kind) -> Iterator[str]:
    """Which rows have a piece beyond its limit, a sentence for each piece."""
    for part, texts in (("training", kind.train), ("held-out", kind.heldout)):
        for name, limit in kind.limits.items():
            long = [i for i, t in enumerate(texts) if len(t.pieces.get(name, ())) > limit]
            if long:
                rows = ", ".join(map(str, long[:NAMED])) + (", ..." if len(long) > NAMED else "")
                yield (
                    f"{len(long)} of {len(texts)} {part} rows have a {name} of more than {limit} "
                    f"tokens (counted from 0: {rows}); {kind.beyond[name]}."
                )


def _longest(kind: Kind, new_tokens: int) -> Iterator[int]:
    """How long each text that is not left out can become: what is cut is cut."""
    for text in (*kind.train, *kind.heldout):
        (name, start), *ends = text.pieces.items()
        if len(start) <= kind.limits[name]:
            lengths = [min(len(ids), kind.limits[end]) for end, ids in ends]
            if name == "prompt" and not ends:
                lengths = [new_tokens]
            yield len(start) + max(lengths, default=0)


def _of(task: str, texts: Sequence[Text]) -> list[Text]:
    """A mixture's texts of one of its tasks."""
    return [text for text in texts if text.shown["fields"]["task"] == task]


def _as_text(text: Text, tokenizer: Tokenizer) -> dict[str, Any]:
    decoded = {name: tokenizer.decode(ids) for name, ids in text.pieces.items()}
    lengths = {name: len(ids) for name, ids in text.pieces.items()}
    return {**decoded, **text.shown, "tokens": lengths}


def _as_lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: {_short(repr(inner))}" for name, inner in value.items()]
    return [repr(x) for x in value] if isinstance(value, list) else [str(value)]


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[:WIDTH]} ... ({len(text)} characters)"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
