"""Gaps in the policy that would keep signed entries from being used here, or let in more than was meant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

from kcache.errors import TrustError
from kcache.trust.policy import ENTRIES, INDEXES, OPEN, Policy, find_policy, read_policy
from kcache.workflows.findings import ERROR, WARNING, Finding, Patient

SOON = 14 * 86400.0
"""Seconds before a key's end in which it is time to sign with the next one."""


def check_policy(patient: Patient) -> Iterator[Finding]:
    """The policy in force; a host without one has none to find fault with."""
    path = find_policy(None, patient.environ)
    if path is None:
        return
    try:
        policy = read_policy(path)
    except TrustError as error:
        what = error.what + (f": {error.why}" if error.why else "")
        remedy = error.remedy or "Mend it: until then nothing is restored."
        yield Finding(code="policy-unusable", severity=ERROR, what=what, remedy=remedy)
        return
    if find_spec("cryptography") is None:
        what = f"the policy {path} asks for signatures, and the package cryptography is not installed"
        yield Finding(code="policy-needs-cryptography", severity=ERROR, what=what, remedy="Run pip install 'kcache[sign]'.")
    yield from check_keys(policy, time.time())
    for rule in policy.stores:
        if rule.signatures == OPEN:
            what = f"the policy {path} asks for no signatures of stores that match {rule.match}"
            yield Finding(code="policy-open-store", severity=WARNING, what=what, remedy="Restrict who may write there.")


def check_keys(policy: Policy, now: float) -> Iterator[Finding]:
    """Keys that do not count, or soon will not. `now` in seconds since 1970."""
    counting: Counter[str] = Counter()
    for key in policy.keys:
        why = f"key {key.name} is revoked" if key.public.id in policy.revoked else key.unfit(now)
        if why:
            what = f"{why} (policy {policy.source})"
            yield Finding(code="policy-key-unfit", severity=WARNING, what=what, remedy="Take it out of the policy, or renew it.")
            continue
        counting.update(key.roles)
        if key.not_after - now < SOON:
            what = f"key {key.name} ends in {(key.not_after - now) / 86400:.0f} days (policy {policy.source})"
            remedy = "Add the next key, and sign with it: `kcache sign STORE --key FILE --policy FILE`."
            yield Finding(code="policy-key-ends", severity=WARNING, what=what, remedy=remedy)
    for role, needed in ((ENTRIES, 1), (INDEXES, policy.index.threshold)):
        if (found := counting[role]) >= needed:
            continue
        what = f"the policy {policy.source} has {found or 'no'} key for {role} that counts now"
        if needed > 1:
            what += f", and asks for signatures by {needed}"
        yield Finding(code="policy-no-key", severity=ERROR, what=what, remedy="Add one: `kcache keygen` prints its lines.")
