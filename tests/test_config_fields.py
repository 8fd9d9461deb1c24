"""No setting is there that nobody reads: a field without a reader is a promise that is not kept."""

import ast
from pathlib import Path

import pytest

from rlx.settings import Config

ROOT = Path(__file__).parents[1]
# These say what a configuration is. To check, print or explain a setting is not to act on it.
SPEAKERS = {
    "config.py",
    "config_problems.py",
    "config_rules.py",
    "config_text.py",
    "derived.py",
    "rollout_rules.py",
    "settings.py",
    "signatures.py",
    "term_rules.py",
    "yaml_text.py",
}
FIELDS = [
    (section, key)
    for section, field in Config.model_fields.items()
    for key in field.annotation.model_fields
]


def readers() -> list[Path]:
    files = [ROOT / "run.py", *sorted((ROOT / "rlx").rglob("*.py"))]
    return [file for file in files if file.exists() and file.name not in SPEAKERS]


def reads(source: str) -> set[tuple[str, str]]:
    """Every `section.key` of the source: of `config.section.key`, or of a section passed on."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Attribute):
                found.add((owner.attr, node.attr))
            elif isinstance(owner, ast.Name):
                found.add((owner.id, node.attr))
    return found


@pytest.fixture(scope="module")
def all_reads() -> set[tuple[str, str]]:
    return set().union(*(reads(file.read_text()) for file in readers()))


def test_the_scan_sees_reads_and_nothing_else():
    source = '''
def f(config, loop):
    """batch.epochs"""
    # eval.every
    run.seed = 1
    return config.optimizer.b1 + loop.steps
'''
    assert reads(source) == {("config", "optimizer"), ("optimizer", "b1"), ("loop", "steps")}


@pytest.mark.parametrize("section, key", FIELDS, ids=[f"{s}.{k}" for s, k in FIELDS])
def test_somebody_reads_the_setting(section, key, all_reads):
    if (section, key) not in all_reads:
        pytest.fail(f"{section}.{key} is a setting that no code reads: read it, or delete it")
