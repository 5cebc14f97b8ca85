"""The examples are what their tools accept, and their kcache command lines are what kcache accepts."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from kcache.cli.group import app
from kcache.cli.quick import parse

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTRUCTIONS = {"FROM", "COPY", "RUN", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}


def dockerfile() -> list[tuple[str, str]]:
    lines = [line for line in (EXAMPLES / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def pod() -> dict[str, Any]:
    (deployment,) = (document for document in documents() if document["kind"] == "Deployment")
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Where a line of kcache stands, and its words."""
    exec_form = [json.loads(text) for name, text in dockerfile() if name in ("ENTRYPOINT", "CMD")]
    yield "Dockerfile", [word for words in exec_form for word in words]
    yield "ray_serve.py", shlex.split(runpy.run_path(str(EXAMPLES / "ray_serve.py"))["RESTORING_PYTHON"])
    for container in [*pod()["initContainers"], *pod()["containers"]]:
        yield f"kubernetes.yaml {container['name']}", shlex.split(" ".join(container["args"]))
    text = (EXAMPLES / "slurm.sh").read_text().replace("\\\n", " ")
    for line in re.findall(r"kcache restore .*|kcache report [^>]*", text):
        yield "slurm.sh", shlex.split(line)
    for line in re.findall(r"^# RUN (kcache .*)", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE):
        yield "Dockerfile, built in", shlex.split(line)


@pytest.mark.parametrize(("where", "words"), list(command_lines()), ids=[where for where, _ in command_lines()])
def test_its_command_line_is_one_of_kcaches(where: str, words: list[str]) -> None:
    words = words[words.index("kcache") + 1 :]
    words = words[: next((place for place, word in enumerate(words) if word in ("||", "done") or word.endswith(";")), len(words))]
    if "restore" in words:
        assert parse(words, {}) is not None, where
        return
    words = [word for word in words if word not in ("-q", ">", "/dev/null")]
    command = app.get_command(click.Context(app), words[0])
    assert command is not None, where
    command.make_context(words[0], words[1:])


def test_the_dockerfile_has_instructions_that_docker_knows() -> None:
    lines = dockerfile()
    assert {name for name, _ in lines} == INSTRUCTIONS
    assert lines[0][0] == "FROM"
    for name, text in lines:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(text))


def test_kubernetes_accepts_the_manifests() -> None:
    for document in documents():
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_the_init_container_and_the_server_share_the_cache_and_the_image() -> None:
    restore, server = pod()["initContainers"][0], pod()["containers"][0]
    for name in ("image", "env", "volumeMounts", "resources"):
        assert restore[name] == server[name]
    volumes = {volume["name"] for volume in pod()["volumes"]}
    mounted = {mount["name"] for container in pod()["containers"] for mount in container["volumeMounts"]}
    assert mounted == volumes


def test_the_scripts_of_kubernetes_and_slurm_are_shell() -> None:
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=False).returncode == 0
    for container in [*pod()["initContainers"], *pod()["containers"]]:
        assert subprocess.run(["sh", "-n", "-c", " ".join(container["args"])], check=False).returncode == 0
