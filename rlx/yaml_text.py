"""Settings as text: YAML read by the rules of YAML 1.2, and `key.path=value` overrides.

YAML 1.1, which PyYAML speaks, reads `1e-6` as text, `012` as ten, `1:30` as ninety and `no` as
false. Here a number is what it looks like, only true and false are booleans, and anything else
is text, which a numeric setting refuses. Imports no JAX and nothing of rlx.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# A number with a leading zero is left as text: `012` is ten to one reader, twelve to the next.
_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+0123456789.",
    ),
)


QUOTES = ("'", '"', "|", ">", "!", "&", "*")
"""What a text begins with that YAML is to read: quoted, a block, tagged, named."""


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (the name and form that PyYAML looks for)

    def construct_mapping(self, node, deep=False):
        # PyYAML keeps the last of two equal keys without a word.
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key_node.value}` is there twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Writer(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something other than text."""

    def represent_text(self, text: str) -> yaml.Node:
        # PyYAML would write a rare line break (U+0085) as it stands, and read it as a space.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _Writer.represent_text)

for _tag, _pattern, _first in _SCALARS:
    for _speaker in (_Reader, _Writer):
        _speaker.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
        )


class Entry(NamedTuple):
    """One setting as it was written."""

    section: str
    key: str
    value: Any
    origin: str
    """The file and the line, or the command line."""
    inner: Mapping[str, str] = {}
    """Origins of a list's parts by their place in it, such as `[1].beta`."""

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}" if self.key else self.section


def read_file(path: Path) -> tuple[list[Entry], list[str]]:
    """Return the file's entries, and what is wrong with it, a sentence each."""
    try:
        text = path.read_bytes()
        content = yaml.load(text, _Reader)
        lines = dict(_lines(yaml.compose(text, _Reader)))
    except FileNotFoundError:
        return [], [f"{path}: expected a YAML file, found no file of that name"]
    except OSError as error:
        return [], [f"{path}: expected a YAML file that can be read; {error.strerror}"]
    except (yaml.YAMLError, ValueError) as error:
        return [], [f"{path}: expected YAML; {_one_line(error)}"]
    if content is None:
        return [], []
    if not isinstance(content, dict):
        return [], [f"{path}: expected sections with settings under them, came {shown(content)}"]
    origins = {place: f"{path}:{line}" for place, line in lines.items()}
    entries = []
    for section, settings in content.items():
        if isinstance(settings, dict):
            entries += [
                _entry(str(section), str(key), value, str(path), origins)
                for key, value in settings.items()
            ]
        elif settings is not None:  # a section whose lines are all commented out sets nothing
            entries.append(_entry(str(section), "", settings, str(path), origins))
    return entries, []


def _entry(section: str, key: str, value: Any, file: str, origins: dict[str, str]) -> Entry:
    entry = Entry(section, key, _frozen(value), "")
    start = f"{entry.path}["
    inner = {
        place.removeprefix(entry.path): origin
        for place, origin in origins.items()
        if place.startswith(start)
    }
    return entry._replace(origin=origins.get(entry.path, file), inner=inner)


def _lines(node: yaml.Node | None, place: str = "", depth: int = 4) -> Iterator[tuple[str, int]]:
    """Yield the line of each key and list item, down to the keys of a list's items.

    No deeper: a node may hold itself.
    """
    if not depth:
        return
    if isinstance(node, yaml.MappingNode):
        parts = [(f".{key.value}" if place else str(key.value), key, v) for key, v in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(f"[{i}]", value, value) for i, value in enumerate(node.value)]
    else:
        return
    for name, first, value in parts:
        yield place + name, first.start_mark.line + 1
        yield from _lines(value, place + name, depth - 1)


def read_overrides(overrides: Iterable[str]) -> tuple[list[Entry], list[str]]:
    """Return the entries of the command line, and what is wrong with it, a sentence each.

    Their order has no meaning, so that a key given twice is refused.
    """
    entries, problems, seen = [], [], set()
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            problems.append(
                f"command line: expected key.path=value, as in `optimizer.learning_rate=1e-6`; "
                f"came `{override}`"
            )
            continue
        if path in seen:
            problems.append(f"{path}: expected once on the command line, came twice")
        seen.add(path)
        section, _, key = path.partition(".")
        try:
            # Nothing after the sign means the empty text, where YAML would say null.
            value = _frozen(yaml.load(text, _Reader)) if text.strip() else ""
            if isinstance(value, str) and text.lstrip()[:1] not in QUOTES:
                # YAML would end a plain text before ` #`, and fold its line breaks.
                value = text
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"{path}: expected a YAML value, came `{text}`; {_one_line(error)}")
            continue
        entries.append(Entry(section, key, value, "command line"))
    return entries, problems


def written(settings: dict[str, dict[str, Any]]) -> str:
    """Return the settings as YAML that reads back as the same values."""
    return yaml.dump(
        _plain(settings), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100
    )


def shown(value: Any) -> str:
    """Return a value as an error or a table of defaults names it, cut at eighty characters."""
    if value is None:
        text = "nothing (null)"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, tuple):
        text = str(list(value))
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Tuples as lists, at any depth: PyYAML writes a tuple with a tag of Python's."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
