"""A FlashInfer that is not as kcache expects, or whose kernels do not compile: the installed one with one place of it changed.

Everything is real but that place. What a future version might change is told by name with what was asked for; a kernel that fails
or takes its process with it costs itself alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import small_manifest

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
        reason="FlashInfer and CuTe-DSL are not installed",
    ),
]

CORE = "flashinfer/jit/cute_dsl_core.py"
DISPATCH = "flashinfer/fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py"


def altered(site: Path, file: str, *changes: tuple[str, str]) -> Path:
    """The installed FlashInfer in `site`: links, but for one file, in which each first text has become the second."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    installed, here = Path(spec.origin).parents[1], site
    here.mkdir()
    for metadata in installed.glob("flashinfer_python-*.dist-info"):
        (here / metadata.name).symlink_to(metadata)
    for part in Path(file).parts[:-1]:
        installed, here = installed / part, here / part
        here.mkdir()
        for path in installed.iterdir():
            if path.name != "__pycache__" and not Path(file).is_relative_to((here / path.name).relative_to(site)):
                (here / path.name).symlink_to(path)
    text = (installed / Path(file).name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (site / file).write_text(text)
    return site


def build(tmp_path: Path, site: Path, *, maximum: int) -> subprocess.CompletedProcess[str]:
    """`kcache build` of a small model with this FlashInfer."""
    (tmp_path / "model.toml").write_text(small_manifest(maximum=maximum).replace("capture = [1]", "capture = [1, 2]"))
    words = ["build", "--manifest", str(tmp_path / "model.toml"), "-o", str(tmp_path / "out"), "--json"]
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "kcache", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        pytest.param(
            CORE,
            "def compile_and_persist(",
            "def compile_and_store(",
            "flashinfer.jit.cute_dsl_core.JitSpecCuteDsl has no compile_and_persist",
            id="its way to compile has another name",
        ),
        pytest.param(
            CORE,
            "source_sha256 = _hash_source_files(tuple(extra_key_files))",
            "source_sha256 = hashlib.sha256(repr(extra_key_files).encode()).hexdigest()",
            "is keyed on a digest that FlashInfer's _hash_source_files did not make",
            id="kernels are keyed by another rule",
        ),
        pytest.param(
            DISPATCH,
            "clear_sm120_moe_caches",
            "clear_moe_caches",
            "clear_sm120_moe_caches",
            id="the dispatch has another function",
        ),
    ],
)
def test_what_is_not_as_expected_is_told_with_what_was_asked_for(
    tmp_path: Path, file: str, old: str, new: str, told: str
) -> None:
    done = build(tmp_path, altered(tmp_path / "site", file, (old, new)), maximum=4)
    assert done.returncode not in (0, 2, 3)
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["what"] == "this FlashInfer's b12x MoE is not as kcache expects"
    assert told in error["why"]
    assert "asked for were nvfp4-tp1-ep1-wrapper at [1, 2, 4] tokens" in error["why"]


def test_a_kernel_that_fails_or_takes_its_process_with_it_costs_itself_alone(tmp_path: Path) -> None:
    before = (
        "def _fail(m):\n    import os\n    if m == 1:\n        raise RuntimeError('no registers')\n    m == 2 and os.abort()\n"
    )
    place = 'r{max_rows}", cache_key),\n        lambda: cute.compile('
    first = "\n_CUTE_DSL_MODULE ="
    changes = ((first, f"\n{before}{first}"), (place, place.replace("lambda: ", "lambda: _fail(m) or ")))
    done = build(tmp_path, altered(tmp_path / "site", DISPATCH, *changes), maximum=4)
    report = json.loads(done.stdout)
    assert (done.returncode, report["status"]) == (3, "partial"), done.stderr
    reasons = {module["module"].split("_")[1]: (module["status"], module["reason"]) for module in report["modules"]}
    assert reasons == {
        "m1": ("failed", "RuntimeError: no registers"),
        "m2": ("failed", "the process that did this ended with signal 6"),
        "m4": ("built", ""),
    }
    assert any("leaves _compact_topk_ids_kernel (triton) to warmup" in line for line in report["warnings"])
    (entry,) = report["entries"]
    manifest = json.loads(Path(entry["manifest"]).read_text())
    assert [artifact["path"].split("_")[2] for artifact in manifest["artifacts"]] == ["m4"]
