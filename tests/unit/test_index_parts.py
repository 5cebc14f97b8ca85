"""An index in parts: a container reads what it can use, and publishers keep it as they keep an index in one piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from entries import INGREDIENTS, make_entry, make_key, restored
from hypothesis import given
from hypothesis import strategies as st

from kcache import index_parts
from kcache.errors import IntegrityError, TrustError
from kcache.index import Blob, Index, IndexEntry, decode_index, index_directory, index_path
from kcache.index_parts import PLAIN_LINES, encode
from kcache.key import CUTE_DSL, EntryKey, Environment, known
from kcache.match import match_key
from kcache.store.memory import MemoryStore
from kcache.trust.keys import generate, load
from kcache.trust.policy import parse_policy
from kcache.values import replace
from kcache.workflows.bundle import export, import_bundle
from kcache.workflows.catalog import list_environments, read_index
from kcache.workflows.compact import compact
from kcache.workflows.matrix import read_matrix
from kcache.workflows.parts import read_parts
from kcache.workflows.prune_rules import Rules
from kcache.workflows.prune_store import prune_store
from kcache.workflows.publish import publish
from kcache.workflows.resolve import Wanted, ambiguous_models
from kcache.workflows.signing import IndexSigner
from kcache.workflows.trusted import Guard

DIRECTORY, INDEX = index_directory(INGREDIENTS), index_path(INGREDIENTS)
DAY = 86400.0


def line(key: EntryKey) -> IndexEntry:
    """A line of which only the key matters."""
    name = key.fingerprint.removeprefix("sha256:")
    blob = Blob(path=f"v1/x/{name}", size=1, sha256=key.fingerprint)
    return IndexEntry(key=key, manifest=blob, archive=blob, unpacked_size=1, build_seconds=1.0)


def kernel(model: str, arch: str, number: int = 0) -> EntryKey:
    key = make_key("b12x_moe", kind="b12x-moe", sources={"a": f"sha256:{number:064x}"})
    ingredients = {name: text for name, text in key.ingredients.items() if name not in ("gpu.arch", "build.flags")}
    more = {"gpu.cute_arch": arch, "gpu.sm_count": "188", "cutlass_dsl.wheels": "x", "kernels": "x"}
    return replace(key, ingredients={**ingredients, **more}, layout=CUTE_DSL, model=model)


MODELS = ["Qwen/Qwen3-30B-A3B", "other/Qwen3-30b-a3b", "Qwen/Qwen3-8B", "zai/GLM-4"]
KEYS = [
    *(make_key(name, kind="modules", ingredients={"gpu.arch": arch}) for name in ("cascade", "page") for arch in ("90a", "120f")),
    *(make_key("sampling", "topk", ingredients={"gpu.arch": arch}) for arch in ("90a", "100f", "120f")),
    *(kernel(model, arch) for model in MODELS for arch in ("sm_90a", "sm_120a")),
]


def on_store(keys: list[EntryKey]) -> tuple[MemoryStore, dict[str, object]]:
    store = MemoryStore()
    data, parts = encode(Index(entries=tuple(map(line, keys))), DIRECTORY)
    for name, content in parts.items():
        store.write(name, content, if_absent=True)
    return store, dict(decode_index(data, "index"))


def environment(*archs: str) -> Environment:
    facts = {name: known(text) for name, text in INGREDIENTS.items()} | {"cuda.runtime": known("13.0")}
    return Environment(facts=facts | {f"gpu.sm_count.{arch}": known("188") for arch in archs}, archs=archs)


names = st.sampled_from([*MODELS, "qwen3-30b-a3b", "GLM-4", "glm-*", "*", "Qwen/*", "nobody"])


@given(
    keys=st.lists(st.sampled_from(KEYS), min_size=6, unique_by=lambda key: key.fingerprint),
    archs=st.sampled_from([["90a"], ["120a"], ["90a", "121a"], ["100a"], []]),
    models=st.lists(names, max_size=2),
    kinds=st.sampled_from([[], [], ["b12x-moe"], ["modules"], ["sampling", "b12x-moe"]]),
    modules=st.sampled_from([[], [], ["cascade"], ["page"]]),
    spread=st.sampled_from([0, 2, 2048]),
    named=st.sampled_from([2, 2000]),
)
def test_what_a_container_can_use_is_in_the_parts_that_it_reads(
    keys: list[EntryKey], archs: list[str], models: list[str], kinds: list[str], modules: list[str], spread: int, named: int
) -> None:
    here, asked = environment(*archs), Wanted(models=models, kinds=kinds, modules=modules)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PLAIN_LINES", 0), ("PART_LINES", 1), ("SPREAD_LINES", spread), ("NAMED_MODELS", named)):
            patch.setattr(index_parts, name, value)
        store, root = on_store(keys)
        whole = read_parts(store, INDEX, root)
        some = read_parts(store, INDEX, root, environment=here, asked=asked)
    everything = {entry.key.fingerprint for entry in whole.entries}
    assert everything == {key.fingerprint for key in keys} and set(whole.parts) == set(store.list(""))
    read = {entry.key.fingerprint for entry in some.entries}
    assert read and read <= everything
    unclear = ambiguous_models([entry.key for entry in some.entries], asked, some.models)
    assert bool(unclear) == bool(ambiguous_models(keys, asked))
    taken = [key for key in keys if asked.takes(key) and not (unclear and key.model)]
    usable = {key.fingerprint for key in taken if match_key(key, here).accepted}
    assert usable <= read


def test_of_a_hundred_models_one_part_or_two_are_read() -> None:
    keys = [kernel(f"owner/model-{n}", "sm_90a", each) for n in range(100) for each in range(5)]
    store, root = on_store([*keys, make_key("cascade", kind="modules")])
    some = read_parts(store, INDEX, root, environment=environment("90a"), asked=Wanted(models=["model-7"]))
    assert len(some.entries) < 4 * index_parts.PART_LINES and some.models == tuple(sorted({key.model for key in keys}))
    assert sum(entry.key.model == "owner/model-7" for entry in some.entries) == 5
    assert any(entry.key.kind == "modules" for entry in some.entries)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of more than two lines is written in parts."""
    monkeypatch.setattr(index_parts, "PLAIN_LINES", 2)
    monkeypatch.setattr(index_parts, "PART_LINES", 1)


