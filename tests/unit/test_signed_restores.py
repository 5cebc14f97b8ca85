"""Signed entries through the real command line: what a policy lets in, and every attack on it that we could think of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from container import Container
from entries import make_fitting_entry
from hub.static import static_site

from kcache import digest
from kcache.errors import RefusedError, TrustError
from kcache.index import IndexEntry, index_path, parse_index
from kcache.local_cache import LocalCache
from kcache.manifest import Manifest
from kcache.report import RestoreReport
from kcache.store.file import FileStore
from kcache.store.wrappers import MetricsStore
from kcache.trust.keys import generate
from kcache.trust.policy import read_policy
from kcache.trust.statement import signature_path
from kcache.values import replace
from kcache.workflows.entrypoint import with_proof
from kcache.workflows.target import TargetRequest
from kcache.workflows.trusted import Guard, refused_entries

EXPIRED = "not_after = 2026-01-01T00:00:00Z"


class Farm:
    """A signed store with one entry, made once and copied by each test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.container = Container(home=root / "farm")
        self.container.home.mkdir(parents=True)
        self.keys = {name: generate(str(root / f"{name}.key")) for name in ("a", "b", "index")}
        self.manifest = make_fitting_entry(root / "out")
        self.store = root / "store"
        self.store.mkdir()
        self.publish(root / "out", "--sign", str(root / "a.key"), "--sign-index", str(root / "index.key"))

    def publish(self, entries: Path, *words: str) -> None:
        done = self.container.kcache("publish", str(entries), "--to", str(self.store), *words)
        assert done.code == 0, done.err

    def sign(self, store: Path, *words: str) -> str:
        done = self.container.kcache("sign", str(store), *words)
        assert done.code == 0, done.err
        return done.err


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    return Farm(tmp_path_factory.mktemp("signed"))


class Host:
    """A container with a policy, and its own copy of the farm's store."""

    def __init__(self, farm: Farm, home: Path) -> None:
        home.mkdir()
        self.farm = farm
        self.store = home.parent / "store"
        shutil.copytree(farm.store, self.store)
        self.policy_file = home.parent / "policy.toml"
        self.container = Container(home=home, environ={"KCACHE_POLICY": str(self.policy_file)})
        self.policy()

    def policy(self, key: str = "a", more: str = "", rest: str = "", first: str = "") -> None:
        text = (
            f'format = "kcache.policy/1"\n{first}\n[[key]]\nname = "{key}"\npublic = "{self.farm.keys[key].text}"\n{more}\n{rest}'
        )
        self.policy_file.write_text(text)

    def restore(self, *words: str) -> tuple[str, str]:
        """Status, and everything that was said."""
        done = self.container.restore(self.store, *words)
        return done.document["status"], done.out + done.err

    @property
    def index(self) -> Path:
        return self.store / index_path(self.farm.manifest.key.ingredients)

    @property
    def line(self) -> IndexEntry:
        return parse_index(self.index.read_bytes()).entries[0]

    def envelope(self, key: str = "a") -> Path:
        return self.store / signature_path(self.line.manifest.sha256, self.farm.keys[key].id)

    def swap(self, other: Manifest) -> None:
        """Makes the index name another manifest under the same key, with every digest right: what whoever can write may do."""
        document = json.loads(self.index.read_bytes())
        encoded = other.encode()
        line = document["entries"][0]
        line["manifest"] |= {"size": len(encoded), "sha256": digest.of_bytes(encoded)}
        (self.store / line["manifest"]["path"]).write_bytes(encoded)
        self.index.write_bytes(digest.canonical_json(document))


@pytest.fixture
def host(farm: Farm, tmp_path: Path) -> Host:
    return Host(farm, tmp_path / "home")


def test_a_signed_entry_is_restored_and_its_receipt_names_policy_and_key(host: Host, farm: Farm) -> None:
    assert host.restore()[0] == "hit"
    receipt = json.loads(next((host.container.home / ".cache/kcache/v1/entries").glob("*/receipt.json")).read_bytes())
    policy = digest.of_bytes(host.policy_file.read_bytes())
    assert receipt["vouched"] == {"policy": policy, "rule": "* required", "key": farm.keys["a"].id, "until": 0}


