"""Requests to a judge: many at a time, with back-off, a time limit each and a budget. No JAX.

Any server that speaks OpenAI's chat completions will do. What comes back is text; what it says is
judge_reply.py's to read.
"""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

Messages = list[dict[str, str]]

LONGEST_WAIT = 30.0
"""Seconds between two tries at most, whatever the server asks for."""
FAILURES_IN_A_ROW = 8
"""After so many, or `concurrency` if more, a batch is given up."""
SCHEMA = {
    "type": "object",
    "properties": {
        # first, so that the judge thinks before it decides
        "reason": {"type": "string"},
        "score": {"type": "number"},
        "confidence": {"type": "number"},
    },
    "required": ["reason", "score", "confidence"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA},
}

# Of each judge, by its address and model: what this process has asked, where no cache folder keeps
# the count, and which have been found not to take a format.
_asked: dict[tuple[str, str], int] = {}
_asked_lock = threading.Lock()
_formless: set[tuple[str, str]] = set()


class JudgeFailure(Exception):
    """There is no verdict. The row is left out: this is never a zero."""


class Endpoint(NamedTuple):
    """Where a judge is, and how it is asked."""

    base_url: str
    model: str
    api_key_env: str
    """Environment variable that holds the key; "" where the server wants none."""
    seconds: float
    """Time limit of one request."""
    concurrency: int
    retries: int
    budget: int
    """Requests at most, repeated ones counted; 0: no limit."""
    temperature: float | None
    tokens: int
    folder: str
    """Where the count of requests is kept; "": in this process alone."""

    @property
    def judge(self) -> tuple[str, str]:
        return self.base_url, self.model

    def sampling(self) -> dict[str, Any]:
        """What of a request, beside its messages, a reply depends on."""
        limits = {"max_tokens": self.tokens} if self.tokens else {}
        return limits if self.temperature is None else {"temperature": self.temperature, **limits}


def ask(
    endpoint: Endpoint, requests: Sequence[Messages], arrived: Callable[[int, str], None]
) -> list[str | JudgeFailure]:
    """The reply to each request, or why there is none.

    `arrived(i, reply)` is called as soon as a reply is there, so that none is lost where a batch
    is broken off.
    """
    if not requests:
        return []
    # Comes with openai.
    from anyio.from_thread import start_blocking_portal

    # In a thread of its own, since the caller's may run an event loop, as notebooks do. Whoever
    # breaks off here, by Ctrl-C, breaks the requests off.
    with start_blocking_portal() as portal:
        return portal.call(_ask_all, endpoint, requests, arrived)


async def _ask_all(
    endpoint: Endpoint, requests: Sequence[Messages], arrived: Callable[[int, str], None]
) -> list[str | JudgeFailure]:
    import openai

    key = os.environ.get(endpoint.api_key_env, "") if endpoint.api_key_env else ""
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        # the client refuses to start without one
        api_key=key or "none",
        timeout=endpoint.seconds,
        # its own tries would pass by the budget
        max_retries=0,
    ) as client:
        batch = _Batch(endpoint, client)

        async def answer(i: int) -> str | JudgeFailure:
            try:
                async with batch.slots:
                    reply = await batch.reply(requests[i])
                arrived(i, reply)
            except JudgeFailure as failure:
                return failure
            except Exception as error:
                # one row's failure must not take the batch along
                return JudgeFailure(f"{type(error).__name__}: {str(error)[:300]}")
            return reply

        return list(await asyncio.gather(*map(answer, range(len(requests)))))


