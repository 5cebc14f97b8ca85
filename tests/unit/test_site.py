"""The documentation as a site: links lead somewhere, every command is in its reference, nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from command_tree import COMMANDS

REPOSITORY = Path(__file__).parents[2]


def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    environ = {**os.environ, "KCACHE_SITE_PYTHON": sys.executable}
    command = [str(REPOSITORY / "ci" / "site"), str(tmp_path / "site")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr  # mkdocs --strict: a link or an anchor that leads nowhere is an error
    reference = (tmp_path / "site" / "commands.html").read_text()
    for name, found in COMMANDS.items():
        assert f'id="{name.replace(" ", "-")}"' in reference, name
        for option in (option for parameter in found.params for option in parameter.opts if option.startswith("--")):
            assert option in reference, (name, option)
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [address for address in loaded if "canonical" not in address], page
