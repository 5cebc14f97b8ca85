"""Every command's --json is described by a schema, and what the real commands print is what it describes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from command_tree import COMMANDS
from container import Container
from entries import make_entry
from jsonschema import Draft202012Validator
from schemas import DIRECTORY, conforms

MANIFEST = Path(__file__).parents[2] / "manifests" / "qwen3-30b-a3b.toml"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Container:
    """A home with a store of two made-up entries for the FlashInfer that is installed here, and files about this host."""
    home = tmp_path_factory.mktemp("host")
    container = Container(home=home, environ={"KCACHE_DIR": str(home / "cache")})
    make_entry(home / "out", {"sampling": b"s" * 5000})
    make_entry(home / "out", {"page": b"p"}, kind="modules")
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "bad.toml").write_text("[model]\n")
    (home / "cache").mkdir(mode=0o700)
    return container


USES = [
    ("publish", "publish out --to store --dry-run", 0),
    ("publish", "publish out --to store", 0),
    ("publish", "publish out --to store", 0),
    ("export", "export --from store -o kernels.tar", 0),
    ("import", "import kernels.tar --to other", 0),
    ("compact", "compact --to store", 0),
    ("matrix", "matrix --from store", 0),
    ("keygen", "keygen farm.key", 0),
    ("sign", "sign store --key farm.key --any", 0),
    ("env", "env --arch 9.0a --save env.json", 0),
    ("env", "env --env env.json", 0),
    ("diff", "diff env.json --bump flashinfer=0.7.5 --from store", 0),
    ("diff", "diff env.json env.json", 0),
    ("lookup", "lookup --from store --env env.json", 10),
    ("restore", "restore --from store --arch 9.0a", 10),
    ("restore", "restore --from nowhere --arch 9.0a", 1),
    ("doctor", "doctor --arch 9.0a", 0),
    ("prune", "prune --dry-run", 0),
    ("prune", "prune --in store --dry-run --older-than 1d", 0),
    ("plan", f"plan --manifest {MANIFEST}", 0),
    ("manifest-check", f"manifest check {MANIFEST}", 0),
    ("manifest-check", "manifest check bad.toml", 2),
    ("manifest-from-config", "manifest from-config config.json", 0),
    ("error", "verify --arch 9.0a", 1),
    ("error", "lookup --bogus", 2),
]
"""Schema, command line and exit code, in this order: some use what others made."""


def test_what_commands_print_is_what_their_schemas_describe(host: Container) -> None:
    for schema, line, code in USES:
        done = host.kcache(*line.split(), "--json")
        assert done.code == code, f"{line}: {done.code} {done.err}"
        conforms(schema, done.document)


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if not isinstance(command, click.Group)])
def test_every_command_has_a_schema(path: str) -> None:
    name = path.removeprefix("kcache ").replace(" ", "-")
    file = DIRECTORY / f"{name}.json"
    assert file.is_file(), f"`{path} --json` has no schema: write {file.name} there, and a line in USES of this test."


@pytest.mark.parametrize("file", sorted(DIRECTORY.glob("*.json")), ids=lambda file: file.name)
def test_schemas_are_json_schema_2020_12(file: Path) -> None:
    schema = json.loads(file.read_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_a_field_that_no_schema_describes_is_seen() -> None:
    good = {"file": "a", "public": "b", "id": "c"}
    conforms("keygen", good)
    with pytest.raises(AssertionError, match="describe it"):
        conforms("keygen", {**good, "new": 1})
    with pytest.raises(AssertionError, match="describe it"):
        conforms("keygen", {"file": "a", "public": "b"})