def published(store: MemoryStore, directory: Path, *modules: str) -> list[str]:
    made = [make_entry(directory, {name: name.encode()}, kind=name).fingerprint for name in modules]
    publish(directory, store)
    return made


@pytest.mark.usefixtures("few")
def test_an_index_that_grows_goes_into_parts_and_back(tmp_path: Path) -> None:
    store = MemoryStore()
    first = published(store, tmp_path / "1", "a", "b")
    assert b"kcache.index/1" in store.objects[INDEX]
    more = published(store, tmp_path / "2", "c", "d")
    assert b"kcache.index/2" in store.objects[INDEX] and list_environments(store) == [INDEX]
    assert sorted(restored(store)) == sorted([*first, *more])
    before = dict(store.objects)
    publish(tmp_path / "2", store)
    assert store.objects == before, "again: nothing changes"
    monday = prune_store(store, Rules(max_bytes=0), now=DAY)
    assert len(monday.verdicts) == 4 and not restored(store) and b"kcache.index/1" in store.objects[INDEX]
    prune_store(store, Rules(), now=9 * DAY)
    assert not [name for name in store.list("v1/env") if "/parts/" in name]


@pytest.mark.usefixtures("few")
def test_parts_that_are_in_use_are_not_pruned_and_those_of_before_are(tmp_path: Path) -> None:
    store = MemoryStore()
    published(store, tmp_path / "1", "a", "b", "c")
    old = {name for name in store.objects if "/parts/" in name}
    fingerprints = published(store, tmp_path / "2", "a", "b", "c", "d", "e")
    used = set(whole(store).parts)
    assert old - used
    prune_store(store, Rules(), now=DAY)
    prune_store(store, Rules(), now=9 * DAY)
    assert {name for name in store.objects if "/parts/" in name} == used
    assert sorted(restored(store)) == sorted(fingerprints)


