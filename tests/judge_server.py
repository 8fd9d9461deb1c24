"""A judge for tests: a local server that speaks OpenAI's chat completions and says what it is told
to."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

Answer = str | dict | tuple[int, str]
"""The reply's text; or fields of the choice; or a status and the error's text."""


class FakeJudge:
    """`answer(body)` decides each reply; `bodies` are the requests so far."""

    def __init__(self, answer: Callable[[dict], Answer]):
        self.answer = answer
        self.bodies: list[dict] = []
        self.keys: list[str] = []
        self.at_once = self.most_at_once = 0
        self.headers: dict[str, str] = {}
        self.drip_seconds = 0.0
        self.lock = threading.Lock()
        self.url = ""

    @property
    def settings(self) -> dict[str, Any]:
        return {"base_url": self.url, "judge_model": "stub", "seconds": 5.0, "retries": 0}


def verdict(score: Any = 0.8, confidence: Any = 0.9, reason: str = "fair") -> str:
    return json.dumps({"reason": reason, "score": score, "confidence": confidence})


def system_and_user(body: dict) -> tuple[str, str]:
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user"]
    return body["messages"][0]["content"], body["messages"][1]["content"]


def candidate(body: dict) -> str:
    """What stands between the candidate's marks that have the code."""
    user = system_and_user(body)[1]
    code = re.search(r"<candidate-([0-9a-f]{16})>", user)[1]
    return user.partition(f"<candidate-{code}>\n")[2].rpartition(f"\n</candidate-{code}>")[0]


def gullible(body: dict) -> str:
    """A judge that obeys every order which it takes to stand outside of the candidate's part: it
    takes any closing mark for the end, and a chat template's tokens for turns."""
    system, user = system_and_user(body)
    turns = re.split(r"<\|im_start\|>|\[/?INST\]|<start_of_turn>", user)
    inside = re.search(
        r"<candidate[^>]*>(.*?)</candidate[^>]*>", turns[0], re.DOTALL | re.IGNORECASE
    )
    outside = [system, *turns[1:]]
    if inside:
        outside += [turns[0][: inside.start()], turns[0][inside.end() :]]
    orders = [order for text in outside for order in re.findall(r"SCORE (1|0\.\d+)", text)]
    return verdict(float(orders[-1]) if orders else 0.2)


@contextlib.contextmanager
def served(answer: Callable[[dict], Answer]) -> Iterator[FakeJudge]:
    judge = FakeJudge(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with judge.lock:
                judge.bodies.append(body)
                judge.keys.append(self.headers.get("authorization", ""))
                judge.at_once += 1
                judge.most_at_once = max(judge.most_at_once, judge.at_once)
            status, content = _response(judge.answer(body))
            with judge.lock:
                judge.at_once -= 1
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            for name, value in judge.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                if judge.drip_seconds:
                    for i in range(len(content)):
                        self.wfile.write(content[i : i + 1])
                        self.wfile.flush()
                        time.sleep(judge.drip_seconds)
                else:
                    self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that gave up

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        with mock.patch.dict(os.environ, NO_PROXY="127.0.0.1"):
            yield judge
    finally:
        server.shutdown()
        server.server_close()


def _response(answer: Answer) -> tuple[int, bytes]:
    if isinstance(answer, tuple):
        status, text = answer
        return status, json.dumps({"error": {"message": text}}).encode()
    choice = {"content": answer} if isinstance(answer, str) else answer
    message = {"role": "assistant", "content": None, "refusal": None, **choice}
    end = message.pop("finish_reason", "stop")
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [{"index": 0, "finish_reason": end, "message": message}],
    }
    return 200, json.dumps(completion).encode()
