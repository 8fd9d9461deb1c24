"""A judge: a language model that scores by a rubric what no rule decides. No JAX.

    reward = (said - scale_lowest) / (scale_highest - scale_lowest)

There is no verdict, JudgeFailure, and the row is left out, where the reply is malformed, refused,
late, over the budget or less confident than `min_confidence`. A candidate that is empty or longer
than `longest` characters is not sent: it earns 0.
"""

import importlib.util
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from model.errors import BadInput
from rlx.rewards import judge_cache
from rlx.rewards.judge_client import Endpoint, JudgeFailure, ask
from rlx.rewards.judge_prompt import RUBRIC, Judged, candidate_text, messages, unfit
from rlx.rewards.judge_reply import Malformed, read_reply, scaled
from rlx.rewards.score import Score


def score(
    completion: str,
    row: Mapping,
    *,
    base_url: str,
    judge_model: str,
    api_key_env: str = "",
    rubric: str = RUBRIC,
    judged: Judged = "completion",
    scale_lowest: float = 0.0,
    scale_highest: float = 1.0,
    min_confidence: float = 0.5,
    seconds: float = 60.0,
    concurrency: int = 16,
    retries: int = 3,
    budget: int = 0,
    cache: str = "",
    judge_temperature: float | None = 0.0,
    judge_tokens: int = 1024,
    longest: int = 50_000,
) -> Score:
    """Judge a completion of a row with `question`, or with the chat messages of a `prompt`.

    A row's `reference`, or an `answer` that is text, is shown to the judge; a row's own rubric is
    added to the rubric. `base_url` is the server's address, with its /v1. `judge_model` is the name
    that the server has for the model. `judged` is the part of the completion that counts: answer is
    the last answer block or, where none is opened, what follows the think block; reasoning is what
    stands before both. `rubric` is a text or the name of a .txt or .md file. `scale_lowest` is the
    worst score that the judge may say. `scale_highest` is the best. `min_confidence` is what a
    verdict must have to count. `api_key_env` names the environment variable with the key, where the
    server asks for one. `seconds` is the time limit of one request. `concurrency` is how many
    requests are under way at a time. `retries` is how often a failed request is repeated. `budget`
    is the number of requests at most, repeated ones too (0: no limit). `cache` is a folder for
    replies, which keeps the count of requests too, over all runs. `judge_temperature` null and
    `judge_tokens` 0 are not sent. `longest` is how many characters a candidate may have; a longer
    one earns 0.

    Raises JudgeFailure where there is no verdict, RowError for a row that asks nothing.
    """
    settings = {name: value for name, value in locals().items() if name in SETTINGS}
    result = score_many([(completion, row)], **settings)[0]
    if isinstance(result, Exception):
        raise result
    return result


