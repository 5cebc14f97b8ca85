"""Each line of the threat model names tests that exist, and the documents name options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kcache.trust.policy import parse_policy

ROOT = Path(__file__).parents[2]


def rows() -> list[str]:
    text = (ROOT / "kcache/docs/design.md").read_text()
    section = text[text.index("## Threat model") : text.index("Not defended:")]
    return [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| attacker")]


def test_each_line_of_the_threat_model_is_held_by_tests_that_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows()) > 10
    for row in rows():
        named = re.findall(r"`(test_\w+)`", row.rstrip("| ").rpartition("|")[2])
        assert named, row
        assert [name for name in named if f"def {name}(" not in sources] == []


def test_the_policy_that_is_shown_is_a_policy() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    shown = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert len(shown) == 1
    public = "ed25519:" + "A" * 43 + "="
    policy = parse_policy(shown[0].replace("ed25519:...", public).encode(), "SECURITY.md")
    assert policy.rule("hf://owner/repo").keys == ("farm-2026",)


@pytest.mark.parametrize("option", ["--sign", "--sign-index", "--expires", "--policy", "--index", "--key"])
def test_options_that_are_named_exist(option: str) -> None:
    sources = "".join((ROOT / "kcache/cli" / f"{name}.py").read_text() for name in ("publish", "sign", "options"))
    assert f'"{option}"' in sources
