"""Choices of the package b12x: b12x's own selection cache reads what kcache collected, published, restored and merged.

They are measured on a GPU; here b12x itself writes them for a GPU that is described, and reads them for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from container import REPOSITORY, Container

from kcache.gpu_products import product
from kcache.kinds.b12x_selections import Selections, collect_selections, identity_of, install_selections

SITE = tuple(Path(part) for part in os.environ.get("KCACHE_TEST_B12X", "").split(os.pathsep) if part)
"""Directories that hold b12x 1.5.1 and Triton: ci/other-versions makes them."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SITE, reason="KCACHE_TEST_B12X does not say where b12x and Triton are (ci/other-versions)"),
]

GPU = product("rtx-pro-6000")
CHILDREN = REPOSITORY / "kcache" / "probe" / "children"
CACHE = ".cache/b12x/compile"

_SELECT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import described_gpu
gpu = json.loads(sys.argv[2])
described_gpu.install(gpu, "13.0")
from contextlib import contextmanager
import torch
@contextmanager
def scope(device):
    yield
torch.cuda.device = scope
from b12x.preparation._cache import SelectionCache, cache_identity
cache = SelectionCache(sys.argv[3], cache_identity({}, 0))
coverage = {"cartesian_count": 3, "legal_count": 3, "effective_count": 2, "measured_count": 2}
if len(sys.argv) > 4:
    from b12x._lib.compile_plan import ProgramKey
    cache.save(sys.argv[4], assignment={"backend": "micro"}, config={"backend": "micro"}, coverage=coverage,
               programs=[ProgramKey("cute", "ab" * 32)])