def whole(store: MemoryStore) -> Index:
    found = read_index(store, INGREDIENTS)
    assert found is not None
    return found


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("damage", ["lost", "other bytes", "no index"])
def test_a_damaged_part_is_refused_in_one_line_and_made_again_by_the_next_publisher(tmp_path: Path, damage: str) -> None:
    store = MemoryStore()
    fingerprints = published(store, tmp_path / "1", "a", "b", "c", "d")
    before = dict(store.objects)
    name = whole(store).parts[0]
    if damage == "lost":
        store.delete(name)
    else:
        store.write(name, b"x" * len(before[name]) if damage == "other bytes" else b"{}", if_absent=False)
    with pytest.raises(IntegrityError) as caught:
        read_index(store, INGREDIENTS)
    assert name in str(caught.value) and "Publish again" in str(caught.value) and "\n" not in str(caught.value)
    report = publish(tmp_path / "1", store)
    assert store.objects == before and sorted(restored(store)) == sorted(fingerprints)
    assert any("made again" in warning for warning in report.warnings)


@pytest.mark.usefixtures("few")
def test_commands_that_need_every_line_read_every_part(tmp_path: Path) -> None:
    store = MemoryStore()
    fingerprints = published(store, tmp_path / "1", "a", "b", "c", "d")
    matrix = read_matrix([store], takes=lambda key: True)
    assert sum(cell.entries for cell in matrix.cells) == 4 and not matrix.problems
    (made,) = compact(store, asked=Wanted())
    found = whole(store)
    assert made.entries == 4 and [len(bundle.manifests) for bundle in found.bundles] == [4]
    here = read_index(store, INGREDIENTS, environment=environment("90a"), asked=Wanted())
    assert here is not None and here.bundles == found.bundles
    export(store, tmp_path / "all.tar", asked=Wanted())
    other = MemoryStore()
    import_bundle(tmp_path / "all.tar", other)
    assert sorted(restored(other)) == sorted(fingerprints) and b"kcache.index/2" in other.objects[INDEX]


@pytest.mark.usefixtures("few")
def test_the_signature_of_the_index_vouches_for_its_parts(tmp_path: Path) -> None:
    store = MemoryStore()
    generate(str(tmp_path / "a.key"))
    key = load(str(tmp_path / "a.key"))
    text = f'format = "kcache.policy/1"\n[[key]]\nname = "a"\npublic = "{key.public.text}"\nroles = ["entries", "index"]\n'
    guard = Guard(parse_policy(f"{text}[index]\nthreshold = 1".encode(), "policy"), None)
    for name in ("a", "b", "c", "d"):
        make_entry(tmp_path / "1", {name: name.encode()}, kind=name)
    publish(tmp_path / "1", store, key=key, sign_index=IndexSigner(key, 1000).sign)
    found = read_index(store, INGREDIENTS, check=guard.check_index)
    assert found is not None and len(found.entries) == 4
    fewer = {**json.loads(store.objects[INDEX])}
    fewer["parts"].popitem()
    store.write(INDEX, json.dumps(fewer).encode(), if_absent=False)
    with pytest.raises(TrustError):
        read_index(store, INGREDIENTS, check=guard.check_index)


@pytest.mark.parametrize(
    "change",
    [{"parts": {}}, {"parts": {"0": ["x", 1]}}, {"parts": {"0": 1}}, {"parts": []}, {"buckets": 0}, {"archs": 3}, {"lines": "x"}],
)
def test_a_root_that_cannot_be_used_is_one_error(change: dict[str, object]) -> None:
    store, root = on_store([kernel(f"o/m{n}", "sm_90a") for n in range(PLAIN_LINES + 1)])
    store.write(INDEX, json.dumps({**root, **change}).encode(), if_absent=True)
    with pytest.raises(Exception, match="cannot be used") as caught:
        read_index(store, INGREDIENTS)
    assert type(caught.value).__name__ == "ManifestError"


def test_an_index_of_few_lines_stays_in_one_piece() -> None:
    lines = tuple(line(kernel("a/b", "sm_90a", n)) for n in range(PLAIN_LINES + 1))
    assert encode(Index(entries=lines[:-1]), DIRECTORY) == (Index(entries=lines[:-1]).encode(), {})
    data, parts = encode(Index(entries=lines), DIRECTORY)
    assert json.loads(data)["lines"] == PLAIN_LINES + 1 and parts
