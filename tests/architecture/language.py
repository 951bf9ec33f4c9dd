"""Checks of the words in source, tests and docs: identifiers, docstrings, comments, messages.

`python -m tests.architecture.language [PATH ...]` prints every violation below the paths given
(default: the whole repository), one a line, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwright.config import Recipe

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src/shardwright"
CHECKED = ("src", "tests", "benchmarks", "recipes", "docs", "README.md", "CHANGELOG.md")

BANNED_IN_IDENTIFIERS = frozenset(
    [
        "told",
        "tell",
        "tells",
        "telling",
        "said",
        "saying",
        "speaker",
        "speaks",
        "speak",
        "spelled",
        "spelling",
        "cut",
        "cuts",
        "cutting",
        "held",
        "meeting",
        "meetings",
        "meet",
        "vigil",
        "pulse",
        "journey",
        "sight",
        "whom",
        "whose",
        "what",
        "who",
        "makes",
        "begun",
        "became",
        "become",
        "arrived",
        "arrival",
        "arrivals",
        "upkeep",
        "wish",
        "wished",
        "wishes",
        "theirs",
        "foreign",
        "errand",
        "kept",
        "taken",
        "asked",
        "course",
        "walks",
        "walked",
        "habit",
        "habits",
        "sayings",
        "utter",
        "hearsay",
        "stranger",
        "strangers",
        "house",
        "room",
        "rooms",
    ]
)
"""Parts of snake_case and CamelCase names that stand for a standard term of the field."""

EXEMPT_IDENTIFIERS = frozenset(
    {
        "chunked_cross_entropy",
        "cut_cross_entropy",
        "held_out",
        "hidden_shape",
        "named_parameters",
        "num_cut",
        "on_epoch_begin",
        "on_event",
        "on_log",
        "on_step_begin",
        "on_step_end",
        "on_train_batch_end",
        "on_train_batch_start",
        "on_train_begin",
        "resume_if_begun",
    }
)
"""Names that other projects, our flags or our file formats fix, and terms of the field."""

BANNED_IN_TEXT = (
    r"\btold\b",
    r"\bbeside\b",
    r"\btells? of\b",
    r"\bwhom\b",
    r"\bwhat became of\b",
    r"\bbecame of\b",
    r"\bmakes of\b",
    r"\b(?:holds?|held) (?:\w+ )?(?:against|to (?:one|the|its|their|a|an|what|figures|formulas))\b",
    r"\b(?:is|are|was|were|be|being) cut\b",
    r"\bcuts?\b(?! (?:off|short|in half))",
    r"\bvigil\b",
    r"\bjourneys?\b",
    r"\bupkeep\b",
    r"\bmakes? of model\b",
    r"\bhang(?:s)? (?:on|together)\b",
    r"\bwaits? for (?:it|them) all\b",
    r"\bgo(?:es)? (?:by|round)\b",
    r"\bwho waits\b",
    r"\bput(?:s)? (?:back|off)\b",
    r"\bfares?\b",
    r"\bwhence\b",
    r"\bthereof\b",
    r"\bnought\b",
    r"\bwhoever\b",
    r"\banew\b",
    r"\bin vain\b",
    r"\bof before\b",
    r"\bof old\b",
    r"\bfor want of\b",
    r"\bis there twice\b",
    r"\bstrangers?\b",
    r"\bwished?\b",
    r"\bsaying\b",
    r"\bforeign\b",
    r"\bmeetings?\b",
    r"\brooms?\b(?! (?:for|in))",
    r"\bwalls?\b(?![- ]?(?:clock|time))",
    r"\b(?:go|goes|went|going) on\b",
    r"\ball the same\b(?! \w)",
    r"\bas ever\b",
    r"\bstands? still\b",
    r"\bno more(?=[.;,])",
    r"\blaid over\b",
    r"\bfor (?:good|ever)\b(?! reason)",
    r"\bis no (?:part|multiple)\b",
    r"\b(?:come|comes) and (?:go|goes)\b",
    r"\bsights?\b",
    r"\btaken? for (?:a|an|one|whole|granted)\b",
)
"""Regular expressions of phrases that a reader of another project would read twice."""

EXEMPT_TEXT = re.compile(
    r"""["'`]cut["'`]|\bcut(?:=| or drop\b)|overlong: cut|cut(?:\[- \]|[- ])cross|cuts-two-ranks"""
)
"""The recipe value `overlong: cut`, its Prometheus label, and a product's name."""

