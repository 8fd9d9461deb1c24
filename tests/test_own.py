"""Verifiers of the user's own: named by module or file, checked, sent to other processes."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import BadInput
from rlx.rewards.build import build
from rlx.rewards.own import OwnVerifier

ROOT = Path(__file__).parents[1]

OWN = """
from dataclasses import dataclass
from rlx.rewards import Score

@dataclass
class Found:
    share: float

def brevity(completion: str, row, *, most: int = 10) -> Score:
    found = Found(float(len(completion) <= most))
    return Score(found.share, None, {"brief": found.share}, "its length")

def all_at_once(pairs, *, most: int = 10):
    return [brevity(*pair, most=most) for pair in pairs]

brevity.many = all_at_once

def wrong(completion, row):
    return 1.0

def narrow(completion):
    return None

constant = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def test_a_verifier_of_ones_own_is_named_by_its_file(own):
    entries = [{"name": f"{own}:brevity", "most": 3}]
    verifier = build(entries, "sum", {}, None)
    assert [verifier(text, {}).reward for text in ("abc", "abcd")] == [1.0, 0.0]
    assert verifier("abc", {}).components == {"brevity/reward": 1.0, "brevity/brief": 1.0}
    assert [r.reward for r in verifier.many([("abc", {}), ("abcd", {})])] == [1.0, 0.0]


def test_a_verifier_of_ones_own_is_named_by_its_module(own, monkeypatch):
    monkeypatch.syspath_prepend(str(own.parent))
    assert OwnVerifier("mine:brevity")("x" * 11, {}).reward == 0.0
    verifier = build([{"name": "rlx.rewards.countdown:score"}], "sum", {}, None)
    assert verifier("</think><answer>1+2</answer>", {"nums": [1, 2], "target": 3}).correct


def test_a_verifier_of_ones_own_travels_to_a_process_that_never_saw_its_file(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    entries = [{"name": "mine.py:brevity", "most": 3}]
    sent = pickle.dumps(build(entries, "sum", {}, None))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)('abcd', {}).reward)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=sent, capture_output=True, check=True
    )
    assert out.stdout.strip() == b"0.0"


def test_faults_of_ones_own_are_told(own):
    (own.parent / "broken.py").write_text("import nothing_like_this\n")
    (own.parent / "leaving.py").write_text("raise SystemExit(3)\n")
    for name, told in (
        (f"{own}:missing", "no function missing.*brevity"),
        (f"{own}:constant", "no function constant"),
        (f"{own}:narrow", "narrow can't be called as a verifier"),
        (f"{own.parent / 'none.py'}:score", r"no file .*none\.py"),
        (f"{own.parent / 'broken.py'}:score", "nothing_like_this"),
        (f"{own.parent / 'leaving.py'}:score", "SystemExit"),
        ("nothing_like_this:score", "no such module"),
        (":score", "named like"),
        ("module:", "named like"),
    ):
        with pytest.raises(BadInput, match=told):
            OwnVerifier(name)
    with pytest.raises(BadInput, match=r"most: .*'few'"):
        build([{"name": f"{own}:brevity", "most": "few"}], "sum", {}, None)
    with pytest.raises(TypeError, match=r"must return a .*Score"):
        OwnVerifier(f"{own}:wrong")("x", {})
