"""YAML of recipes: unusual scalars are errors with their position, never a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from shardwright.config import Recipe, load_recipe
from shardwright.config.yaml_document import dump_yaml, find_line, parse_yaml
from shardwright.errors import InputError, RecipeError

RECIPE = """\
name: small
model:
  config: {model_type: llama}
data:
  sources: corpus.txt
training:
  sequence_length: 8
  max_steps: 3
  learning_rate: 1e-3
  micro_batch_size: 1
"""

NUMBERS = [
    ("1e-4", 1e-4),
    ("1_000", 1000),
    ("0x1F", 31),
    ("0b101", 5),
    ("-3", -3),
    (".5", 0.5),
    ("5.", 5.0),
    ("1_0.2_5e+1", 102.5),
    ("-.inf", float("-inf")),
]
TEXTS = [
    "0b",
    "0x",
    "0b_",
    "0x_",
    "._",
    ".",
    "1__0",
    "010",
    "08",
    "12:30",
    "2024-13-01",
    "2024-01-01",
    "=",
    "<<",
    "1e",
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    read = parse_yaml(text, "here")
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("text", TEXTS)
def test_other_scalars_are_text(text: str) -> None:
    assert parse_yaml(f"key: {text}", "here") == {"key": text}


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("9" * 5000, 7, "an integer has at most 63 bits"),
        ("0x" + "f" * 9000, 7, "an integer has at most 63 bits"),
        ("!!int x", 7, "cannot be read as int"),
        ("!!bool x", 7, "cannot be read as bool"),
        ("!!float x", 7, "cannot be read as float"),
        (
            "!!timestamp 2024-13-01",
            7,
            "values of type 'tag:yaml.org,2002:timestamp' are not supported",
        ),
        ("!!binary x", 7, "are not supported"),
        ("!!set {a, b}", 7, "are not supported"),
        ("!!map x", 7, "expected a mapping"),
        ("&a [*a]", 7, "contains itself"),
        ("[" * 3000, None, "nested too deeply"),
        ("[" * 150 + "]" * 150, None, "nested more than 100 levels"),
        ("{? [a] : b}", 10, "a key is a list or a mapping"),
        ('"\\UFFFFFFFF"', 10, "no such character"),
        ("\x01", 7, "the character U+0001"),
    ],
)
def test_invalid_yaml_is_refused_with_its_position(
    text: str, column: int | None, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(f"first: 1\nseed: {text}", "run.yaml")
    assert message in caught.value.problem
    assert str(caught.value.field).startswith(
        "run.yaml, line 2, column " + ("" if column is None else f"{column}")
    )
    assert caught.value.remedy or caught.value.allowed
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n---\nb: 2\n", "expected a single document in the stream, but found another"),
        ("data:\n  sources: {path: ${HOME}/x, glob: y}\n", 'path: "${NAME}/folder"'),
        ("data: [${HOME}/x]\n", 'path: "${NAME}/folder"'),
        ("a: [1\n", "Check indentation"),
        ("a: ${HOME}\nb: [\n", "Check indentation"),
    ],
)
def test_a_syntax_error_has_a_remedy(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match="not valid YAML") as caught:
        parse_yaml(text, "run.yaml")
    assert message in str(caught.value)


def test_nested_aliases_do_not_grow_without_bound() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(RecipeError, match="more than 1,000,000 values"):
        parse_yaml("\n".join(lines), "here")


def test_merge_keys_give_defaults() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}"
    assert parse_yaml(text, "here")["b"] == {"x": 1, "y": 3}


@given(
    st.recursive(
        st.text()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.booleans()
        | st.floats(allow_nan=False),
        st.lists,
    )
)
@example("1e5")
@example("010")
@example("2024-01-01")
@example("~")
@example("a\x85b")
@example("\u2028")
def test_values_survive_a_round_trip(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # lone surrogates cannot be in a recipe
    assert parse_yaml(dump_yaml({"key": value}), "here") == {"key": value}


def test_lines_are_found_by_key() -> None:
    assert find_line(RECIPE, ["training", "max_steps"]) == 8
    assert find_line(RECIPE, ["training", "absent"]) == 6
    assert find_line(RECIPE, ["absent"]) is None


@pytest.mark.parametrize(
    ("old", "new", "field", "line"),
    [
        ("max_steps: 3", "max_steps: 2024-13-01", "training.max_steps", 8),
        ("max_steps: 3", "max_steps: 0b", "training.max_steps", 8),
        ("max_steps: 3", "max_step: 3", "training.max_step", 8),
        ("learning_rate: 1e-3", "learning_rate: .", "training.learning_rate", 9),
        ("sources: corpus.txt", 'sources: corpus.txt\n  cache_dir: "a\\0b"', "data.cache_dir", 6),
        ("sources: corpus.txt", 'sources: {path: "a\\ud800"}', "data.sources.path", 5),
        ("sources: corpus.txt", f"sources: {'a/' * 3000}", "data.sources.0.path", 5),
        (
            "sources: corpus.txt",
            f"sources: corpus.txt\n  cache_dir: {'a' * 300}",
            "data.cache_dir",
            6,
        ),
        ("sources: corpus.txt", "sources: ''", "data.sources.0.path", 5),
        ("name: small", f"name: {'a' * 300}", "name", 1),
    ],
)
def test_a_wrong_value_is_reported_with_its_line(
    tmp_path: Path, old: str, new: str, field: str, line: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert f"{field}: " in str(caught.value)
    assert f"{path}, line {line}" in str(caught.value)


@pytest.mark.parametrize("field", ["data.cache_dir", "run.dir"])
def test_a_url_in_place_of_a_local_folder_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [f"{field}=s3://bucket/x"])
    problem = "must be a local or mounted folder, not a URL"
    assert str(caught.value).startswith(f"{field}: {problem} (got 's3://bucket/x'")


def test_a_wrong_value_of_the_command_line_has_no_line_number(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["training.max_steps=no"])
    assert "training.max_steps" in str(caught.value)
    assert "line" not in str(caught.value)


def test_dropout_off_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.replace("model:\n", "model:\n  dropout: off\n"))
    assert load_recipe(path).model.dropout == "off"


def test_only_files_and_pipes_are_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="character device"):
        load_recipe("/dev/zero")
    large = tmp_path / "large.yaml"
    large.write_text("#" * (1024**2 + 1))
    with pytest.raises(RecipeError, match="larger than 1,024 KiB"):
        load_recipe(large)
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(RecipeError, match="symbolic links"):
        load_recipe(loop)
    read, write = os.pipe()
    os.write(write, RECIPE.encode())
    os.close(write)
    try:
        assert load_recipe(f"/dev/fd/{read}").name == "small"
    finally:
        os.close(read)


def test_a_run_folder_in_place_of_a_recipe_names_its_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Is a directory") as caught:
        load_recipe(tmp_path)
    assert caught.value.remedy == "Give the path of a YAML recipe"
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(RecipeError, match=rf"The recipe of this run is {tmp_path}/recipe\.yaml"):
        load_recipe(tmp_path)


def test_a_pipe_without_a_writer_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.config.recipe_loading._PIPE_TIMEOUT_SECONDS", 0.05)
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(RecipeError, match="nothing was written to this pipe"):
        load_recipe(tmp_path / "run.yaml")


def iterate_keys(section: type[BaseModel], before: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every key of a recipe, sections included."""
    for name, info in section.model_fields.items():
        yield ".".join((*before, name))
        for inner in find_models(info.annotation):
            yield from iterate_keys(inner, (*before, name))