RIDDLE_OPENINGS = ("What", "Who", "Whose", "Whom", "Whether", "How", "Where", "Which", "That")
"""First words that make a docstring a riddle; it states what a function does, or names a thing."""
PREPOSITIONS = (
    "Of",
    "By",
    "For",
    "In",
    "On",
    "From",
    "To",
    "At",
    "With",
    "Under",
    "Within",
)
NOT_VERBS = frozenset(
    ["of", "by", "for", "in", "on", "from", "to", "at", "with", "under", "the", "a", "an", "is_it"]
) - {
    "to",
    "from",
}
PARTICIPLES = frozenset(
    [
        "told",
        "spelled",
        "begun",
        "written",
        "found",
        "held",
        "kept",
        "made",
        "given",
        "known",
        "seen",
        "shown",
        "taken",
        "left",
        "built",
        "drawn",
        "sent",
        "lost",
        "done",
        "gone",
        "said",
        "asked",
        "chosen",
        "grown",
        "hidden",
        "worn",
    ]
)
VERBS_IN_ED = frozenset(
    [
        "embed",
        "feed",
        "need",
        "seed",
        "speed",
        "shed",
        "proceed",
        "exceed",
        "succeed",
        "read",
        "spread",
        "thread",
    ]
)
LONGEST_LINE = 100
FEWEST_WORDS = 5


@dataclass(frozen=True)
class Violation:
    """One place that breaks a rule of style."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        name = self.path.relative_to(REPOSITORY)
        return f"{name}:{self.line}: {self.rule}: {self.text}"


def split_words(name: str) -> list[str]:
    """Split an identifier into lower-case words.

    >>> split_words("_TheRankGrid_of2")
    ['the', 'rank', 'grid', 'of2']
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word.lower() for word in spaced.split("_") if word]


def find_violations(paths: Iterable[Path]) -> Iterator[Violation]:
    """Check every Python and Markdown file below `paths`."""
    for path in sorted(set(list_files(paths))):
        if path.parent == Path(__file__).resolve().parent and "language" in path.name:
            continue  # these two quote what they forbid
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            yield from check_module(path, text)
        else:
            yield from check_markdown(path, text)


def list_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files below `paths`."""
    for path in paths:
        if path.is_dir():
            yield from (p for p in path.rglob("*") if p.suffix in (".py", ".md"))
        elif path.suffix in (".py", ".md"):
            yield path


def check_module(path: Path, text: str) -> Iterator[Violation]:
    """Check the identifiers, docstrings, comments and messages of one Python file."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    yield from check_identifiers(path, tree, nodes)
    yield from check_docstrings(path, nodes)
    yield from check_packed_assignments(path, nodes)
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > LONGEST_LINE:
            yield Violation(path, number, "line over 100 characters", line.strip()[:60])
    prose = list(extract_prose(text))
    yield from check_text(path, prose)
    yield from check_references(path, prose)


def check_identifiers(path: Path, tree: ast.Module, nodes: list[ast.AST]) -> Iterator[Violation]:
    """Find banned words in bound names, participles as function names, loggers by other names."""
    seen: set[tuple[str, str]] = set()
    for name, line, kind in iterate_bound_names(nodes):
        if (name, kind) in seen or name.strip("_") in EXEMPT_IDENTIFIERS:
            continue
        seen.add((name, kind))
        words = split_words(name)
        if banned := BANNED_IN_IDENTIFIERS.intersection(words):
            yield Violation(path, line, f"banned word {sorted(banned)[0]!r} in a name", name)
        if kind == "function" and words and is_participle(words[0]):
            yield Violation(path, line, "function named by a participle", name)
        if kind == "function" and words and words[0] in NOT_VERBS and not name.startswith("__"):
            yield Violation(path, line, "function name is no verb phrase", name)
    for node in tree.body:
        if isinstance(node, ast.Assign) and "getLogger" in ast.dump(node.value):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if names != ["logger"]:
                yield Violation(path, node.lineno, "logger not called `logger`", ", ".join(names))


def is_participle(word: str) -> bool:
    """True for a past participle that stands where a verb should."""
    return word in PARTICIPLES or (
        word.endswith("ed") and len(word) > 4 and word not in VERBS_IN_ED
    )