class _Batch:
    """What the requests of one batch share."""

    def __init__(self, endpoint: Endpoint, client: "AsyncOpenAI"):
        self.endpoint = endpoint
        self.client = client
        self.slots = asyncio.Semaphore(endpoint.concurrency)
        self.failed_in_a_row = 0
        self.last_failure = ""

    async def reply(self, messages: Messages) -> str:
        """The judge's text. Raises JudgeFailure where no try gives one."""
        # A dead server would otherwise hold a step up for each row's tries in turn.
        if self.failed_in_a_row >= max(FAILURES_IN_A_ROW, self.endpoint.concurrency):
            raise JudgeFailure(
                f"not asked: {self.failed_in_a_row} requests failed, the last: {self.last_failure}"
            )
        try:
            completion = await self._repeatedly(messages)
        except _Refused as refused:
            # of this text alone: it says nothing of the next
            raise JudgeFailure(str(refused)) from refused
        except JudgeFailure as failure:
            self.failed_in_a_row += 1
            self.last_failure = str(failure)
            raise
        self.failed_in_a_row = 0
        return read_completion(completion)

    async def _repeatedly(self, messages: Messages) -> "ChatCompletion":
        for retry in range(self.endpoint.retries + 1):
            try:
                return await self._formatted(messages)
            except _Passing as passing:
                if retry == self.endpoint.retries:
                    raise JudgeFailure(f"{passing} (tries: {retry + 1})") from passing
                # jittered, so that requests that failed together do not come again together
                wait = max(passing.wait, 0.5 * 2**retry * random.uniform(0.75, 1.25))
                await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise AssertionError("the last try returns or raises")

    async def _formatted(self, messages: Messages) -> "ChatCompletion":
        """A request that names the reply's format, and without it where the server refuses."""
        if self.endpoint.judge in _formless:
            return await self._send(messages)
        try:
            return await self._send(messages, response_format=FORMAT)
        except _Refused:
            completion = await self._send(messages)
            _formless.add(self.endpoint.judge)
            return completion

    async def _send(self, messages: Messages, **more: Any) -> "ChatCompletion":
        import openai

        spend(self.endpoint)
        call = self.client.chat.completions.create(
            model=self.endpoint.model, messages=messages, **self.endpoint.sampling(), **more
        )
        try:
            # the client's own limit is one a read, which a server that drips never meets
            return await asyncio.wait_for(call, self.endpoint.seconds)
        except (TimeoutError, openai.APITimeoutError) as error:
            raise _Passing(f"no reply within {self.endpoint.seconds:g} s") from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise _Passing(f"no connection to {self.endpoint.base_url}: {cause}") from error
        except openai.APIStatusError as error:
            told = f"the server answered {error.status_code}: {error.message[:300]}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise _Passing(told, _asked_wait(error.response.headers)) from error
            if error.status_code in (400, 413, 422):
                raise _Refused(told) from error
            raise JudgeFailure(told) from error


class _Refused(Exception):
    """The server does not take the request as it is."""


class _Passing(Exception):
    """A failure that may be over at the next try, which the server may want after a `wait`."""

    def __init__(self, told: str, wait: float = 0.0):
        super().__init__(told)
        self.wait = wait


def read_completion(completion: Any) -> str:
    """The text of the one choice. Raises JudgeFailure for a refusal, a cut, or no completion."""
    try:
        choice = completion.choices[0]
        refusal, text, end = choice.message.refusal, choice.message.content, choice.finish_reason
    except (AttributeError, IndexError, TypeError) as error:
        raise JudgeFailure("malformed: the server's answer is no chat completion") from error
    if refusal or end == "content_filter":
        raise JudgeFailure(f"the judge refused: {str(refusal or end)[:300]}")
    if end == "length":
        raise JudgeFailure("malformed: the reply was cut at its limit of tokens")
    if not isinstance(text, str) or not text.strip():
        raise JudgeFailure("malformed: the reply is empty")
    return text


def spend(endpoint: Endpoint) -> None:
    """Count one request. Raises JudgeFailure where it would go over the budget."""
    if not endpoint.folder:
        with _asked_lock:
            _asked[endpoint.judge] = number = _asked.get(endpoint.judge, 0) + 1
        kept = "this process"
    else:
        # A byte a request: appending is atomic, so each process reads a number of its own.
        path = Path(endpoint.folder) / "requests"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, b".")
            number = os.lseek(descriptor, 0, os.SEEK_CUR)
        finally:
            os.close(descriptor)
        kept = f"the size of {path}"
    if endpoint.budget and number > endpoint.budget:
        raise JudgeFailure(
            f"over the budget: {endpoint.budget} requests may be made, counted by {kept}"
        )


def _asked_wait(headers: Any) -> float:
    """Seconds after which the server wants to be asked again; 0 where it doesn't say."""
    try:
        return max(0.0, float(headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
