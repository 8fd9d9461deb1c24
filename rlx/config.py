"""The typed configuration: a YAML file and `key.path=value` overrides in, one checked Config out.

All that is wrong with a configuration is told at once, before anything is compiled.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from model.errors import BadInput
from rlx.config_problems import (
    EXAMPLE,
    NAMES,
    Problem,
    came,
    unknown_key,
    unknown_row,
    why_fixed,
    why_no_row,
)
from rlx.config_rules import training_problems
from rlx.config_text import expected
from rlx.settings import AUTO, Config, MeshSettings
from rlx.signatures import (
    AlgorithmSettings,
    OneTerm,
    Section,
    SeveralTerms,
    TaskSettings,
    TermSettings,
    choices,
    model_of,
)
from rlx.yaml_text import Entry, read_file, read_overrides, shown, written


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
    for entry in (*_standing(entries, given), *given):  # the command line comes last: it decides
        settings.setdefault(entry.section, {})[entry.key] = entry

    parts: dict[str, Part] = {}
    for section in Config.model_fields:
        parts |= _parts(section, settings.pop(section, {}))
    known = {
        label: [f"{label}.{key}" for key in part.kind.model_fields]
        for label, part in parts.items()
        if part.kind
    }
    built: dict[str, Section | None] = {}
    wrong: set[str] = set()
    for label, part in parts.items():
        problems += part.problems
        if part.kind and part.kind is not SeveralTerms:
            built[label] = _section(label, part.kind, part.chosen, known, problems, wrong)
        if part.problems or built.get(label, part) is None:
            wrong.add(label.partition(".")[0])
    for chosen in settings.values():
        problems += [unknown_key(entry, known) for entry in chosen.values()]
    listed = tuple(section for label, section in built.items() if label.startswith("algorithm."))
    if listed and "algorithm" not in wrong:
        built["algorithm"] = SeveralTerms(terms=listed)

    config = Config(**{name: built[name] for name in Config.model_fields if built.get(name)})
    if not config.run.name:
        stem = path.stem if path else "run"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": stem})})
    # A rule that rests on a setting already refused would speak of its default instead.
    problems += [str(p) for p in rules(config) if not wrong.intersection(p.keys)]
    if problems:
        raise ConfigError(problems)
    return config


def _standing(entries: list[Entry], given: list[Entry]) -> list[Entry]:
    """Return the file's entries without what the command line replaces: the other form of
    `algorithm`, the settings of another task, or a mesh that is to be chosen anew."""
    paths = {entry.path: entry.value for entry in given}
    if "mesh" in paths:
        entries = [entry for entry in entries if entry.section != "mesh"]
    tasks = [entry.value for entry in entries if entry.path == "task.name"]
    if paths.get("task.name") not in (None, *(tasks or [TaskSettings().name])):
        entries = [entry for entry in entries if entry.section != "task"]
    if "algorithm.terms" in paths:
        return [entry for entry in entries if entry.section != "algorithm"]
    if "algorithm.name" in paths:
        return [entry for entry in entries if entry.path != "algorithm.terms"]
    return entries


class Part(NamedTuple):
    """A section, or a term of `algorithm.terms`, before it is built."""

    chosen: dict[str, Entry]
    kind: type[Section] | None
    """None where a row is chosen that no table has: then its keys are unknown."""
    problems: tuple[str, ...] = ()


def _parts(section: str, chosen: dict[str, Entry]) -> dict[str, Part]:
    """Return the section's part, and those of its terms, by the paths of their settings."""
    base = Config.model_fields[section].annotation
    if base is AlgorithmSettings:
        base = SeveralTerms if "terms" in chosen else OneTerm
    whole = chosen.pop("", None)
    if base is MeshSettings and whole and whole.value == AUTO:
        whole = None
    if base is SeveralTerms:
        parts = _terms(chosen)
    elif base in NAMES:
        parts = {section: _part(base, chosen)}
    else:
        parts = {section: Part(chosen, base)}
    if whole:
        auto = f"{AUTO}, or " if base is MeshSettings else ""
        problem = (
            f"{section} ({whole.origin}): expected {auto}settings under it, such as "
            f"{section}.{next(iter(base.model_fields))}; came {shown(whole.value)}"
        )
        part = parts[section]
        parts[section] = part._replace(problems=(problem, *part.problems))
    return parts


def _terms(chosen: dict[str, Entry]) -> dict[str, Part]:
    """Return the parts of the long form of `algorithm`."""
    listed = chosen["terms"]
    wrong = []
    for key, entry in chosen.items():
        if key == "name":
            wrong.append(
                f"{entry.path} ({entry.origin}): expected unset, since algorithm.terms names the "
                f"run's algorithms; came {shown(entry.value)}"
            )
        elif key.startswith("terms["):
            wrong.append(unknown_key(entry, {}))
        elif key != "terms":
            wrong.append(
                f"{entry.path} ({entry.origin}): expected inside a term, since algorithm.terms is "
                f"given; came {shown(entry.value)}"
            )
    items = listed.value if isinstance(listed.value, tuple) else ()
    if not items:
        wrong.append(
            f"{listed.path} ({listed.origin}): expected a list of terms, as in {EXAMPLE}; came "
            f"{shown(listed.value)}"
        )
    parts, first = {}, {}
    for i, item in enumerate(items):
        label = f"algorithm.terms[{i}]"
        origin = listed.inner.get(f"[{i}]", listed.origin)
        if not isinstance(item, dict) or "name" not in item:
            wrong.append(
                f"{label} ({origin}): expected settings, `name` among them, as in {EXAMPLE}; came "
                f"{shown(item)}"
            )
            continue
        keys = {str(key): value for key, value in item.items()}
        entries = {
            key: Entry(label, key, value, listed.inner.get(f"[{i}].{key}", origin))
            for key, value in keys.items()
        }
        parts[label] = part = _part(TermSettings, entries)
        before = first.setdefault(str(keys["name"]), label)
        if before != label:
            again = (
                f"{label}.name ({entries['name'].origin}): expected each name once; came "
                f"{shown(keys['name'])}, which {before} has already"
            )
            parts[label] = part._replace(problems=(*part.problems, again))
    return {"algorithm": Part(chosen, SeveralTerms, tuple(wrong))} | parts


def _part(base: type[Section], chosen: dict[str, Entry]) -> Part:
    """Return a part whose keys depend on the rows that it chooses."""
    name = chosen["name"].value if "name" in chosen else base.model_fields["name"].default
    names = NAMES[base]()
    if name not in names:
        return Part(chosen, None, (unknown_row(chosen["name"], names) + why_no_row(base, name),))
    open_tables = {} if base is TaskSettings else choices(name)
    picked, wrong = {}, []
    for key in ("advantage", "reduction"):
        if key not in chosen or base is TaskSettings:
            continue
        entry = chosen[key]
        names = list(open_tables.get(key, ()))
        if not names:
            wrong.append(
                f"{entry.path} ({entry.origin}): expected unset, since {why_fixed(name)}; came "
                f"{shown(entry.value)}"
            )
        elif entry.value != "" and entry.value not in names:
            wrong.append(unknown_row(entry, names))
        else:
            picked[key] = entry.value
    return Part(chosen, None if wrong else model_of(base, name, **picked), tuple(wrong))


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
            unknown_key(entry, known)
            if complaint == "extra_forbidden"
            else f"{entry.path} ({entry.origin}): expected {expected(properties[key])}; "
            f"came {came(entry.value, properties[key])}"
        )
    rest = {key: entry.value for key, entry in chosen.items() if key not in complaints}
    return None if "missing" in complaints.values() else kind.model_validate(rest)
