"""`kcache doctor` names every gap of the policy in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from container import Container

from kcache.probe.caches import cache_root
from kcache.probe.host import probe_host
from kcache.trust.policy import parse_policy
from kcache.workflows import doctor_trust
from kcache.workflows.doctor_trust import check_keys
from kcache.workflows.findings import Patient

PUBLIC = "ed25519:" + "A" * 43 + "="
KEY = f'[[key]]\nname = "a"\npublic = "{PUBLIC}"\n'


@pytest.mark.parametrize(
    ("more", "code", "severity"),
    [
        ("", "", ""),
        ("not_after = 2026-01-01T00:00:00Z", "policy-key-unfit", "warning"),
        ("not_after = 2026-01-01T00:00:00Z", "policy-no-key", "error"),
        ('[[store]]\nmatch = "/mnt/*"\nsignatures = "none"', "policy-open-store", "warning"),
        ("[store", "policy-unusable", "error"),
        ("no_such_word = 1", "policy-unusable", "error"),
    ],
)
def test_a_gap_of_the_policy_is_a_finding_with_its_remedy(tmp_path: Path, more: str, code: str, severity: str) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'format = "kcache.policy/1"\n{KEY}{more}\n')
    host = Container(home=tmp_path / "home", environ={"KCACHE_POLICY": str(policy)})
    done = host.kcache("doctor", "--arch", "9.0a", "--json")
    found = {finding["code"]: finding for finding in done.document["findings"] if finding["code"].startswith("policy-")}
    if not code:
        assert not found
        return
    assert found[code]["severity"] == severity
    assert found[code]["remedy"]
    assert done.code == (1 if any(finding["severity"] == "error" for finding in done.document["findings"]) else 0)


def test_too_few_keys_for_indexes_and_no_library_for_signatures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "ed25519:" + "B" * 42 + "A="
    ended = f'[[key]]\nname = "b"\npublic = "{other}"\nroles = ["index"]\nnot_after = 2026-01-01T00:00:00Z\n'
    text = f'format = "kcache.policy/1"\n{KEY}roles = ["entries", "index"]\n{ended}[index]\nthreshold = 2\n'
    (tmp_path / "policy.toml").write_text(text)
    found = {one.code: one for one in check_keys(parse_policy(text.encode(), "it"), 1769904000)}
    assert "has 1 key for index that counts now, and asks for signatures by 2" in found["policy-no-key"].what
    monkeypatch.setattr(doctor_trust, "find_spec", lambda name: None)
    environ = {"KCACHE_POLICY": str(tmp_path / "policy.toml"), "HOME": str(tmp_path)}
    host = probe_host(python=None, described_archs=["9.0a"], environ=environ)
    codes = [one.code for one in doctor_trust.check_policy(Patient(host=host, cache=cache_root(environ, 0), environ=environ))]
    assert "policy-needs-cryptography" in codes


def test_a_key_that_ends_soon_is_named(tmp_path: Path) -> None:
    policy = parse_policy(f'format = "kcache.policy/1"\n{KEY}not_after = 2026-02-01T00:00:00Z'.encode(), "it")
    assert [finding.code for finding in check_keys(policy, 1769904000 - 86400)] == ["policy-key-ends"]
    assert not list(check_keys(policy, 1769904000 - 40 * 86400))
