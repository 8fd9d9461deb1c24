"""The typed configuration: a YAML file and `key.path=value` overrides in, one checked Config out.

All that is wrong with a configuration is told at once, before anything is compiled.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model.errors import BadInput
from rlx.algorithms import ALGORITHMS
from rlx.config_rules import Problem, training_problems
from rlx.config_text import describe, expected, formula
from rlx.settings import Config, Section, hyper, model_of, offline, rows, updates
from rlx.tasks import TASKS
from rlx.yaml_text import Entry, read_file, read_overrides, shown, written

__all__ = [
    "Config",
    "ConfigError",
    "check_training",
    "describe",
    "formula",
    "hyper",
    "load",
    "load_training",
    "offline",
    "resolved_yaml",
    "rows",
    "updates",
]

TABLES = {"algorithm": ALGORITHMS, "task": TASKS}


class ConfigError(BadInput):
    """Lists all problems of one configuration, a line each."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} in the configuration:", *self.problems]))


def load(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read a configuration whose every setting is right by itself; ConfigError otherwise.

    What only training refuses (`check_training`) passes: evaluation may sample greedily.
    """
    return _load(path, overrides, lambda config: ())


def load_training(path: Path | None, overrides: Sequence[str]) -> Config:
    """`load` and `check_training`, whose problems are told together."""
    return _load(path, overrides, training_problems)


def check_training(config: Config) -> None:
    """Raise ConfigError for contradictions, ignored settings, and what training cannot do."""
    if problems := list(training_problems(config)):
        raise ConfigError(map(str, problems))


def resolved_yaml(config: Config) -> str:
    """Return every setting, defaults included; `load` reads it back as an equal Config."""
    return written(config.model_dump())


def _load(
    path: Path | None, overrides: Sequence[str], rules: Callable[[Config], Iterable[Problem]]
) -> Config:
    entries, problems = read_file(path) if path else ([], [])
    given, refused = read_overrides(overrides)
    if problems:  # without the file's settings, any further complaint would be a guess
        raise ConfigError(problems + refused)
    problems = refused
    settings: dict[str, dict[str, Entry]] = {}
    for entry in (*entries, *given):  # the command line comes last: it decides
        settings.setdefault(entry.section, {})[entry.key] = entry

    kinds = _kinds(settings)
    known = {s: [f"{s}.{key}" for key in kind.model_fields] for s, kind in kinds.items()}
    sections: dict[str, Section] = {}
    wrong: set[str] = set()
    for section in Config.model_fields:
        chosen = settings.pop(section, {})
        if whole := chosen.pop("", None):
            wrong.add(section)
            problems.append(
                f"{section} ({whole.origin}): expected settings under it, such as "
                f"{known[section][0]}; came {shown(whole.value)}"
            )
        if section in TABLES and kinds[section] is Config.model_fields[section].annotation:
            wrong.add(f"{section}.name")
            problems.append(_unknown_row(section, chosen["name"]))
        else:
            sections[section] = _section(section, kinds[section], chosen, known, problems, wrong)
    for chosen in settings.values():
        problems += [_unknown_key(entry, known) for entry in chosen.values()]

    config = Config(**{name: section for name, section in sections.items() if section})
    if not config.run.name:
        stem = path.stem if path else "run"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": stem})})
    # A rule that rests on a setting already refused would speak of its default instead.
    problems += [str(p) for p in rules(config) if not wrong.intersection(p.keys)]
    if problems:
        raise ConfigError(problems)
    return config


def _section(
    section: str,
    kind: type[Section],
    chosen: dict[str, Entry],
    known: dict[str, list[str]],
    problems: list[str],
    wrong: set[str],
) -> Section | None:
    """Build one section of the settings that are right; add the others to what is wrong."""
    try:
        return kind.model_validate({key: entry.value for key, entry in chosen.items()})
    except ValidationError as error:
        complaints = {str(e["loc"][0]): e["type"] for e in error.errors(include_url=False)}
    properties = kind.model_json_schema()["properties"]
    for key, complaint in complaints.items():
        if complaint == "missing":
            problems.append(f"{section}.{key}: expected {expected(properties[key])}; came nothing")
            continue
        entry = chosen[key]
        wrong.add(entry.path)
        problems.append(
            _unknown_key(entry, known)
            if complaint == "extra_forbidden"
            else f"{entry.path} ({entry.origin}): expected {expected(properties[key])}; "
            f"came {_came(entry.value, properties[key])}"
        )
    rest = {key: entry.value for key, entry in chosen.items() if key not in complaints}
    return None if "missing" in complaints.values() else kind.model_validate(rest)


def _came(value: Any, schema: dict[str, Any]) -> str:
    # YAML has read a name such as 42 as a number.
    quoted = schema.get("type") == "string" and isinstance(value, int | float)
    return shown(value) + (", which is text only in quotes" if quoted else "")


def _kinds(settings: dict[str, dict[str, Entry]]) -> dict[str, type[Section]]:
    """Return each section's type, for the algorithm and the task that are chosen.

    A row that is in no table leaves the section with its bare type, which knows `name` alone.
    """
    kinds = {}
    for section, field in Config.model_fields.items():
        kind = field.annotation
        if section in TABLES:
            name = settings.get(section, {}).get("name")
            name = name.value if name else kind.model_fields["name"].default
            if isinstance(name, str) and name in TABLES[section]:
                kind = model_of(section, name)
        kinds[section] = kind
    return kinds


def _unknown_row(section: str, entry: Entry) -> str:
    names = list(TABLES[section])
    near = difflib.get_close_matches(str(entry.value), names, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"{entry.path} ({entry.origin}): expected one of {', '.join(names)}; "
        f"came {shown(entry.value)}{hint}"
    )


def _unknown_key(entry: Entry, known: dict[str, list[str]]) -> str:
    start = f"{entry.path} ({entry.origin}): there is no such setting"
    if any(entry.path in paths for paths in known.values()):
        return f"{start} at the top of a file; expected the section, and the key under it"
    if entry.section in TABLES:
        rows_with = [
            name
            for name in TABLES[entry.section]
            if entry.key in model_of(entry.section, name).model_fields
        ]
        if rows_with:
            return f"{start} of this {entry.section}; {' and '.join(rows_with)} would take it"
    near = nearest(entry.path, known)
    if near:
        return f"{start}; did you mean {' or '.join(near)}?"
    if entry.section in known:
        return f"{start}; expected one of {', '.join(known[entry.section])}"
    return f"{start}; expected one of the sections {', '.join(known)}"


def nearest(path: str, known: dict[str, list[str]]) -> list[str]:
    """Return up to three key paths that a misspelt one may have meant, or none.

    The last component decides, in its own section first: as it stands, by its initials (`lr`),
    by its beginning (`temp`), by likeness.
    """
    section, _, last = path.rpartition(".")
    own = known.get(section, [])
    everywhere = own + [p for paths in known.values() for p in paths if p not in own]

    def last_of(p: str) -> str:
        return p.rpartition(".")[2]

    tests: list[Callable[[str], Any]] = [
        lambda key: key == last,
        lambda key: "_" in key and "".join(w[0] for w in key.split("_") if w) == last,
        lambda key: len(last) > 2 and key.startswith(last),
    ]
    for candidates in (own, everywhere):
        for test in tests:
            if found := [p for p in candidates if test(last_of(p))]:
                return found[:3]
        alike = difflib.get_close_matches(last, {last_of(p): None for p in candidates}, 1)
        if alike:
            return [p for p in candidates if last_of(p) == alike[0]][:3]
    return []
