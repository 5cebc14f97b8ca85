"""Bad build manifests: each field of the format missing, of a wrong type, out of range and twice; unknown fields; contradictions;
and what is no manifest at all. Made from the format's own list, so that a new field is tested as soon as it is there."""

from __future__ import annotations

import copy
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache import recipe as format_of
from kcache.recipe import CONTRADICTIONS, FIELDS, MAX_BYTES, MAX_LINE, RecipeError, parse_recipe, recipe_from_document
from kcache.recipe_fields import MAX_ITEMS, REQUIRED, Choice, Field, Real, Text, Whole, read_fields, tables, told

MANIFESTS = Path(__file__).parents[2] / "manifests"

GOOD: dict[str, Any] = {
    "format": "kcache.recipe/1",
    "kinds": ["sampling", "b12x-moe"],
    "model": {
        "name": "a model",
        "source": "config.json",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "experts": 128,
        "top_k": 8,
        "activation": "swigluoai_uninterleave",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1,
        "swiglu_limit": 7.0,
        "quantization": ["nvfp4"],
    },
    "parallel": {"tp": [1, 2], "ep": [1]},
    "tokens": {"capture": [1, 2, 4], "maximum": 8192, "calls": ["function"], "scales": "shared"},
    "linear": {"heads": 16, "value_heads": 32, "head_dim": 128, "drafted": [2, 4]},
    "tuning": {
        "operations": ["mm-bf16-cublaslt", "moe-bf16-trtllm"],
        "matrices": ["7168x2048", "2048x768"],
        "deferred": [1, 16],
        "skip": ["fp4_gemm"],
        "vllm": "0123456789abcdef" * 4,
    },
    "targets": {"gpus": ["rtx-pro-6000"], "arches": ["9.0a"], "cuda": "13.0", "flashinfer": ["0.7.4"]},
}
"""A good manifest with every field that there is."""


def changed(path: str, value: Any) -> dict[str, Any]:
    """`GOOD` with one field set, or taken out (`...`)."""
    document = copy.deepcopy(GOOD)
    table: dict[str, Any] = document
    *parents, name = path.split(".")
    for parent in parents:
        table = table[parent]
    if value is ...:
        del table[name]
    else:
        table[name] = value
    return document


def in_good(field: Field) -> Any:
    return (GOOD[field.table] if field.table else GOOD)[field.name]


def problems(document: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        recipe_from_document(document, "test")
    return caught.value.problems


def only(document: dict[str, Any], path: str) -> str:
    """The one problem of a document, which is about this path; other fields may only say that they contradict it."""
    (problem,) = [problem for problem in problems(document) if problem.startswith(path)]
    return problem


def test_the_good_manifest_has_every_field() -> None:
    recipe_from_document(copy.deepcopy(GOOD), "test")
    assert {field.path for field in FIELDS} == {
        *(name for name, value in GOOD.items() if not isinstance(value, dict)),
        *(f"{table}.{name}" for table, values in GOOD.items() if isinstance(values, dict) for name in values),
    }


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.path))
def test_a_field_that_is_left_out_is_missing_or_has_its_default(field: Field) -> None:
    document = changed(field.path, ...)
    if field.path == "targets.gpus":
        document["kinds"] = ["sampling"]  # b12x-moe needs one
    if field.table == "tuning":
        document["tuning"] = {}  # each of them needs another
    if field.default is REQUIRED:
        assert problems(document) == (only(document, f"{field.path}: missing; it is "),)
    else:
        recipe_from_document(document, "test")


@pytest.mark.parametrize("table", tables(FIELDS)[1:])
@pytest.mark.parametrize("value", [..., 3, "x", [], [{}], True], ids=repr)
def test_a_table_that_is_missing_or_no_table_is_told_once_with_its_fields(table: str, value: Any) -> None:
    if value is ... and all(field.default is not REQUIRED for field in FIELDS if field.table == table):
        recipe_from_document(changed(table, ...), "test")
        return
    (problem,) = problems(changed(table, value))
    assert problem.startswith(f"{table}: ")
    assert all(field.name in problem for field in FIELDS if field.table == table)


TYPES: dict[str, Any] = {
    "text": "some text",
    "whole": 3,
    "real": 1.5,
    "true": True,
    "table": {"a": 1},
    "list": [[]],
    "empty": "",
    "date": datetime.date(2026, 1, 1),
    "time": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
}


