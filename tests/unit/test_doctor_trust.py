"""`kcache doctor` names every gap of the policy in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from container import Container

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


def test_a_key_that_ends_soon_is_named(tmp_path: Path) -> None:
    from kcache.trust.policy import parse_policy
    from kcache.workflows.doctor_trust import check_keys

    policy = parse_policy(f'format = "kcache.policy/1"\n{KEY}not_after = 2026-02-01T00:00:00Z'.encode(), "it")
    assert [finding.code for finding in check_keys(policy, 1769904000 - 86400)] == ["policy-key-ends"]
    assert not list(check_keys(policy, 1769904000 - 40 * 86400))
