"""Conversion between YAML text and plain values, and the position of a value in the text.

Scalars follow the core schema of YAML 1.2: `1e-4` is a number; dates, times (`12:30`) and
numbers with leading zeros (`010`) are text. YAML 1.1, which PyYAML implements, reads the latter
as dates, as base-60 numbers and as octal numbers. The words yes, no, on and off are booleans,
as in YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

import yaml

from shardwright.errors import RecipeError

MAX_DEPTH = 100
"""Deepest nesting of mappings and lists. A recipe needs 5."""
MAX_NODES = 1_000_000
"""Maximum number of values in a document after its aliases are expanded: a few lines of nested
aliases may expand to billions."""
_UNQUOTED_VARIABLE = re.compile(r"[\[{](?:.*[:,])?\s*\$\{")
"""A `${` in a flow mapping or list, where `{` begins a mapping."""
_INTEGER_BITS = 63
_INTEGER_CHARACTERS = 200
"""More than any notation of a 63-bit integer needs."""
_MERGE_TAG = "tag:yaml.org,2002:merge"
_DIGITS = "[0-9](?:_?[0-9])*"
_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(?:0|[1-9](?:_?[0-9])*|0b[01](?:_?[01])*"
    r"|0x[0-9a-fA-F](?:_?[0-9a-fA-F])*)$",
    "tag:yaml.org,2002:float": rf"^[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?(?:[eE][-+]?[0-9]+)?"
    rf"|\.{_DIGITS}(?:[eE][-+]?[0-9]+)?"
    rf"|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
}
_REPLACED_TAGS = {*_NUMBERS, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys and reports every failure with its position."""

    def __init__(self, text: str, origin: str = "") -> None:
        """
        Args:
            origin: source of the text, for errors.
        """
        super().__init__(text)
        self.origin = origin

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (yaml.YAMLError, RecipeError):
            raise
        except (
            Exception
        ) as error:  # PyYAML's constructors do not catch errors of int(), float() and datetime
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{_format_node(node)} cannot be read as {kind}: {_take_first_line(error)}",
                node.start_mark,
            ) from error

    def construct_yaml_map(self, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            _check_keys(self, node)
        yield from super().construct_yaml_map(node)

    def construct_yaml_int(self, node: Any) -> int:
        is_small = len(node.value) <= _INTEGER_CHARACTERS
        value = int(super().construct_yaml_int(node)) if is_small else None
        if value is None or value.bit_length() > _INTEGER_BITS:
            raise ValueError(f"an integer has at most {_INTEGER_BITS} bits")
        return value

    def construct_undefined(self, node: Any) -> Any:
        _build_error(node, f"values of type {node.tag!r} are not supported")

    def scan_flow_scalar_non_spaces(self, double: Any, start_mark: Any) -> Any:
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError) as error:  # "\UFFFFFFFF"
            raise yaml.scanner.ScannerError(
                None, None, f"no such character: {error}", self.get_mark()
            ) from error


