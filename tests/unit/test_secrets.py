"""What is secret on a host is in nothing that kcache writes or says; and no home is in what is published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from container import REPOSITORY, Container
from entries import make_fitting_entry

from kcache.workflows.provenance import provenance, source

SECRETS = {
    "HF_TOKEN": "hf_plantedTokenOfTheHub",
    "HUGGING_FACE_HUB_TOKEN": "hf_plantedOlderToken",
    "AWS_SECRET_ACCESS_KEY": "plantedKeyOfACloud",
    "GITHUB_TOKEN": "ghp_plantedTokenOfAForge",
    "DATABASE_URL": "postgres://user:plantedPassword@host/db",
}


OFFER = """
import os, sys, time
from pathlib import Path
from kcache.warmup.keeping import LOG, keep_entries, offer_entries
kept = Path(sys.argv[2])
keep_entries(Path(sys.argv[1]), kept)
print(offer_entries(kept, [sys.argv[3]], os.environ))
while not (kept / LOG).exists() or "in " not in (kept / LOG).read_text():
    time.sleep(0.05)
print((kept / LOG).read_text())
"""
"""What a restore with `--keep` and `--publish-missing` does when its fallback has built something."""


def files(*roots: Path) -> list[Path]:
    return [path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()]


def test_planted_secrets_are_in_nothing_that_is_written_or_said(tmp_path: Path) -> None:
    home = tmp_path / "home-of-plantedUser"
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("hf_plantedTokenInAFile")
    (home / ".netrc").write_text("machine huggingface.co password plantedInNetrc")
    host = Container(home=home, environ=SECRETS)
    out, store, bundle = home / "out", tmp_path / "store", tmp_path / "one.bundle"
    make_fitting_entry(out)
    said = [host.kcache("-vv", "keygen", "farm.key", "--json")]
    private = (home / "farm.key").read_text().splitlines()[1]
    public = said[0].document["public"]
    (home / "policy.toml").write_text(f'format = "kcache.policy/1"\n[[key]]\nname = "farm"\npublic = "{public}"\n')
    said += [
        host.kcache("-vv", "publish", str(out), "--to", str(store), "--sign", "farm.key", "--sign-index", "farm.key", "--json"),
        host.kcache("-vv", "export", "--from", str(store), "--output", str(bundle)),
        host.kcache("-vv", "restore", "--from", str(store), "--arch", "9.0a", "--policy", "policy.toml", "--json"),
        host.kcache(
            "-vv", "restore", "--from", "hf://nobody/nothing", "--arch", "9.0a", env={"HF_ENDPOINT": "http://127.0.0.1:9"}
        ),
        host.kcache("-vv", "lookup", "--from", str(store), "--arch", "9.0a", "--policy", "policy.toml", "--json"),
        host.kcache("-vv", "doctor", "--arch", "9.0a"),
    ]
    manifest = str(REPOSITORY / "manifests" / "qwen3-30b-a3b.toml")
    server = ("/bin/true", "--api-key", "plantedApiKey")
    locked = "https://user:plantedInAddress@127.0.0.1:9/x?sig=plantedSignature"
    said += [
        host.kcache("-vv", "restore", "--from", str(store), "--from", locked, "--arch", "9.0a", "--", *server),
        host.kcache("-vv", "report", "--json", "--textfile", str(home / "kcache.prom")),
        host.kcache("-vv", "plan", "--manifest", manifest, "--missing-from", str(store), "--format", "k8s"),
        host.kcache("-vv", "lookup", "--from", locked.replace("https", "s3"), "--arch", "9.0a"),
        host.kcache("-vv", "lookup", "--from", locked, "--arch", "9.0a", "--json"),
        host.run([sys.executable, "-c", OFFER, str(out), str(home / "kept"), str(store)]),
    ]
    assert said[-5].document["server"] == ["/bin/true"] and said[-5].code == said[-1].code == 0, said[-5].err + said[-1].err
    assert said[1].code == said[2].code == said[3].code == 0, said[1].err + said[2].err + said[3].err
    written = [*files(store, home / ".cache" / "kcache", home / "kept"), bundle, home / "kcache.prom"]
    assert len(written) > 12
    texts = [path.read_bytes() for path in written] + [(done.out + done.err).encode() for done in said]
    secrets = [*SECRETS.values(), "plantedPassword", "hf_plantedTokenInAFile", "plantedInNetrc", private]
    secrets += ["plantedApiKey", "plantedInAddress", "plantedSignature"]
    found = [secret for secret in secrets for text in texts if secret.encode() in text]
    assert not found
    for path in files(store):
        assert b"plantedUser" not in path.read_bytes(), path


def test_provenance_names_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/planted")
    paths = ["/home/planted/x", "/home/plantedtoo"]
    facts = {"nvcc": "/home/planted/cuda/bin/nvcc", "wheels": {"a": "/home/planted"}, "all": paths, "n": 1}
    found = provenance(facts)
    assert found["nvcc"] == "~/cuda/bin/nvcc"
    assert found["wheels"] == {"a": "~"}
    assert found["all"] == ["~/x", "/home/plantedtoo"]
    assert found["n"] == 1


def test_provenance_says_which_source_made_it_and_whether_it_was_changed() -> None:
    if not (Path(__file__).parents[2] / ".git").exists():
        pytest.skip("not a checkout")
    found = source()
    if not found:
        pytest.skip("git is not to be had here")
    assert len(found["revision"]) == 40
    assert isinstance(found["dirty"], bool)
    assert provenance({})["source"] == found