print(json.dumps({"identity": cache.identity, "path": str(cache.path), "records": cache.records}))
"""


def select(directory: Path, name: str, *words: str) -> dict[str, Any]:
    """What b12x's own selection cache says on a GPU of this product name."""
    gpu = GPU.describe() | {"name": name}
    command = [sys.executable, "-c", _SELECT, str(CHILDREN), json.dumps(gpu), str(directory), *words]
    directory.mkdir(parents=True, exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(directory), "PYTHONPATH": os.pathsep.join(map(str, SITE))}
    done = subprocess.run(command, env=environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_two_product_names_of_one_chip_share_selections(tmp_path: Path) -> None:
    """Case B37, and that b12x reads back what kcache merged."""
    said = select(tmp_path / "a", GPU.name, "first")
    identity = identity_of(GPU.capability, GPU.sm_count, {})
    assert said["identity"] == identity
    (found,), left_out = collect_selections(tmp_path / "a")
    assert not left_out
    assert found == Selections(identity=identity, records=said["records"])
    assert Path(said["path"]).name == found.name
    select(tmp_path / "b", GPU.aliases[0], "second")
    assert install_selections(tmp_path / "b", found, timeout=10).added == ("first",)
    there = select(tmp_path / "b", GPU.aliases[1])
    assert set(there["records"]) == {"first", "second"}
    assert Path(there["path"]).name == found.name


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local store with one choice that b12x wrote on a farm; collected by the name of b12x's compile cache."""
    top = tmp_path_factory.mktemp("choices")
    farm = Container(home=top / "farm", site=SITE)
    select(farm.home / CACHE / "preparation", GPU.name, "first")
    collect = ("build", "--collect", str(farm.home / CACHE), "-o", str(top / "entries"), "--json")
    built = farm.kcache(*collect, "--gpu", GPU.slug)
    assert built.code == 0, built.err
    (entry,) = built.document["entries"]
    assert (entry["kind"], entry["status"]) == ("autotune", "built")
    assert entry["variant"].startswith("b12x-")
    elsewhere = farm.kcache(*collect, "--gpu", "rtx-5090")
    assert elsewhere.code != 0
    assert "sm_count" in elsewhere.err
    published = farm.kcache("publish", str(top / "entries"), "--to", str(top / "store"))
    assert published.code == 0, published.err
    return top / "store"


def restore(container: Container, store: Path, gpu: str = GPU.slug) -> tuple[int, dict[str, Any]]:
    done = container.kcache("restore", "--from", str(store), "--gpu", gpu, "--json")
    assert done.out, done.err
    return done.code, done.document


def test_choices_of_a_farm_are_read_by_b12x_elsewhere_and_the_servers_own_stay(published: Path, tmp_path: Path) -> None:
    container = Container(home=tmp_path / "home", site=SITE)
    place = container.home / CACHE / "preparation"
    select(place, GPU.aliases[0], "second")
    code, said = restore(container, published)
    assert (code, said["kinds"]["autotune"]["entries"][0]["action"]) == (0, "installed"), said
    assert set(select(place, GPU.aliases[1])["records"]) == {"first", "second"}
    again = restore(container, published)[1]
    assert again["kinds"]["autotune"]["entries"][0]["action"] == "in-place"
    next(place.glob("*.json")).unlink()
    assert restore(container, published)[1]["kinds"]["autotune"]["entries"][0]["action"] == "installed"
    assert set(select(place, GPU.name)["records"]) == {"first"}


def test_choices_are_refused_for_another_package_gpu_or_tuning_version(published: Path, tmp_path: Path) -> None:
    """b12x raises on a choice that it does not allow: its server would not start."""
    package = next(part for part in SITE if (part / "b12x" / "_lib").is_dir())
    shutil.copytree(package / "b12x", tmp_path / "site" / "b12x", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "site" / "b12x" / "moe" / "__init__.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    other = Container(home=tmp_path / "other", site=(tmp_path / "site", *SITE))
    version = Container(home=tmp_path / "version", site=SITE, environ={"B12X_TUNING_CACHE_VERSION": "2"})
    here = Container(home=tmp_path / "here", site=SITE)
    for container, gpu, field in (
        (other, GPU.slug, "b12x.package"),
        (version, GPU.slug, "selections.tuning_cache_version"),
        (here, "rtx-5090", "gpu.sm_count"),
    ):
        code, said = restore(container, published, gpu)
        assert code == 10
        assert field in json.dumps(said), said
        assert not (container.home / ".cache/b12x").exists()


def test_a_file_that_b12x_refuses_is_an_error_and_stays_as_it_is(published: Path, tmp_path: Path) -> None:
    container = Container(home=tmp_path / "home", site=SITE)
    assert restore(container, published)[0] == 0
    (file,) = (container.home / CACHE / "preparation").glob("*.json")
    file.write_text("{}")
    done = container.kcache("restore", "--from", str(published), "--gpu", GPU.slug, "--", "/bin/echo", "started")
    assert done.out == "started\n"
    assert "selection cache" in done.err
    assert file.read_text() == "{}"


def test_choices_that_a_program_measured_are_recorded(tmp_path: Path) -> None:
    """`kcache build --record`: they are what `--collect` takes, and a file that b12x would refuse is left out."""
    container = Container(home=tmp_path / "home", site=SITE)
    run = f'{sys.executable} -c "$1" {CHILDREN} "$2"'
    script = f'd=$B12X_COMPILE_CACHE_DIR/preparation; /bin/mkdir -p $d; echo "{{}}" >$d/bad.json; {run} $d first'
    words = ("build", "--record", "-o", str(tmp_path / "entries"), "--gpu", GPU.slug, "--json")
    done = container.kcache(*words, "--", "/bin/sh", "-c", script, "sh", _SELECT, json.dumps(GPU.describe()))
    assert done.document["program"]["exit_code"] == 0, done.err
    (entry,) = done.document["entries"]
    assert (entry["kind"], entry["status"], entry["variant"][:5]) == ("autotune", "built", "b12x-")
    (left,) = done.document["left_out"]
    assert (left["kind"], left["name"], left["failed"]) == ("b12x-selections", "bad.json", True)