def _remove_replaced_scalars(
    resolvers: dict[Any, list[tuple[str, Any]]],
) -> dict[Any, list[tuple[str, Any]]]:
    """Copy PyYAML's table of plain scalars with the number patterns replaced and without
    dates."""
    result = {
        first: [(tag, regex) for tag, regex in entries if tag not in _REPLACED_TAGS]
        for first, entries in resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        for first in "-+.0123456789":
            result.setdefault(first, []).append((tag, re.compile(pattern)))
    return result


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which our loader, or a YAML 1.1 loader, would read as something
    else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write text with other line breaks than a newline as escapes: inside single quotes
        U+0085 is read back as a newline."""
        style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.yaml_implicit_resolvers = _remove_replaced_scalars(yaml.SafeLoader.yaml_implicit_resolvers)
_Loader.yaml_constructors = {
    None: _Loader.construct_undefined,
    "tag:yaml.org,2002:null": _Loader.construct_yaml_null,
    "tag:yaml.org,2002:bool": _Loader.construct_yaml_bool,
    "tag:yaml.org,2002:int": _Loader.construct_yaml_int,
    "tag:yaml.org,2002:float": _Loader.construct_yaml_float,
    "tag:yaml.org,2002:str": _Loader.construct_yaml_str,
    _MERGE_TAG: _Loader.construct_yaml_str,  # merge keys are resolved before this
    "tag:yaml.org,2002:seq": _Loader.construct_yaml_seq,
    "tag:yaml.org,2002:map": _Loader.construct_yaml_map,
}
"""Types that a recipe may contain; sets, dates and binary data are excluded."""
for _tag, _pattern in _NUMBERS.items():
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse one YAML document.

    Args:
        origin: source of the text for error messages: a path or an option.

    Raises:
        RecipeError: with origin, line, column, the problem and a remedy.
    """
    loader = None
    try:
        loader = _Loader(text, origin)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "an unknown problem"
        if problem.startswith("but found"):  # the second half of a sentence
            problem = f"{error.context}, {problem}"
        raise RecipeError(
            f"not valid YAML: {problem}",
            field=_format_position(origin, mark),
            remedy=_find_remedy(text, mark),
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise RecipeError(
            f"not valid YAML: the character U+{int(error.character):04X} is not allowed",
            field=f"{origin}, line {line}, column {column}",
            remedy="Delete it, or write it as an escape sequence in double quotes",
        ) from error
    except RecursionError as error:
        raise RecipeError(
            "lists or mappings are nested too deeply",
            field=_format_position(origin, loader.get_mark() if loader else None),
            allowed=f"at most {MAX_DEPTH} levels",
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML that `parse_yaml` reads back unchanged."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def find_line(text: str, location: Iterable[str]) -> int | None:
    """Return the line number (from 1) of the value at a path of keys and list indices.

    If only a part of the path exists, return the line of its last existing part; None if no
    part exists.

    >>> find_line("a:\\n  b: [1,\\n    2]", ["a", "b", "1"])
    3
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        return None
    line = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == part), None)
        elif (
            isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value)
        ):
            entry = (node.value[int(part)],) * 2
        else:
            entry = None
        if entry is None:
            break
        line = int(entry[0].start_mark.line) + 1
        node = entry[1]
    return line


def _check_keys(loader: _Loader, node: yaml.MappingNode) -> None:
    """Refuse duplicate keys and keys that are collections. Keys next to a merge key
    (`<<: *defaults`) may override merged ones."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE_TAG:
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            _build_error(key_node, "a key is a list or a mapping")
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise RecipeError(
                "duplicate key",
                field=str(key),
                got=f"a second value in {_format_position(loader.origin, key_node.start_mark)}",
                remedy="Remove one of them",
            )
        seen.add(key)


def _check_size(root: Any) -> None:
    """Refuse documents that are nested too deeply, or too large after their aliases are
    expanded."""
    known: dict[int, tuple[int, int] | None] = {}

    def measure(node: Any) -> tuple[int, int]:
        """Return the number of values in a node, and its depth."""
        if not isinstance(node, yaml.CollectionNode):
            return 1, 0
        if id(node) not in known:
            known[id(node)] = None
            inner = (
                node.value
                if isinstance(node, yaml.SequenceNode)
                else [part for pair in node.value for part in pair]
            )
            measured = [measure(part) for part in inner]
            size = 1 + sum(size for size, _ in measured)
            depth = 1 + max((depth for _, depth in measured), default=0)
            if depth > MAX_DEPTH:
                _build_error(
                    node, f"lists or mappings are nested more than {MAX_DEPTH} levels deep"
                )
            if size > MAX_NODES:
                _build_error(
                    node, f"with aliases expanded, this has more than {MAX_NODES:,} values"
                )
            known[id(node)] = size, depth
        result = known[id(node)]
        if result is None:
            _build_error(node, "a list or a mapping contains itself")
        return result

    measure(root)


def _build_error(node: Any, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _find_remedy(text: str, mark: Any) -> str:
    """Return what to do about a syntax error, by the line where it was found."""
    lines = text.splitlines()
    if mark is not None and mark.line < len(lines) and _UNQUOTED_VARIABLE.search(lines[mark.line]):
        return 'Inside { } and [ ], quote text with a variable: {path: "${NAME}/folder"}'
    return (
        "Check indentation (spaces, no tabs) and quotes there; quote text with special characters"
    )


def _format_position(origin: str, mark: Any) -> str:
    return (
        f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else origin
    )


def _format_node(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return "the value"
    text = ascii(node.value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(node.value):,} characters)"


def _take_first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0].partition(";")[0]
    return text or type(error).__name__