def iterate_bound_names(nodes: list[ast.AST]) -> Iterator[tuple[str, int, str]]:
    """Yield (name, line, kind) of every class, function, parameter and assigned name."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain = not node.decorator_list and not node.name.startswith("test_")
            yield node.name, node.lineno, "function" if plain else "property"
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, "parameter"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, "variable"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, "attribute"


def check_docstrings(path: Path, nodes: list[ast.AST]) -> Iterator[Violation]:
    """Find docstrings that open with a question word, or say no more than the name."""
    for name, line, doc, is_attribute in iterate_docstrings(nodes):
        words = re.findall(r"[\w'-]+", doc)
        if not words:
            yield Violation(path, line, "empty docstring", name)
            continue
        if words[0] in RIDDLE_OPENINGS:
            yield Violation(path, line, f"docstring opens with {words[0]!r}", doc[:60])
        if is_attribute and words[0] in PREPOSITIONS and len(words) < FEWEST_WORDS + 2:
            yield Violation(
                path, line, "attribute docstring is a bare preposition phrase", doc[:60]
            )
        if len(words) < FEWEST_WORDS and restates(name, words):
            yield Violation(path, line, "docstring restates the name", f"{name}: {doc}")


def restates(name: str, words: list[str]) -> bool:
    """True if every word of a docstring stands in the name already."""
    stems = {stem(word) for word in split_words(name)}
    fillers = {"the", "a", "an", "of", "its", "this", "to", "in", "all"}
    return all(stem(word.lower()) in stems or word.lower() in fillers for word in words)


def stem(word: str) -> str:
    """Strip the endings of plural and of third person."""
    return re.sub(r"(?:ies|es|s|e|ed|ing)$", "", word)


def iterate_docstrings(nodes: list[ast.AST]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield (name, line, text, is_attribute) of every docstring, those of attributes included."""
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = getattr(node, "name", "")
        if doc := ast.get_docstring(node):
            yield name, node.body[0].lineno, doc, False
        for before, after in zip(node.body, node.body[1:], strict=False):
            if is_string(after) and isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
                attribute = getattr(target, "attr", getattr(target, "id", ""))
                yield attribute, after.lineno, after.value.value, True  # type: ignore[attr-defined]


def is_string(node: ast.stmt) -> bool:
    """True for a statement that is one string, as docstrings are."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def check_packed_assignments(path: Path, nodes: list[ast.AST]) -> Iterator[Violation]:
    """Find tuple assignments that pack independent statements into one line; swaps may stay."""
    for node in nodes:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
            continue
        targets = {ast.unparse(each) for each in target.elts}
        uses = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
        if not targets & uses:
            yield Violation(path, node.lineno, "packed tuple assignment", ast.unparse(node)[:60])


def extract_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment and string of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == FSTRING_MIDDLE:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", -1)


def check_markdown(path: Path, text: str) -> Iterator[Violation]:
    """Check the prose of a page; code blocks are what programs print, or commands."""
    fenced = False
    prose = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            prose.append((number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)))
    yield from check_text(path, prose)


def check_text(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Violation]:
    """Find banned phrases in prose."""
    for number, whole_line in lines:
        if BANNED_PHRASE.search(whole_line):
            line = EXEMPT_TEXT.sub("", whole_line)
            for match in BANNED_PHRASE.finditer(line):
                yield Violation(path, number, f"banned phrase {match[0]!r}", line.strip()[:80])


BANNED_PHRASE = re.compile("|".join(BANNED_IN_TEXT), re.IGNORECASE)


def find_duplicate_classes() -> dict[str, list[str]]:
    """Return public class names of the package that more than one module defines."""
    where = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def check_references(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Violation]:
    """Find references such as `package.module` that name no module, attribute or recipe key."""
    for number, line in lines:
        for reference in REFERENCE.findall(line):
            parts = reference.split(".")
            is_ours = (PACKAGE / parts[0]).is_dir() and parts[1] != "safetensors"
            if is_ours and not (resolves(PACKAGE, parts) or parts[1] in list_recipe_keys()):
                yield Violation(path, number, "reference to nothing", reference)


REFERENCE = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")


def resolves(folder: Path, parts: list[str]) -> bool:
    """True if the parts lead from a folder to a package, a module, or a name in one."""
    if not parts:
        return True
    if (folder / parts[0]).is_dir():
        return resolves(folder / parts[0], parts[1:])
    module, names = folder / f"{parts[0]}.py", parts[1:]
    if not module.is_file():
        module, names = folder / "__init__.py", parts
    return not names or (module.is_file() and names[0] in re.findall(r"\w+", module.read_text()))


def find_missing_names(page: str) -> list[str]:
    """Return the identifiers in backticks on a page that no file of source or tests has."""
    names = {match.rpartition(".")[2] for match in IDENTIFIER.findall(page)}
    for folder in ("src", "tests"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if path.parent != Path(__file__).resolve().parent:
                names.difference_update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return sorted(names)


IDENTIFIER = re.compile(r"`([A-Za-z_][\w.]*_\w*|[A-Z]\w*[a-z]\w*)`")


@cache
def list_recipe_keys() -> set[str]:
    """List the keys of all sections of a recipe."""
    sections = Recipe.model_json_schema()["$defs"].values()
    return {key for section in sections for key in section.get("properties", {})}


def main(arguments: list[str]) -> int:
    """Print the violations below the paths given, and how many of each rule there are."""
    paths = [Path(word).resolve() for word in arguments] or [REPOSITORY / w for w in CHECKED]
    violations = list(find_violations(paths))
    for violation in violations:
        print(violation)  # noqa: T201
    for rule, count in Counter(re.sub(r"'.*?'", "...", v.rule) for v in violations).most_common():
        print(f"{count:6} {rule}")  # noqa: T201
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