SETTINGS = {
    name: parameter.default
    for name, parameter in inspect.signature(score).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def score_many(pairs: Sequence[tuple[str, Mapping]], **settings: Any) -> list[Score | Exception]:
    """The score of each completion of a row, or its error; `concurrency` requests at a time.

    Pairs in which the same is asked are one request. `settings` are those of `score`.
    """
    judge = checked(**settings)
    results: list[Any] = [None] * len(pairs)
    contents: dict[str, dict[str, Any]] = {}
    places: dict[str, list[int]] = {}
    for i, (completion, row) in enumerate(pairs):
        try:
            candidate = candidate_text(completion, row, judge.judged)
            if fault := unfit(candidate, judge.longest):
                results[i] = _score(0.0, 1.0, fault)
                continue
            # no address: a model is the same model wherever it is served
            content = {
                "model": judge.endpoint.model,
                "sampling": judge.endpoint.sampling(),
                "messages": messages(
                    candidate,
                    row,
                    rubric=judge.rubric,
                    lowest=judge.lowest,
                    highest=judge.highest,
                ),
            }
        except Exception as error:
            results[i] = error
            continue
        key = judge_cache.key(content)
        contents[key] = content
        places.setdefault(key, []).append(i)
    for key, reply in _replies(contents, judge).items():
        outcome = _outcome(reply, judge)
        for i in places[key]:
            results[i] = outcome
    return results


class Judge(NamedTuple):
    """The settings, checked and read."""

    endpoint: Endpoint
    rubric: str
    judged: Judged
    lowest: float
    highest: float
    min_confidence: float
    longest: int


def checked(**settings: Any) -> Judge:
    """Raises BadInput for a setting that is missing, unknown or out of its range."""
    given = SETTINGS | settings
    if unknown := sorted(given.keys() - SETTINGS.keys()):
        raise BadInput(f"A judge has no settings {', '.join(unknown)}.")
    if missing := [name for name in given if given[name] is inspect.Parameter.empty]:
        raise BadInput(f"A judge needs the settings {', '.join(missing)}.")

    def expect(name: str, fits: Any, expected: str) -> None:
        if not fits:
            raise BadInput(f"{name}: expected {expected}; came {given[name]!r}.")

    def within(name: str, lowest: float, highest: float) -> None:
        expect(name, lowest <= given[name] <= highest, f"{lowest:g} to {highest:g}")

    expect(
        "base_url",
        given["base_url"].startswith(("http://", "https://")),
        "where the judge is, as in http://localhost:8000/v1",
    )
    expect("judge_model", given["judge_model"], "the name of a model that the judge's server has")
    variable = given["api_key_env"]
    expect(
        "api_key_env",
        not variable or os.environ.get(variable),
        "an environment variable that is set",
    )
    expect("judged", given["judged"] in get_args(Judged), f"one of {', '.join(get_args(Judged))}")
    lowest, highest = given["scale_lowest"], given["scale_highest"]
    expect(
        "scale_highest",
        math.isfinite(highest - lowest) and lowest < highest,
        f"a number above scale_lowest, which is {lowest:g}",
    )
    within("min_confidence", 0.0, 1.0)
    within("seconds", 0.001, 3600.0)
    within("concurrency", 1.0, 1000.0)
    within("retries", 0.0, 20.0)
    within("budget", 0.0, math.inf)
    within("judge_tokens", 0.0, math.inf)
    within("longest", 1.0, math.inf)
    if given["judge_temperature"] is not None:
        within("judge_temperature", 0.0, 2.0)
    return Judge(
        endpoint=Endpoint(
            base_url=given["base_url"],
            model=given["judge_model"],
            api_key_env=variable,
            seconds=given["seconds"],
            concurrency=given["concurrency"],
            retries=given["retries"],
            budget=given["budget"],
            temperature=given["judge_temperature"],
            tokens=given["judge_tokens"],
            folder=given["cache"] and str(Path(given["cache"]).expanduser()),
        ),
        rubric=read_rubric(given["rubric"]),
        judged=given["judged"],
        lowest=lowest,
        highest=highest,
        min_confidence=given["min_confidence"],
        longest=given["longest"],
    )


def check(**settings: Any) -> None:
    """Raises BadInput for settings that a judge cannot work with; asks nothing."""
    if importlib.util.find_spec("openai") is None:
        raise BadInput("A judge needs the package openai: pip install 'rlx[judge]'.")
    judge = checked(**settings)
    if folder := judge.endpoint.folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cache: {folder} can't be made a folder: {error}") from error


def read_rubric(rubric: str) -> str:
    """The text itself, or that of the file that it names."""
    text = rubric
    if "\n" not in rubric and rubric.endswith((".txt", ".md")):
        try:
            text = Path(rubric).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"rubric: the file {rubric} can't be read: {error}") from error
    if not text.strip():
        raise BadInput("rubric: expected what the judge is to look at; came nothing.")
    return text


def _replies(contents: dict[str, dict[str, Any]], judge: Judge) -> dict[str, str | JudgeFailure]:
    """The reply to each content by its key, from the cache or from the judge."""
    folder = judge.endpoint.folder
    found = {key: judge_cache.recall(folder, key) if folder else None for key in contents}
    absent = [key for key, reply in found.items() if reply is None]

    def arrived(i: int, reply: str) -> None:
        if folder and not isinstance(_outcome(reply, judge), Malformed):
            judge_cache.keep(folder, absent[i], contents[absent[i]], reply)

    asked = ask(judge.endpoint, [contents[key]["messages"] for key in absent], arrived)
    return found | dict(zip(absent, asked, strict=True))


def _outcome(reply: str | JudgeFailure, judge: Judge) -> Score | JudgeFailure:
    try:
        if isinstance(reply, JudgeFailure):
            raise reply
        said = read_reply(reply)
        value = scaled(said.score, judge.lowest, judge.highest)
        if said.confidence < judge.min_confidence:
            raise JudgeFailure(
                f"the judge's confidence is {said.confidence:g}, below {judge.min_confidence:g}"
            )
    except JudgeFailure as failure:
        return failure
    told = f"the judge gave {said.score} of {judge.highest:g}: {said.reason[:500]}"
    return _score(value, said.confidence, told)


def _score(value: float, confidence: float, reason: str) -> Score:
    components = {"score": value, "confidence": confidence}
    return Score(value, None, components, reason, weights={"score": 1.0})


def check_row(row: Mapping) -> None:
    """Raises RowError for a row that can't be judged: told before any reply is paid for."""
    messages(candidate_text("", row, "completion"), row, rubric=RUBRIC, lowest=0.0, highest=1.0)


# A verifier may score many rows at once, and check its settings (build.bind) and rows beforehand.
score.many = score_many
score.check = check
score.check_row = check_row