def find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from find_models(argument)


UNUSUAL = [
    *TEXTS, *(text for text, _ in NUMBERS), "~", "", "yes", "off", "1e400", ".nan", "-0", "-1",
    "9" * 30, "9" * 5000,
    "1" + "0" * 18, '"a\\0b"', '"\\ud800"', '"${"', '"${HOME}"', '"${A B}"', "a/" * 3000, "a" * 300,
    "[]", "{}", "[[]]",
    "{a: {}}", "[1, a, ~]", "{path: 3}", "{path: [a]}", "{1: 2}", "{~: 2}", "{true: 2}",
    "{? [a] : 1}", "{a: 1, a: 2}",
    "!!int x", "!!python/none", "&a [*a]", "*a", "!", "!!", "|", ">", "- a", "a: b", "@", "`", "%",
    "\t", "'", '"', "[", "}",
    "#", "\\", "://", "s3://", "~nobody-here/x",
]  # fmt: skip
SCALARS = (
    st.sampled_from(UNUSUAL)
    | st.text(max_size=12)
    | st.from_regex(r"[-+]?[0-9._:xbeEoTZ-]{1,12}", fullmatch=True)
)


def set_yaml_value(key: str, value: str) -> str:
    """Return the recipe with a key set to unquoted YAML text."""
    document = parse_yaml(RECIPE, "here")
    *sections, last = key.split(".")
    target = document
    for section in sections:
        if not isinstance(target.get(section), dict):
            target[section] = {}
        target = target[section]
    target[last] = "PLACE"
    return dump_yaml(document).replace("PLACE", value)


def read_or_refuse(path: Path, overrides: list[str]) -> None:
    """Read a recipe, write it and read it again; an error message must have a readable length."""
    try:
        recipe = load_recipe(path, overrides)
    except InputError as error:
        message = str(error)
        assert len(message) < 20_000, message
        return
    written = path.with_name("written.yaml")
    written.write_text(dump_yaml(recipe.model_dump(mode="json")), encoding="utf-8")
    assert load_recipe(written) == recipe


@settings(max_examples=100)
@given(key=st.sampled_from(sorted(iterate_keys(Recipe))), value=SCALARS)
def test_no_value_of_any_key_gives_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    changed = folder / "odd.yaml"
    plain = folder / "plain.yaml"
    changed.write_text(set_yaml_value(key, value), encoding="utf-8", errors="surrogatepass")
    plain.write_text(RECIPE)
    read_or_refuse(changed, [])
    read_or_refuse(plain, [f"{key}={value}"])