def test_the_statement_says_what_was_built_of_what_by_whom(host: Host, farm: Farm) -> None:
    import base64

    document = json.loads(host.envelope().read_bytes())
    statement = json.loads(base64.b64decode(document["payload"]))
    assert document["payloadType"] == "application/vnd.in-toto+json"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"][0]["name"] == farm.manifest.fingerprint
    build = statement["predicate"]["buildDefinition"]
    assert build["externalParameters"] == farm.manifest.key.to_json()
    assert {"uri", "digest"} <= set(build["resolvedDependencies"][1])
    assert statement["predicate"]["runDetails"]["builder"]["id"]


def unsigned(host: Host) -> None:
    host.envelope().unlink()


def signed_by_another_key(host: Host) -> None:
    host.farm.sign(host.store, "--key", str(host.farm.root / "b.key"), "--any")
    data = host.envelope("b").read_bytes()
    unsigned(host)
    host.envelope().write_bytes(data)


def foreign_signature_under_our_id(host: Host) -> None:
    signed_by_another_key(host)
    document = json.loads(host.envelope().read_bytes())
    document["signatures"][0]["keyid"] = host.farm.keys["a"].id
    host.envelope().write_bytes(json.dumps(document).encode())


def manifest_swapped(host: Host) -> None:
    from kcache.values import replace

    host.swap(replace(host.farm.manifest, provenance={"by": "an attacker"}))


def manifest_swapped_and_the_signature_moved(host: Host) -> None:
    data = host.envelope().read_bytes()
    manifest_swapped(host)
    host.envelope().parent.mkdir(exist_ok=True)
    host.envelope().write_bytes(data)


def signature_of_an_index(host: Host) -> None:
    data = host.store / signature_path(digest.of_bytes(host.index.read_bytes()), host.farm.keys["index"].id)
    host.envelope().write_bytes(data.read_bytes())


def envelope_truncated(host: Host) -> None:
    host.envelope().write_bytes(host.envelope().read_bytes()[:-10])


def envelope_with_an_algorithm(host: Host) -> None:
    document = json.loads(host.envelope().read_bytes())
    host.envelope().write_bytes(json.dumps(document | {"alg": "none"}).encode())


def envelope_huge(host: Host) -> None:
    host.envelope().write_bytes(b" " * (2 << 20))


def key_expired(host: Host) -> None:
    host.policy(more=EXPIRED)


def key_not_yet_valid(host: Host) -> None:
    host.policy(more="not_before = 2999-01-01T00:00:00Z")


def key_revoked(host: Host) -> None:
    host.policy(first=f'revoked = ["{host.farm.keys["a"].id}"]')


def entry_revoked(host: Host) -> None:
    host.policy(first=f'revoked = ["{host.farm.manifest.fingerprint}"]')


def manifest_revoked(host: Host) -> None:
    host.policy(first=f'revoked = ["{host.line.manifest.sha256}"]')


def key_for_another_kind(host: Host) -> None:
    host.policy(more='kinds = ["sampling"]')


def key_for_another_architecture(host: Host) -> None:
    host.policy(more='archs = ["120f"]')


def key_for_models_alone(host: Host) -> None:
    host.policy(more='models = ["Qwen/*"]')


def key_for_indexes_alone(host: Host) -> None:
    host.policy(more='roles = ["index"]')


def only_other_keys_for_this_store(host: Host) -> None:
    other = f'[[key]]\nname = "b"\npublic = "{host.farm.keys["b"].text}"\n[[store]]\nmatch = "*"\nkeys = ["b"]'
    host.policy(rest=other)


