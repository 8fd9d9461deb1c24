"""What is said of a setting that is refused: what was expected, what came, what was meant."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlx.algorithms import ALGORITHMS, TERMS
from rlx.settings import Config
from rlx.signatures import (
    OneTerm,
    Section,
    TaskSettings,
    TermSettings,
    model_of,
    short_names,
    term_names,
)
from rlx.tasks import TASKS
from rlx.yaml_text import Entry, shown

EXAMPLE = "[{name: grpo}, {name: entropy, weight: 0.01}]"

# Where a row is chosen by name: the names that there are, asked for when they are needed.
NAMES: dict[type[Section], Callable[[], list[str]]] = {
    TaskSettings: lambda: list(TASKS),
    OneTerm: short_names,
    TermSettings: term_names,
}


class Problem(NamedTuple):
    """What a rule refuses."""

    keys: tuple[str, ...]
    """The settings that it depends on, the one to change first."""
    message: str

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.message}"


def _value(config: Config, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def is_set(config: Config, path: str) -> bool:
    """Whether the setting differs from its default."""
    section, key = path.split(".")
    return _value(config, path) != type(getattr(config, section)).model_fields[key].default


def ignored(config: Config, paths: list[str], because: str, *causes: str) -> Iterator[Problem]:
    """Yield a problem for each setting that is set, though nothing would read it."""
    for path in paths:
        if is_set(config, path):
            value = shown(_value(config, path))
            yield Problem((path, *causes), f"expected unset, since {because}; came {value}")


def keys_of(config: Config, section: str) -> list[str]:
    """Return the paths of a section's settings."""
    return [f"{section}.{key}" for key in type(getattr(config, section)).model_fields]


def why_fixed(name: str) -> str:
    """Return why no advantage or no reduction can be chosen for the row."""
    row = (ALGORITHMS | TERMS)[name]
    if row.source == "pairs":
        return f"{name} learns which row of a pair is preferred, every pair alike"
    if row.source == "texts":
        return f"{name} imitates given tokens, all alike"
    return f"{name} reads no advantages"


def why_no_row(base: type[Section], name: Any) -> str:
    """Return what to say of a row that is somewhere else, or nothing."""
    if base is TaskSettings:
        return ""
    if name == "kl_k1":
        return (
            "; k1 belongs into the reward (reward.kl=k1), since as a loss its expected gradient is "
            "zero"
        )
    if name == "value":
        return "; the critic's loss comes with an algorithm that has a critic (section critic)"
    if base is OneTerm and isinstance(name, str) and name in TERMS:
        return f"; {name} stands beside an algorithm, as in algorithm.terms={EXAMPLE}"
    return ""


def came(value: Any, schema: dict[str, Any]) -> str:
    """Return the refused value as text. `schema` is of the setting that it was given to."""
    # YAML has read a name such as 42 as a number.
    quoted = schema.get("type") == "string" and isinstance(value, int | float)
    return shown(value) + (", which is text only in quotes" if quoted else "")


def unknown_row(entry: Entry, names: list[str]) -> str:
    near = difflib.get_close_matches(str(entry.value), names, 2)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return (
        f"{entry.path} ({entry.origin}): expected one of {', '.join(names)}; "
        f"came {shown(entry.value)}{hint}"
    )


def unknown_key(entry: Entry, known: dict[str, list[str]]) -> str:
    """`known` are the paths of the settings that there are, by section or term."""
    start = f"{entry.path} ({entry.origin}): there is no such setting"
    if any(entry.path in paths for paths in known.values()):
        return f"{start} at the top of a file; expected the section, and the key under it"
    if entry.path.startswith("algorithm.terms["):
        kind, base = "term", TermSettings
        if entry.section == "algorithm":
            return f"{start}; expected the whole list, as in algorithm.terms={EXAMPLE}"
        known = {entry.section: known[entry.section]}  # a term has no other section's settings
    else:
        kind, base = entry.section, {"algorithm": OneTerm, "task": TaskSettings}.get(entry.section)
    if base:
        takers = [n for n in NAMES[base]() if entry.key in model_of(base, n).model_fields]
        if takers:
            return f"{start} of this {kind}; {' and '.join(takers)} would take it"
    near = nearest(entry.path, known)
    if near:
        return f"{start}; did you mean {' or '.join(near)}?"
    if entry.section in known:
        return f"{start}; expected one of {', '.join(known[entry.section])}"
    return f"{start}; expected one of the sections {', '.join(Config.model_fields)}"


def nearest(path: str, known: dict[str, list[str]]) -> list[str]:
    """Return up to three key paths that a misspelt one may have meant, or none.

    The last component decides, in its own section (or the one most like it) first: as it stands,
    by its initials (`lr`), by its beginning (`temp`), by likeness.
    """
    section, _, last = path.rpartition(".")
    own = [p for s in difflib.get_close_matches(section, known, 1) for p in known[s]]
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
