"""Manifests, indexes and environment documents: round trips, and every problem reported at once with its path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from entries import make_entry, make_key
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcache import digest
from kcache.documents import LIMITS, decode, unsafe_path
from kcache.errors import IntegrityError, KcacheError, ManifestError
from kcache.index import Index, index_entry, index_path, manifest_path, parse_index
from kcache.key import ABSENT, INGREDIENTS, NVCC, Environment, known, parse_environment, undetermined
from kcache.manifest import Manifest, parse_manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_entry(tmp_path_factory.mktemp("entry"), {"sampling": b"one", "topk": b"two"})


def test_a_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    assert parse_manifest(manifest.encode()) == manifest
    assert parse_manifest(manifest.encode()).encode() == manifest.encode()


def test_an_index_survives_a_round_trip_and_is_sorted(manifest: Manifest, tmp_path: Path) -> None:
    other = make_entry(tmp_path, {"cascade": b"three"}, kind="modules")
    lines = tuple(index_entry(m, m.encode()) for m in (manifest, other))
    encoded = Index(entries=lines).encode()
    assert encoded == Index(entries=lines[::-1]).encode()
    assert {line.key.fingerprint for line in parse_index(encoded).entries} == {manifest.fingerprint, other.fingerprint}


@pytest.mark.parametrize("name", INGREDIENTS[NVCC])
def test_every_ingredient_changes_the_fingerprint(name: str) -> None:
    assert make_key("cascade").fingerprint != make_key("cascade", ingredients={name: "other"}).fingerprint


def test_kind_and_modules_change_the_fingerprint() -> None:
    fingerprints = {make_key("a").fingerprint, make_key("b").fingerprint, make_key("a", kind="modules").fingerprint}
    assert len(fingerprints) == 3


def _broken(manifest: Manifest, path: str, value: Any) -> bytes:
    document = json.loads(manifest.encode())
    *parents, last = path.split("/")
    place = document
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place[parent]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("format", "kcache.entry/2", "format"),
        ("key/schema", 2, "key.schema"),
        ("key/kind", "../x", "key.kind"),
        ("key/modules", [], "key.modules"),
        ("key/modules", ["topk", "sampling"], "key.modules"),
        ("key/ingredients/gpu.arch", "", "key.ingredients.gpu.arch"),
        ("key/ingredients/gpu.arch", KeyError, "key.ingredients.gpu.arch"),
        ("key/ingredients/surprise", "x", "key.ingredients.surprise"),
        ("key/ingredients/gpu.arch", "120f", "fingerprint"),
        ("fingerprint", "sha256:" + "0" * 64, "fingerprint"),
        ("artifacts", [], "artifacts"),
        ("artifacts/0/path", "/etc/passwd", "artifacts[0].path"),
        ("artifacts/0/path", "../../x", "artifacts[0].path"),
        ("artifacts/0/path", "sampling/topk.so", "no library for module sampling"),
        ("artifacts/1/path", "Sampling/sampling.so", "letter case"),
        ("artifacts/0/size", -1, "artifacts[0].size"),
        ("artifacts/0/size", True, "artifacts[0].size"),
        ("artifacts/0/size", 1 << 50, "artifacts[0].size"),
        ("artifacts/0/sha256", "sha256:xyz", "artifacts[0].sha256"),
        ("artifacts/0/elf", KeyError, "artifacts[0].elf"),
        ("artifacts/0/elf/versions", {"GLIBC": "two"}, "artifacts[0].elf.versions.GLIBC"),
        ("artifacts/0/elf/needed", "libc.so.6", "artifacts[0].elf.needed"),
        ("archive/size", "1", "archive.size"),
        ("archive/sha256", None, "archive.sha256"),
        ("sources", {"a": "b"}, "sources.a"),
        ("sources", {}, "sources"),
        ("build_seconds/sampling", -1, "build_seconds.sampling"),
        ("provenance", [], "provenance"),
    ],
)
def test_a_manifest_with_a_flaw_is_refused_and_the_flaw_named(manifest: Manifest, path: str, value: Any, problem: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(problem)):
        parse_manifest(_broken(manifest, path, value))


def test_all_problems_are_reported_at_once(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    document["artifacts"][0]["size"] = -1
    document["archive"]["sha256"] = "no"
    document["key"]["kind"] = ""
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(document).encode())
    assert len(caught.value.problems) == 3


def test_size_is_checked_before_parsing() -> None:
    with pytest.raises(IntegrityError):
        decode(b"[" * 11, "document", 10)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)).map(
            lambda d: json.dumps(d).encode()
        ),
    )
)
def test_no_document_makes_the_parsers_fail_in_any_other_way(data: bytes) -> None:
    for parse in (parse_manifest, parse_index, lambda d: parse_environment(decode(d, "env", 1000))):
        with pytest.raises(KcacheError):
            parse(data)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(min_value=0), value=st.integers(0, 255))
def test_a_changed_byte_never_passes_for_the_same_manifest(manifest: Manifest, position: int, value: int) -> None:
    data = bytearray(manifest.encode())
    position %= len(data)
    changed = data[position] != value
    data[position] = value
    assert (digest.of_bytes(bytes(data)) != digest.of_bytes(manifest.encode())) is changed


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/x",
        "../x",
        "a/../b",
        "a//b",
        "a/./b",
        ".hidden",
        "-rf",
        "a\0b",
        "a\nb",
        "a b",
        "ü",
        "x" * 401,
        "a/" * 8 + "b",
        "a\\b",
    ],
)
def test_unsafe_paths_are_refused(path: str) -> None:
    assert unsafe_path(path) is not None


@pytest.mark.parametrize("path", ["sampling/sampling.so", "a", "A_b-c.d+e/f"])
def test_plain_paths_are_safe(path: str) -> None:
    assert unsafe_path(path) is None


def test_paths_in_a_store_hold_the_environment_and_the_fingerprint(manifest: Manifest) -> None:
    assert index_path(manifest.key.ingredients) == "v1/env/flashinfer-0.7.4/x86_64-cuda13/index.json"
    assert manifest_path(manifest.key).endswith(manifest.fingerprint[7:] + ".json")
    assert unsafe_path(manifest_path(manifest.key)) is None


def test_an_environment_survives_a_round_trip() -> None:
    environment = Environment(
        facts={"a": known("1"), "b": ABSENT, "c": undetermined("no driver")},
        archs=("120f", "90a"),
        libraries={"libc.so.6": known("/lib/libc.so.6")},
        sources={"data/x.cu": ABSENT},
    )
    assert parse_environment(json.loads(json.dumps(environment.to_json()))) == environment


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "format"),
        ({"format": "kcache.env/1", "facts": {"x": 1}, "archs": [], "libraries": {}, "sources": {}}, "facts.x"),
        ({"format": "kcache.env/1", "facts": {}, "archs": ["9.0a"], "libraries": {}, "sources": {}}, "archs"),
        ({"format": "kcache.env/1", "facts": {}, "archs": [], "sources": {}}, "libraries"),
        (
            {
                "format": "kcache.env/1",
                "facts": {"x": {"value": "1", "absent": True}},
                "archs": [],
                "libraries": {},
                "sources": {},
            },
            "facts.x",
        ),
    ],
)
def test_an_environment_with_a_flaw_is_refused(document: Any, problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        parse_environment(document)


def test_limits_leave_room_for_what_is_real() -> None:
    assert LIMITS.manifest_bytes >= 4 << 20
    assert LIMITS.archive_bytes >= 1 << 30