def of_wrong_types(field: Field) -> Iterator[tuple[str, Any]]:
    """Every TOML type that a field's own is not; for a list also a good item without its list, and a list of each."""
    right = {Whole: ("whole",), Real: ("whole", "real"), Text: ("text",), Choice: ()}.get(type(field.rule), ())
    right = () if isinstance(field.rule, Text) and field.rule.pattern else right
    for name, value in TYPES.items():
        if field.least is not None:
            yield name, value
            if name not in right:
                yield f"list of {name}", [value]
        elif name not in right:
            yield name, value
    if field.least is not None:
        yield "no list", in_good(field)[0]
    else:
        yield "a list of it", [in_good(field)]


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field.path}: {name}") for field in FIELDS for name, value in of_wrong_types(field)],
)
def test_a_field_of_a_wrong_type_is_told_with_what_is_wanted(field: Field, value: Any) -> None:
    if field.path == "tokens.maximum" and value == 3:
        value = 1 << 40
    problem = only(changed(field.path, value), field.path)
    assert field.rule.wanted in problem or "no GPU product" in problem


def out_of_range(field: Field) -> Iterator[tuple[str, Any]]:
    """Values of the right type that are just, and far, outside. A rule of an unknown kind fails here."""
    rule = field.rule
    if isinstance(rule, Whole):
        values: list[Any] = [rule.least - 1, rule.most + 1, -rule.least - 1, 1 << 200_000]
    elif isinstance(rule, Real):
        values = [float("inf"), float("-inf"), float("nan"), Real.MOST + 1, 10**400, *([0.0, 0, -1] if rule.positive else [])]
    elif isinstance(rule, Text):
        values = ["", "x" * (rule.most + 1), "two\nlines", "\x1b[31m", "a\x00"]
    elif isinstance(rule, Choice):
        values = [f"{rule.choices[0]} ", rule.choices[0].upper() + "x", ""]
    elif field.path == "targets.gpus":
        values = ["rtx 5091", "", "x" * 5000]
    else:
        raise AssertionError(f"{field.path} has a rule that this test does not know")
    for value in values:
        yield told(value), [value] if field.least is not None else value
    if field.least is not None:
        yield "too many", [in_good(field)[0]] * (MAX_ITEMS + 1)
        if field.least:
            yield "too few", []


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field.path}: {name}") for field in FIELDS for name, value in out_of_range(field)],
)
def test_a_value_out_of_range_is_told_with_what_is_wanted(field: Field, value: Any) -> None:
    problem = only(changed(field.path, value), field.path)
    assert field.rule.wanted in problem or "no GPU product" in problem
    assert len(problem) < 400
    assert problem.isprintable()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("targets.arches", value) for value in ("sm_90a", "90a", "9.0b", "9", "9.0a ", "9.0a,9.0a", "\u0669.\u0660")),
        *(("targets.cuda", value) for value in ("13", "13.0.88", "v13.0", "9.0", "13.0\n")),
        *(("targets.flashinfer", value) for value in ("latest", ">=0.7.4", "0.7", "0.7.4+cu130", "0.7.4.post", "0.7.x")),
    ],
)
def test_a_text_that_is_no_name_of_its_sort_is_told(path: str, value: str) -> None:
    (field,) = [field for field in FIELDS if field.path == path]
    assert field.rule.wanted in only(changed(path, value if field.least is None else [value]), path)


@pytest.mark.parametrize("field", [field for field in FIELDS if field.least is not None], ids=lambda field: str(field.path))
def test_a_value_that_is_there_twice_is_told(field: Field) -> None:
    first = in_good(field)[0]
    assert only(changed(field.path, [first, first]), field.path).startswith(f"{field.path}[1]: ")
    assert "twice" in only(changed(field.path, [first, first]), field.path)


def test_a_gpu_that_is_there_under_two_names_is_there_twice() -> None:
    assert only(changed("targets.gpus", ["rtx-5090", "RTX 5090"]), "targets.gpus") == "targets.gpus[1]: 'RTX 5090' is there twice"


def test_a_gpu_that_is_not_known_is_told_with_those_that_come_near() -> None:
    assert "did you mean rtx-5090" in only(changed("targets.gpus", ["rtx 5091"]), "targets.gpus")


