"""A moment of `ci/fuzz` in every run, and Hypothesis on the same targets."""

from __future__ import annotations

import random

import pytest
from faults.fuzz import TARGETS, attempt, mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache.errors import ManifestError


@pytest.mark.parametrize("name", TARGETS)
def test_changed_bytes_give_a_value_or_an_error_of_kcache(name: str) -> None:
    chance = random.Random(20261201)
    for _ in range(1500):
        attempt(name, mutated(name, chance))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=600))
def test_any_bytes_give_an_error_of_kcache(name: str, data: bytes) -> None:
    attempt(name, data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_good_bytes_are_taken(name: str) -> None:
    read, data = TARGETS[name]
    read(data)


@pytest.mark.parametrize("value", [b'"\\ud800"', b"1e999", b"NaN", b"-Infinity"])
@pytest.mark.parametrize("name", ["manifest", "index"])
def test_what_cannot_be_written_again_is_refused(name: str, value: bytes) -> None:
    """Found by fuzzing: it was taken, and failed where the document was hashed."""
    read, data = TARGETS[name]
    with pytest.raises(ManifestError, match="not a JSON document"):
        read(data.replace(b"{", b'{"more":' + value + b",", 1))
