"""What `--json` prints, held to the schemas in kcache/docs/schemas: more strictly than a reader would be, so that a field that
is not described there is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DIRECTORY = Path(__file__).parent.parent / "kcache" / "docs" / "schemas"


def closed(schema: Any) -> Any:
    """The schema, with no more fields allowed than it describes."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    if isinstance(found.get("properties"), dict) and "required" in found:
        found.setdefault("additionalProperties", False)
    return found


def conforms(command: str, document: Any) -> None:
    """Raises AssertionError where a document is not what the schema of the command (`manifest-check`) or `error` describes."""
    schema = json.loads((DIRECTORY / f"{command}.json").read_text())
    for error in Draft202012Validator(closed(schema)).iter_errors(document):
        where = "/".join(map(str, error.absolute_path)) or "the whole object"
        causes = "; ".join(cause.message[:300] for cause in error.context or ())
        raise AssertionError(f"{where}: {error.message[:300]} {causes}: describe it in kcache/docs/schemas/{command}.json")