@pytest.mark.parametrize("table", tables(FIELDS))
@pytest.mark.parametrize(
    "name", ["colour", "Format", "experts ", "", "hidden-size", "a" * 500, "two\nlines", "\x1b[31m"], ids=ascii
)
def test_an_unknown_field_is_named_with_the_known_ones(table: str, name: str) -> None:
    document = copy.deepcopy(GOOD)
    (document[table] if table else document)[name] = {}
    (problem,) = problems(document)
    assert problem.startswith(f"{table}." if table else "")
    assert "unknown; known are " in problem
    assert problem.isprintable()
    assert len(problem) < 400


CONTRADICTORY = [
    ("_more_of_each_token_than_there_are", {"model.experts": 4}, "model.top_k: 8 is more than the 4 experts that there are"),
    ("_swiglu_of_another_activation", {"model.activation": "silu"}, "model.swiglu_limit: only with activation swigluoai"),
    ("_ranks_that_do_not_divide", {"parallel.tp": [1, 5]}, "parallel.tp: 5 does not divide model.moe_intermediate_size (768)"),
    ("_ranks_that_do_not_divide", {"parallel.ep": [3]}, "parallel.ep: 3 does not divide model.experts (128)"),
    ("_captured_beyond_the_maximum", {"tokens.capture": [9000]}, "tokens.maximum: 8192 is less than the capture size 9000"),
    ("_no_target", {"targets.gpus": [], "targets.arches": [], "kinds": ["sampling"]}, "targets.gpus: neither a GPU nor"),
    ("_targets_that_b12x_does_not_know", {"targets.gpus": ["h200"]}, "targets.gpus: kind b12x-moe needs a GPU of compute cap"),
    ("_targets_that_b12x_does_not_know", {"targets.gpus": []}, "targets.gpus: kind b12x-moe needs a GPU of compute cap"),
    (
        "_targets_that_b12x_does_not_know",
        {"targets.cuda": "12.8"},
        "targets.cuda: kind b12x-moe needs CUDA 13 or newer, not 12.8",
    ),
    ("_linear_attention_that_is_not_there", {"linear.heads": 5}, "linear.value_heads: 32 is no multiple of the 5 heads"),
    (
        "_linear_attention_that_is_not_there",
        {"kinds": ["gdn-verify"], "linear.drafted": [], "targets.gpus": ["h200"]},
        "linear.drafted: missing; kind gdn-verify needs it",
    ),
    (
        "_linear_attention_that_is_not_there",
        {"kinds": ["gdn-decode"]},
        "targets.gpus: kind gdn-decode needs a GPU of compute capability 9.0",
    ),
    (
        "tuning_of_nothing",
        {"kinds": ["autotune"], "tuning": {}},
        "tuning.operations: missing; kind autotune needs it (mm-bf16-cublaslt, ",
    ),
    ("tuning_of_nothing", {"tuning.matrices": []}, "tuning.matrices: missing; mm-bf16-cublaslt needs it"),
    ("tuning_of_nothing", {"tuning.operations": ["moe-bf16-trtllm"]}, "tuning.matrices: only with mm-bf16-cublaslt"),
    ("tuning_of_nothing", {"tuning.operations": ["mm-bf16-cublaslt"]}, "tuning.deferred: only with moe-bf16-trtllm"),
]


@pytest.mark.parametrize(("rule", "changes", "wanted"), CONTRADICTORY, ids=lambda value: value if isinstance(value, str) else "")
def test_fields_that_contradict_each_other_are_told(rule: str, changes: dict[str, Any], wanted: str) -> None:
    document = copy.deepcopy(GOOD)
    for path, value in changes.items():
        table, _, name = path.rpartition(".")
        (document[table] if table else document)[name] = value
    found = problems(document)
    values = read_fields(document, FIELDS)
    assert any(problem.startswith(wanted) for problem in found)
    assert set(getattr(format_of, rule)(values.found)) == set(found)


def test_every_contradiction_that_is_looked_for_is_tested() -> None:
    assert {rule for rule, _, _ in CONTRADICTORY} == {rule.__name__ for rule in CONTRADICTIONS}


