"""Loading of recipes, overrides, and messages of refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shardwright.config import Recipe, apply_overrides, dump_recipe, load_recipe, parse_layout
from shardwright.config.recipe import RecomputeSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import LayoutError, RecipeError

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": "corpus.txt"},
    "training": {
        "sequence_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "micro_batch_size": 1,
    },
}


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def change_section(section: str, **keys: object) -> dict:
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), **keys}}


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    recipe = validate_recipe(MINIMAL)
    assert load_recipe(write_recipe(tmp_path, dump_recipe(recipe))) == recipe


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL).replace("0.001", "1e-3")
    assert load_recipe(write_recipe(tmp_path, text)).training.learning_rate == 1e-3


def test_overrides_take_precedence_and_do_not_change_the_document(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, yaml.safe_dump(MINIMAL))
    recipe = load_recipe(
        path,
        [
            "training.learning_rate=1e-4",
            "precision=bf16",
            "precision.reduce_dtype=bf16",
            "layout.zero_stage=2",
        ],
    )
    assert recipe.training.learning_rate == 1e-4
    assert (recipe.precision.kind, recipe.precision.reduce_dtype) == ("bf16", "bf16")
    assert recipe.layout.zero_stage == 2
    before = {"a": {"b": 1}}
    apply_overrides(before, ["a.b=2"])
    assert before == {"a": {"b": 1}}


def test_layout_is_equal_in_recipe_and_command_line(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path, yaml.safe_dump(change_section("layout", dp_shard=2, zero_stage=3))
    )
    assert load_recipe(path).layout == load_recipe(path, layout="dp_shard=2,zero_stage=3").layout


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (
            change_section("training", seqence_length=4),
            "training.seqence_length",
            "Did you mean `sequence_length`?",
        ),
        ({**MINIMAL, "learning_rate": 1}, "learning_rate", "training.learning_rate"),
        ({**MINIMAL, "lerning_rate": 1}, "lerning_rate", "training.learning_rate"),
        (change_section("model", path="x"), "model", "exactly one of"),
        ({**MINIMAL, "precision": "bf17"}, "precision.kind", "bf16"),
        (
            change_section("training", micro_batch_size=0),
            "training.micro_batch_size",
            "greater than 0",
        ),
        (
            change_section("training", learning_rate=float("nan")),
            "training.learning_rate",
            "finite",
        ),
        (change_section("tokenizer", kind="bpe"), "tokenizer", "vocab_size"),
        (
            change_section("tokenizer", kind="bpe", vocab_size=2**63),
            "tokenizer.vocab_size",
            "4194304",
        ),
        (change_section("training", max_steps=True), "training.max_steps", "not a whole number"),
        (change_section("training", max_steps="7"), "training.max_steps", "without quotes"),
        (change_section("training", learning_rate="fast"), "training.learning_rate", "1e-3"),
        (change_section("training", learning_rate="3e-3"), "training.learning_rate", "PyYAML"),
        ({**MINIMAL, "training": 3}, "training", "allowed: sequence_length, micro_batch_size"),
        ({**MINIMAL, "name": "my run"}, "name", "allowed: letters, digits, dots"),
        (change_section("training", decay_steps=3), "training", "warmup_stable_decay"),
        (change_section("training", base_batch_size=3), "training", "batch_scaling"),
        (
            change_section("training", schedule="constant", min_learning_rate=1e-5),
            "training",
            "does not decay",
        ),
        (
            change_section("optimizer", momentum=0.9),
            "optimizer",
            "has no effect with `name: adamw`",
        ),
        (
            change_section("optimizer", name="sgd", beta2=0.99),
            "optimizer",
            "has no effect with `name: sgd`",
        ),
        (
            change_section("precision", kind="bf16", initial_loss_scale=8.0),
            "precision",
            "for `kind: fp16`",
        ),
        (change_section("data", sources=[]), "data.sources", "at least 1"),
        ({k: v for k, v in MINIMAL.items() if k != "data"}, "data", "missing key"),
        (
            {"trainning" if k == "training" else k: v for k, v in MINIMAL.items()},
            "trainning",
            "Did you mean `training`?",
        ),
        ({**MINIMAL, "micro_batch_size": 1}, "micro_batch_size", "`training.micro_batch_size`"),
        (change_section("adapters", targets="q_proj"), "adapters.targets", "not a list"),
        (change_section("data", sources=3), "data.sources", "not a list"),
        ({**MINIMAL, "model": {"config": "llama"}}, "model.config", "not a mapping"),
        (change_section("model", compile="maybe"), "model.compile", "true, false or 'auto'"),
        (
            change_section("model", loss_chunk_tokens=-1),
            "model.loss_chunk_tokens",
            "too small (got -1; allowed: greater than 0, or 'auto')",
        ),
        (
            change_section("watchdog", slow_steps=7),
            "watchdog.slow_steps",
            "not a multiple of 3 (got 7; allowed: multiples of 3)",
        ),
        ({**MINIMAL, "recompute": 5}, "recompute", "{budget_gib: N} (got 5)"),
        (change_section("training", learning_rate=True), "training.learning_rate", "not a number"),
    ],
)
def test_wrong_keys_are_refused_by_name(document: dict, field: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        validate_recipe(document)
    assert caught.value.field == field
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        validate_recipe({**change_section("training", seqence_length=4), "layuot": {}})
    assert "seqence_length" in str(caught.value)
    assert "layuot" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1"),
        ("seed: 1\nseed: 2\n", r"duplicate key.*second value in .*/recipe\.yaml, line 2"),
        ("- 1\n", "a recipe must be a mapping"),
        ("a: b: c\n", "line 1"),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(write_recipe(tmp_path, text))


def test_python_objects_are_never_constructed(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(write_recipe(tmp_path, "a: !!python/object/apply:os.system ['true']"))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_in_another_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(f"# a\nname: caf\u00e9\n{yaml.safe_dump(MINIMAL)}".encode(encoding))
    with pytest.raises(RecipeError, match=r"byte 0x(e9 on line 2|ff on line 1) .*as UTF-8"):
        load_recipe(path)


def test_every_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    recipe = validate_recipe(
        MINIMAL
        | {
            "model": {"path": "~/model"},
            "data": {"sources": "~/text", "cache_dir": "~/cache"},
            "run": {"dir": "~/runs/one"},
            "checkpoint": {"dir": "s3://bucket/~/run"},
        }
    )
    assert recipe.model.path == "/home/me/model"
    assert (recipe.data.sources[0].path, recipe.data.cache_dir) == (
        "/home/me/text",
        "/home/me/cache",
    )
    assert recipe.run.dir == "/home/me/runs/one"
    assert recipe.checkpoint.dir == "s3://bucket/~/run"


def test_a_path_below_an_unknown_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(RecipeError, match="the home folder `~` is unknown; set HOME"):
        validate_recipe(MINIMAL | {"run": {"dir": "~/runs/one"}})


def test_sizes_are_numbers_or_text_with_a_unit() -> None:
    recipe = validate_recipe(
        MINIMAL
        | {
            "offload": {"optimizer": "host", "buffer_bytes": "4MiB", "read_ahead_bytes": "1.5 GiB"},
            "layout": {"bucket_size_bytes": "10kB"},
            "recompute": {"budget_gib": "512MiB"},
        }
    )
    assert recipe.offload.buffer_bytes == 4 * 2**20
    assert recipe.offload.read_ahead_bytes == 3 * 2**29
    assert recipe.layout.bucket_size_bytes == 10_000
    assert recipe.recompute == RecomputeSection(budget_gib=0.5)
    assert parse_layout("bucket_size_bytes=1MB") == {"bucket_size_bytes": "1MB"}
    schema = Recipe.model_json_schema()["$defs"]["OffloadSection"]["properties"]["buffer_bytes"]
    number, text = schema["anyOf"]
    assert (number["type"], number["multipleOf"]) == ("integer", 4096)
    assert re.match(text["pattern"], "4MiB")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("buffer_bytes", "64M", "number with a unit.*got '64M'"),
        ("buffer_bytes", "-4MiB", "number with a unit.*got '-4MiB'"),
        ("buffer_bytes", "0.3KiB", "307.20 bytes are not a whole number.*got '0.3KiB'"),
        ("buffer_bytes", "5kB", "not a multiple of 4096 .got 5000"),
        ("buffer_bytes", "auto", "not a whole number .got 'auto'"),
        ("buffer_bytes", 4096.0, "not a whole number .got 4096.0; .*or decimals"),
        ("read_ahead_bytes", -1, "too small .got -1; .*or 'auto'.$"),
        ("read_ahead_bytes", "all", "number with a unit.*got 'all'.$"),
    ],
)
def test_wrong_sizes_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        validate_recipe(change_section("offload", optimizer="host", **{key: value}))
    assert caught.value.field == f"offload.{key}"


def test_environment_variables_are_expanded_or_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = change_section("data", sources="${CORPUS_HOME}/a.txt")
    monkeypatch.setenv("CORPUS_HOME", "/corpus")
    assert validate_recipe(document).data.sources[0].path == "/corpus/a.txt"
    monkeypatch.delenv("CORPUS_HOME")
    with pytest.raises(RecipeError, match="export CORPUS_HOME=") as caught:
        validate_recipe(document)
    assert caught.value.field == "data.sources"


@pytest.mark.parametrize(
    "text",
    ["tp", "tp=two", "tpp=2", "tp=2,tp=4", "zero_stage=4", "tp=0", "tp=\u00b2", "tp=" + "9" * 5000],
)
def test_invalid_layouts_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(text)


@pytest.mark.parametrize("text", ["=25M", "=0KiB", "=", ""])
def test_invalid_sizes_in_layouts_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(f"bucket_size_bytes{text}")


@pytest.mark.parametrize("override", ["training", "=3", "seed.x=1"])
def test_invalid_overrides_are_refused(override: str) -> None:
    with pytest.raises(RecipeError):
        apply_overrides({"seed": 3}, [override])


def test_validation_data_may_be_null_and_training_data_may_not(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, yaml.safe_dump(MINIMAL))
    recipe = load_recipe(path, ["data.validation=null"])
    assert recipe == load_recipe(path)
    assert recipe.data.validation == ()
    with pytest.raises(RecipeError, match=r"data\.sources: not a list \(got None"):
        load_recipe(path, ["data.sources=null"])


@pytest.mark.parametrize(
    "key", ["data.sources", "data.cache_dir", "model.path", "tokenizer.path", "run.dir"]
)
def test_a_variable_without_braces_is_refused_unless_the_path_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """It made a folder with the name `$SCRATCH`, or was an input that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    path = write_recipe(tmp_path, yaml.safe_dump(MINIMAL))
    changes = [f"{key}=$SCRATCH/folder"]
    if key == "model.path":
        changes.append("model.config=null")
    with pytest.raises(RecipeError, match=rf"{key}.*in braces only: write \$\{{SCRATCH\}}, or"):
        load_recipe(path, changes)
    (tmp_path / "$SCRATCH" / "folder").mkdir(parents=True)
    load_recipe(path, changes)