ATTACKS: dict[Callable[[Host], None], str] = {
    unsigned: "not signed by key a",
    signed_by_another_key: "not signed by key",
    foreign_signature_under_our_id: "wrong signature",
    manifest_swapped: "not signed by key a",
    manifest_swapped_and_the_signature_moved: "the signature of another entry",
    signature_of_an_index: "not signed by key",
    envelope_truncated: "not a JSON document",
    envelope_with_an_algorithm: "not an envelope",
    key_expired: "key a expired 2026-01-01",
    key_not_yet_valid: "counts from 2999",
    key_revoked: "key a is revoked",
    entry_revoked: "is revoked",
    manifest_revoked: "is revoked",
    key_for_another_kind: "may not publish kind modules",
    key_for_another_architecture: "may not publish architecture 90a",
    key_for_models_alone: "may not publish model (none)",
    key_for_indexes_alone: "no key may publish it",
    only_other_keys_for_this_store: "not signed by key b",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_entry_that_nobody_vouches_for_is_a_miss_with_its_reason(host: Host, attack: Callable[[Host], None]) -> None:
    attack(host)
    status, said = host.restore()
    assert status == "miss", said
    assert ATTACKS[attack] in said
    assert str(host.policy_file) in said
    assert not host.container.libraries


def test_an_archive_that_was_swapped_is_not_installed(host: Host) -> None:
    (host.store / host.line.archive.path).write_bytes(b"x" * host.line.archive.size)
    status, _ = host.restore()
    assert status == "error"
    assert not host.container.libraries


def test_an_envelope_without_end_is_not_read(host: Host) -> None:
    envelope_huge(host)
    status, said = host.restore()
    assert status == "error"
    assert "larger" in said


@pytest.mark.parametrize("text", ["", "format = 1", "[[key"], ids=["empty", "another format", "no TOML"])
def test_the_server_starts_whatever_is_wrong_with_the_policy(host: Host, text: str) -> None:
    host.policy_file.write_text(text)
    done = host.container.kcache("restore", "--from", str(host.store), "--arch", "9.0a", "--", "/usr/bin/touch", "reached")
    assert done.code == 0
    assert (host.container.home / "reached").exists()
    assert "policy" in done.err
    assert not host.container.libraries


def test_the_server_starts_where_an_entry_is_refused_and_lookup_says_why(host: Host) -> None:
    unsigned(host)
    words = ("--from", str(host.store), "--arch", "9.0a")
    done = host.container.kcache("restore", *words, "--", "/usr/bin/touch", "reached")
    assert (host.container.home / "reached").exists()
    assert "not signed by key a" in done.err
    found = host.container.kcache("lookup", *words, "--json")
    assert found.code == 10
    assert "not signed by key a" in found.out


def test_the_option_comes_before_the_variable(host: Host, tmp_path: Path) -> None:
    given = tmp_path / "other.toml"
    shutil.copy(host.policy_file, given)
    unsigned(host)
    given.write_text(given.read_text() + '[[store]]\nmatch = "*"\nsignatures = "none"\n')
    assert host.restore()[0] == "miss"
    assert host.restore("--policy", str(given))[0] == "hit"


def test_without_a_policy_nothing_is_asked_and_under_one_what_was_restored_before_is_refused_offline(host: Host) -> None:
    unsigned(host)
    assert host.container.kcache("restore", "--from", str(host.store), "--arch", "9.0a", env={"KCACHE_POLICY": ""}).code == 0
    assert host.container.libraries
    status, said = host.restore()
    assert status == "miss"
    assert "not signed by key a" in said
    host.store.rename(host.store.with_name("gone"))
    status, said = host.restore()
    assert status == "miss"
    assert "not signed by key a" in said


def test_a_changed_policy_is_applied_offline_to_what_is_in_place(host: Host) -> None:
    assert host.restore()[0] == "hit"
    host.store.rename(host.store.with_name("gone"))
    assert host.restore()[0] == "hit"
    host.policy(rest='[[store]]\nmatch = "nothing"\n')  # another policy, the same key: what was kept is verified again
    assert host.restore()[0] == "hit"
    key_revoked(host)
    assert host.restore()[0] == "miss"
    host.policy("b")
    assert host.restore()[0] == "miss"


def test_a_second_start_verifies_nothing_again(host: Host) -> None:
    assert host.restore()[0] == "hit"
    blocked = host.container.home / "blocked" / "cryptography"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('it was imported')")
    without = Container(home=host.container.home, environ=host.container.environ, site=(blocked.parent,))
    assert without.restore(host.store).document["status"] == "hit"
    host.policy(rest='[[store]]\nmatch = "nothing"\n')
    done = without.restore(host.store)
    assert done.document["status"] == "error"
    assert "pip install 'kcache[sign]'" in done.err


def test_keys_are_rotated_without_uploading_archives_again(host: Host, farm: Farm) -> None:
    archive = host.store / host.line.archive.path
    before = archive.stat()
    assert "signed 1 entries" in farm.sign(host.store, "--key", str(farm.root / "b.key"), "--policy", str(host.policy_file))
    assert "0 entries (1 were already)" in farm.sign(host.store, "--key", str(farm.root / "b.key"), "--any")
    after = archive.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    host.policy(more=EXPIRED, rest=f'[[key]]\nname = "b"\npublic = "{farm.keys["b"].text}"')
    assert host.restore()[0] == "hit"


def test_only_what_the_policy_lets_in_is_signed_with_the_next_key(host: Host, farm: Farm) -> None:
    unsigned(host)
    said = farm.sign(host.store, "--key", str(farm.root / "b.key"), "--policy", str(host.policy_file))
    assert "signed 0 entries" in said
    assert "not signed by key a" in said
    refused = farm.container.kcache("sign", str(host.store), "--key", str(farm.root / "b.key"))
    assert refused.code == 2
    assert "--policy" in refused.err


def test_publishing_signs_what_is_there_already_if_it_is_what_was_built(host: Host, farm: Farm) -> None:
    unsigned(host)
    words = ("publish", str(farm.root / "out"), "--to", str(host.store), "--sign", str(farm.root / "a.key"))
    assert "1 present" in farm.container.kcache(*words).err
    assert host.restore()[0] == "hit"


def test_an_entry_is_admitted_once_however_many_stores_are_asked(host: Host) -> None:
    guard = Guard(read_policy(str(host.policy_file)), None)
    first, second = MetricsStore(FileStore(host.store)), MetricsStore(FileStore(host.store))
    vouched = guard.admit(host.line, first)
    assert guard.admit(host.line, second) is vouched
    assert (sum(first.requests.values()), sum(second.requests.values())) == (1, 0)
    with pytest.raises(RefusedError):  # the same manifest, said to be of another archive
        guard.admit(replace(host.line, archive=replace(host.line.archive, sha256=f"sha256:{'0' * 64}")), second)


def test_verify_fails_where_the_policy_does_not_let_in_what_is_in_place(host: Host) -> None:
    """Under another policy than it was restored under, offline; nothing is asked of a GPU or FlashInfer for that."""
    assert host.restore()[0] == "hit"
    cache = LocalCache(host.container.home / ".cache/kcache")
    [present] = [cache.read("current", path.stem) for path in (cache.base / "current").glob("*.json")]
    assert refused_entries(cache, [present], read_policy(str(host.policy_file))) == []
    key_revoked(host)
    [line] = refused_entries(cache, [present, None], read_policy(str(host.policy_file)))
    assert "key a is revoked" in line
    where = TargetRequest(archs=("9.0a",))
    given = {**host.container.variables, "KCACHE_DIR": str(cache.root)}
    report = RestoreReport(status="hit", cache_root=str(cache.root), compiles_avoided=1)
    proven = with_proof(report, where, given)  # what an earlier restore placed counts for `restore --prove` too
    assert (proven.status, proven.proof and proven.proof["refused"]) == ("error", [line])
    assert "key a is revoked" in proven.reasons[0]
    done = host.container.kcache("verify", "--arch", "9.0a", "--json")
    assert (done.code, done.document["status"]) == (12, "failed"), done.err
    assert done.document["refused"] == [line]


# Indexes.


def signed_indexes(host: Host, more: str = "") -> None:
    key = f'[[key]]\nname = "index"\npublic = "{host.farm.keys["index"].text}"\nroles = ["index"]'
    host.policy(rest=f"{key}\n[index]\nthreshold = 1\n{more}")


def test_an_index_that_was_changed_or_is_not_signed_is_refused(host: Host) -> None:
    signed_indexes(host)
    assert host.restore()[0] == "hit"
    host.index.write_bytes(host.index.read_bytes() + b"\n")
    done = host.container.kcache("lookup", "--from", str(host.store), "--arch", "9.0a")
    assert done.code == 12
    assert "signed by 0 of the 1 keys" in done.err


@pytest.mark.parametrize(("answer", "said"), [("refuse", True), ("warn", True), ("ignore", False)])
def test_an_index_that_is_older_than_one_that_was_seen(host: Host, farm: Farm, answer: str, said: bool) -> None:
    signed_indexes(host, f'rollback = "{answer}"')
    old, signature = (
        host.index.read_bytes(),
        host.store / signature_path(digest.of_bytes(host.index.read_bytes()), farm.keys["index"].id),
    )
    old_signature = signature.read_bytes()
    farm.sign(host.store, "--index", "--key", str(farm.root / "index.key"))
    assert host.restore()[0] == "hit"
    signature.write_bytes(old_signature)
    assert host.index.read_bytes() == old
    _, told = host.restore()
    assert ("older than one that was seen here" in told) == said
    lines = list((host.container.home / ".cache/kcache/v1/indexes").glob("*.json"))
    assert len(lines) == 1


@pytest.mark.parametrize("answer", ["refuse", "warn", "ignore"])
def test_an_index_past_its_end(host: Host, farm: Farm, answer: str) -> None:
    signed_indexes(host, f'freeze = "{answer}"')
    farm.sign(host.store, "--index", "--key", str(farm.root / "index.key"), "--expires", "0s")

    status, said = host.restore()
    assert (status != "hit") == (answer == "refuse")
    assert ("has expired" in said) == (answer != "ignore")


@pytest.mark.parametrize(
    ("limit", "first", "why"),
    [
        ("", "", ""),
        (EXPIRED, "", "key index expired"),
        ("not_before = 2999-01-01T00:00:00Z", "", "counts from 2999"),
        ("", 'revoked = ["{id}"]', ""),
    ],
    ids=["good", "expired", "not yet", "revoked"],
)
def test_a_key_for_indexes_counts_between_its_dates_and_until_it_is_revoked(
    host: Host, farm: Farm, limit: str, first: str, why: str
) -> None:
    index = farm.keys["index"]
    key = f'[[key]]\nname = "index"\npublic = "{index.text}"\nroles = ["index"]\n{limit}\n'
    host.policy(first=first.format(id=index.id), rest=f"{key}[index]\nthreshold = 1\n")
    guard, path = Guard(read_policy(str(host.policy_file)), None), str(host.index.relative_to(host.store))
    if not limit and not first:
        assert guard.check_index(FileStore(host.store), path, host.index.read_bytes()) == []
        return
    with pytest.raises(TrustError, match="signed by 0 of the 1 keys") as caught:
        guard.check_index(FileStore(host.store), path, host.index.read_bytes())
    assert why in caught.value.why


def test_an_index_must_be_signed_by_as_many_keys_as_the_policy_says(host: Host, farm: Farm) -> None:
    both = "".join(f'[[key]]\nname = "{n}"\npublic = "{farm.keys[n].text}"\nroles = ["index"]\n' for n in ("index", "b"))
    host.policy(rest=f"{both}[index]\nthreshold = 2")
    assert host.restore()[0] != "hit"
    farm.sign(host.store, "--index", "--key", str(farm.root / "b.key"))
    assert host.restore()[0] == "hit"


def sign(host: Host) -> list[str]:
    return ["--sign", str(host.farm.root / "a.key")]


REWRITES: dict[str, Callable[[Host], list[str]]] = {
    "publish": lambda host: ["publish", str(host.farm.root / "two"), "--to", str(host.store), *sign(host)],
    "import": lambda host: ["import", str(host.farm.root / "two.tar"), "--to", str(host.store)],
    "compact": lambda host: ["compact", "--to", str(host.store)],
    "prune": lambda host: ["prune", "--in", str(host.store), "--version", "*", "--grace", "0s"],
}


@pytest.fixture(scope="module")
def more(farm: Farm) -> Farm:
    """Another entry for the farm's environment: built, in a bundle, and with the first one in a store of two."""
    make_fitting_entry(farm.root / "two", {"page": b"page" * 900}, kind="page")
    shutil.copytree(farm.store, farm.root / "both")
    signed = ("--sign", str(farm.root / "a.key"), "--sign-index", str(farm.root / "index.key"))
    for store, words in (("both", signed), ("other", signed[:2])):
        done = farm.container.kcache("publish", str(farm.root / "two"), "--to", str(farm.root / store), *words)
        assert done.code == 0, done.err
    done = farm.container.kcache("export", "--from", str(farm.root / "other"), "-o", str(farm.root / "two.tar"))
    assert done.code == 0, done.err
    return farm


def objects(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", REWRITES)
def test_what_rewrites_a_signed_index_signs_it_or_is_refused_before_anything_is_written(
    host: Host, more: Farm, command: str
) -> None:
    signed_indexes(host)
    if command in ("compact", "prune"):
        shutil.rmtree(host.store)
        shutil.copytree(more.root / "both", host.store)
    before, words = objects(host.store), REWRITES[command](host)
    refused = more.container.kcache(*words)
    assert refused.code == 12
    assert "--sign-index" in refused.err
    left = {name for name, data in objects(host.store).items() if before.get(name) != data}
    assert not [name for name in left if "/signatures/" not in name]  # the entry's own, which `import` brings
    done = more.container.kcache(*words, "--sign-index", str(more.root / "index.key"))
    assert done.code == 0, done.err
    status, said = host.restore()
    assert status == ("miss" if command == "prune" else "hit"), said
    assert "signed by 0" not in said


def test_a_signed_index_loses_its_signature_where_that_is_asked_for(host: Host, more: Farm) -> None:
    signed_indexes(host)
    assert more.container.kcache(*REWRITES["publish"](host), "--unsigned").code == 0
    assert "signed by 0 of the 1 keys" in host.restore()[1]


# Every kind of store.


def test_signatures_travel_through_a_bundle_and_a_mirror(host: Host, farm: Farm, tmp_path: Path) -> None:
    bundle, copy = tmp_path / "one.bundle", tmp_path / "copy"
    assert farm.container.kcache("export", "--from", str(host.store), "--output", str(bundle)).code == 0
    assert Container(home=tmp_path / "one", environ=host.container.environ).restore(bundle).document["status"] == "hit"
    assert farm.container.kcache("import", str(bundle), "--to", str(copy)).code == 0
    assert Container(home=tmp_path / "two", environ=host.container.environ).restore(copy).document["status"] == "hit"
    signed_indexes(host)
    three = Container(home=tmp_path / "three", environ=host.container.environ)
    assert "signed by 0 of the 1 keys" in three.restore(bundle).err
    words = ("--sign-index", str(farm.root / "index.key"))
    assert farm.container.kcache("export", "--from", str(host.store), "--output", str(bundle), *words).code == 0
    assert three.restore(bundle).document["status"] == "hit"
    host.policy()
    with static_site(copy) as url:
        there = Container(home=tmp_path / "four", environ=host.container.environ)
        done = there.kcache("restore", "--from", url, "--arch", "9.0a", "--json")
        assert done.document["status"] == "hit", done.err