def test_a_field_with_a_problem_is_not_held_against_others() -> None:
    document = changed("model.experts", "many")
    document["parallel"]["ep"] = [3]
    document["targets"]["cuda"] = 12
    assert [problem.partition(":")[0] for problem in problems(document)] == ["model.experts", "targets.cuda"]


def test_all_problems_are_told_at_once() -> None:
    document = changed("model.experts", "many")
    document["tokens"] = {"capture": [], "maxima": 3}
    document["targets"]["cuda"] = 13
    paths = {problem.partition(":")[0] for problem in problems(document)}
    assert paths == {"model.experts", "tokens.capture", "tokens.maximum", "tokens.maxima", "targets.cuda"}


def test_a_file_of_nothing_but_problems_has_a_message_of_bounded_length() -> None:
    document = {**copy.deepcopy(GOOD), **{f"x{number}": 1 for number in range(5000)}}
    with pytest.raises(RecipeError) as caught:
        recipe_from_document(document, "test")
    assert len(caught.value.problems) == 5000
    assert "and 4900 more" in str(caught.value)
    assert len(str(caught.value)) < 20_000


NO_MANIFEST = {
    "half a line": (b"format = ", "not TOML"),
    "UTF-16": ("format".encode("utf-16"), "not UTF-8: byte 0"),
    "Latin-1 in a name": (b'format = "\xe9"', "not UTF-8: byte 10"),
    "cut within a character": (b'format = "\xf0\x9f', "not UTF-8: byte 10"),
    "larger than allowed": (b"#\n" * MAX_BYTES, "larger than 64 KiB"),
    "a long line": (b"#\n#" + b" " * MAX_LINE, f"line 2 is longer than {MAX_LINE} bytes"),
    "deep lists": (b"\n".join(b"a%d = " % n + b"[" * 4000 for n in range(3)), "not TOML"),
    "deep lists over lines": (b"a = " + b"[\n" * 20_000, "not TOML: nested too deep"),
    "deep keys": (b"\n".join(b"a%d" % n + b".a" * 2000 + b" = 1" for n in range(15)), "a0: unknown"),
    "deep tables": (b"\n".join(b"[kinds.a%d" % n + b".a" * 2000 + b"]" for n in range(15)), "kinds: not a list"),
    "empty": (b"", "format: missing"),
    "comments only": (b"# nothing\n", "format: missing"),
    "of the future": (b'format = "kcache.recipe/2"', "format: not 'kcache.recipe/1', but 'kcache.recipe/2'"),
    "JSON": (b'{"format": "kcache.recipe/1"}', "not TOML"),
    "YAML": (b"format: kcache.recipe/1", "not TOML"),
    "ELF": (b"\x7fELF\x02\x01\x01\x00", "not TOML"),
    "NUL": (b'format = "\x00"', "not TOML"),
    "a key twice": (b"kinds = []\nkinds = []\n", "not TOML"),
    "a table twice": (b"[model]\n[model]\n", "not TOML"),
    "a table over a value": (b"model = 1\n[model]\n", "not TOML"),
    "a key twice in a line": (b"model = {a = 1, a = 2}", "not TOML"),
    "a huge number": (b"format = " + b"9" * 4000, "format: not 'kcache.recipe/1', but a number of "),
    "a huge number in hexadecimal": (b"format = 0x" + b"f" * 4000, "format: not 'kcache.recipe/1', but a number of "),
    "a huge float": (b"[model]\nswiglu_limit = " + b"9" * 400, "model.swiglu_limit: not a finite number"),
    "old line ends": (b"a = 1\rb = 2", "not TOML"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("data", "told"), NO_MANIFEST.values(), ids=NO_MANIFEST)
def test_what_is_no_manifest_at_all_gives_one_message(data: bytes, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "x.toml")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("x.toml is not a build manifest: ")
    assert told in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000


def test_a_byte_order_mark_is_no_problem() -> None:
    data = (MANIFESTS / "qwen3-30b-a3b.toml").read_bytes()
    assert parse_recipe(b"\xef\xbb\xbf" + data, "x") == parse_recipe(data, "x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from([field.path for field in FIELDS] + list(tables(FIELDS)[1:])), VALUES)
def test_nothing_in_a_field_raises_anything_else(path: str, value: Any) -> None:
    try:
        recipe_from_document(changed(path, value), "test")
    except RecipeError as error:
        assert error.problems
        assert str(error).isprintable()


@settings(max_examples=30)
@given(st.dictionaries(st.text() | st.sampled_from(["format", *tables(FIELDS)[1:]]), VALUES, max_size=8))
def test_nothing_in_a_document_raises_anything_else(document: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        recipe_from_document(document, "test")


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace")))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "x")
    assert str(caught.value).isprintable()


@settings(max_examples=200)
@given(st.data())
def test_a_good_manifest_with_a_few_bytes_changed_parses_or_is_refused(data: st.DataObject) -> None:
    text = bytearray((MANIFESTS / "qwen3-30b-a3b.toml").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse_recipe(bytes(text), "x")
    except RecipeError as error:
        assert str(error).isprintable()


def kcache(*words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kcache", "manifest", "check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def one_message(code: int, out: str, err: str) -> str:
    """A refusal of the command line: exit code 2, nothing on stdout, one line on stderr."""
    assert code == 2, err
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(("data", "told"), NO_MANIFEST.values(), ids=NO_MANIFEST)
def test_the_command_line_says_it_in_one_line_and_ends_with_2(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    line = one_message(*kcache(path))
    assert line.startswith(f"kcache: {path} is not a build manifest: ")
    assert told in line


@pytest.mark.parametrize(("data", "told"), NO_MANIFEST.values(), ids=NO_MANIFEST)
def test_a_build_refuses_it_in_the_same_line(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    command = [sys.executable, "-m", "kcache", "build", "--manifest", str(path), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert one_message(done.returncode, done.stdout, done.stderr) == one_message(*kcache(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["directory", "missing", "unreadable", "socket", "loop", "empty name"])
def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    path: Path | str = tmp_path / "x.toml"
    assert isinstance(path, Path)
    if kind == "directory":
        path.mkdir()
    elif kind == "unreadable":
        path = Path("/proc/self/mem")  # root may read every file; this one fails when it is read
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty name":
        path = ""
    assert "cannot be read: " in one_message(*kcache(path))


def test_every_bad_field_in_one_file_is_told_through_the_command_line(tmp_path: Path) -> None:
    """All fields wrong at once: one message names them all."""
    lines = ["".join(f"{field.name} = {{}}\n" for field in FIELDS if field.table == table) for table in tables(FIELDS)]
    heads = ["", *(f"[{table}]\n" for table in tables(FIELDS)[1:])]
    path = tmp_path / "x.toml"
    path.write_text("".join(head + body for head, body in zip(heads, lines, strict=True)))
    line = one_message(*kcache(path))
    assert all(f"{field.path}: not " in line for field in FIELDS)


def test_every_file_is_checked_and_json_has_them_all(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.toml", MANIFESTS / "deepseek-v3.toml"
    bad.write_text('format = "kcache.recipe/1"\n')
    code, out, err = kcache(bad, good, "--json")
    assert code == 2
    assert str(bad) in err
    document = json.loads(out)
    assert document["status"] == "bad"
    first, second = document["manifests"]
    assert (first["status"], first["shapes"]) == ("bad", [])
    assert "kinds: missing" in first["problems"][0]
    assert (second["status"], second["problems"], second["model"]) == ("good", [], "deepseek-ai/DeepSeek-V3")
    assert {(shape["tp"], shape["ep"], shape["allowed"]) for shape in second["shapes"]} == {
        (4, 1, True), (8, 1, True), (4, 8, False), (8, 8, False),
    }  # fmt: skip
    assert kcache(good, bad)[0] == 2


def test_a_shape_that_is_not_allowed_is_told_and_is_no_fault_of_the_file() -> None:
    code, out, err = kcache(MANIFESTS / "gpt-oss-120b.toml")
    assert (code, err) == (0, "")
    assert "not allowed  mxfp4 with tp 1, ep 1: hidden size 2880 is not a multiple of 128 (FlashInfer 0.7.4)" in out
    code, out, _ = kcache(MANIFESTS / "qwen3-30b-a3b.toml")
    assert "allowed      nvfp4 with tp 1, ep 1 (FlashInfer 0.7.4)\n" in out
    assert "w4a16 with tp 2, ep 1 (FlashInfer 0.7.4); left to warmup: all kernels, which FlashInfer keeps in memory only" in out
