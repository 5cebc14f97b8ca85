"""What `kcache.probe.packages` reads is what Python and the installers say."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kcache.errors import ProbeError
from kcache.key import ABSENT
from kcache.probe import packages

UV = shutil.which("uv")


def make_wheel(folder: Path, *, version: str = "1.2.3", body: str = "VALUE = 1\n") -> Path:
    """A small wheel with a module, data, headers and an entry point: everything that installers treat in ways of their own."""
    info, data = f"small_thing-{version}.dist-info", f"small_thing-{version}.data"
    files = {
        "small_thing/__init__.py": body,
        "small_thing/lib/thing.txt": "text, with a comma\n",
        f"{data}/data/share/small/readme.txt": "data\n",
        f"{data}/scripts/small-script": "#!python\nprint(1)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: Small.Thing\nVersion: {version}\n\nVersion: 9.9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nsmall = small_thing:main\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}")
    wheel = folder / f"small_thing-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return wheel


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=300)


def venv(folder: Path, *, pip: bool = True) -> Path:
    run(sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), folder)
    return folder / "bin" / "python"


def installed(python: Path) -> packages.Packages:
    return packages.scan(packages.interpreter_at(str(python), os.environ).search_path)


def content(python: Path) -> str:
    distribution = installed(python).distribution("small-thing")
    assert distribution is not None
    fact = packages.content_digest(distribution)
    assert fact.known, fact.describe()
    return str(fact.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def pip_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return venv(tmp_path_factory.mktemp("pip") / "venv")


def pip_install(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall", *arguments)


def test_versions_and_names_are_those_of_importlib_metadata() -> None:
    found = packages.scan(sys.path)
    expected: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        expected.setdefault(packages.normalise(distribution.metadata["Name"]), distribution.version)
    assert set(found.names()) == set(expected)
    for name, version in expected.items():
        distribution_here = found.distribution(name)
        assert distribution_here is not None
        assert distribution_here.version == version, name


def test_this_interpreter_says_what_sysconfig_says() -> None:
    interpreter = packages.this_interpreter()
    assert interpreter.abi == sysconfig.get_config_var("SOABI")
    assert interpreter.cache_tag == sys.implementation.cache_tag
    assert interpreter.executable == sys.executable
    assert "" not in interpreter.search_path


def test_another_python_answers_for_itself_even_when_a_pth_file_prints(tmp_path: Path) -> None:
    python = venv(tmp_path / "venv", pip=False)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    write(site / "noise.pth", "import sys; print('{\"noise\": 1}')\n")
    interpreter = packages.interpreter_at(str(python), os.environ)
    assert str(site) in interpreter.search_path
    assert interpreter.executable == str(python)
    assert (interpreter.abi, interpreter.libc) == (packages.this_interpreter().abi, packages.this_interpreter().libc)


def test_the_search_path_of_another_python_follows_the_environment_given(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "first")}
    assert str(tmp_path / "first") in packages.interpreter_at(sys.executable, environ).search_path
    assert str(tmp_path / "first") not in packages.interpreter_at(sys.executable, os.environ).search_path


@pytest.mark.parametrize("script", ["exit 3", "echo no json", 'echo "[]"'])
def test_a_python_that_cannot_be_asked_is_an_error_with_a_remedy(tmp_path: Path, script: str) -> None:
    path = write(tmp_path / "python", f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    for python in (str(path), str(tmp_path / "missing")):
        with pytest.raises(ProbeError) as caught:
            packages.interpreter_at(python, os.environ)
        assert python in caught.value.what
        assert "--python" in caught.value.remedy


def test_first_on_the_path_wins(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"{number}" / f"thing-{number}.0.dist-info" / "METADATA", f"Name: Thing\nVersion: {number}.0\n\n")
        write(tmp_path / f"{number}" / "thing" / "__init__.py", "")
    found = packages.scan([str(tmp_path / "missing"), str(tmp_path / "2"), str(tmp_path / "1")])
    distribution = found.distribution("THING")
    assert distribution is not None
    assert distribution.version == "2.0"
    assert found.package("thing") == str(tmp_path / "2" / "thing")
    assert found.distribution("other") is None
    assert found.package("other") is None


def test_a_directory_without_init_counts_last(tmp_path: Path) -> None:
    (tmp_path / "a" / "thing").mkdir(parents=True)
    write(tmp_path / "b" / "thing" / "__init__.py", "")
    assert packages.scan([str(tmp_path / "a"), str(tmp_path / "b")]).package("thing") == str(tmp_path / "b" / "thing")
    assert packages.scan([str(tmp_path / "a")]).package("thing") == str(tmp_path / "a" / "thing")


def test_a_version_in_the_description_is_not_the_version(tmp_path: Path) -> None:
    write(tmp_path / "thing-1.5.dist-info" / "METADATA", "Name: thing\n\nVersion: 9.9\n")
    distribution = packages.scan([str(tmp_path)]).distribution("thing")
    assert distribution is not None
    assert distribution.version == "1.5"


def test_the_directory_name_serves_where_there_is_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "Old_Thing-1.5+cu130.dist-info").mkdir()
    distribution = packages.scan([str(tmp_path)]).distribution("old-thing")
    assert distribution is not None
    assert distribution.version == "1.5+cu130"


@pytest.mark.parametrize("layout", ["flat", "src"])
def test_an_editable_install_of_pip_is_followed(pip_python: Path, tmp_path: Path, layout: str) -> None:
    root = tmp_path / "project"
    inner = root if layout == "flat" else root / "src"
    write(inner / "editable_thing" / "__init__.py", "")
    where = "" if layout == "flat" else 'package-dir = {"" = "src"}\n'
    write(
        root / "pyproject.toml",
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "editable-thing"\nversion = "4.5"\n[tool.setuptools]\npackages = ["editable_thing"]\n{where}',
    )
    # The build back end comes from the environment of this test: nothing is fetched.
    backend = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))}
    command = [str(pip_python), "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "-e", str(root)]
    subprocess.run(command, env=backend, check=True, capture_output=True, timeout=300)
    found = installed(pip_python)
    distribution = found.distribution("editable_thing")
    assert distribution is not None
    assert distribution.version == "4.5"
    assert found.package("editable_thing") == str(inner / "editable_thing")
    assert "editable" in packages.content_digest(distribution).undetermined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('__version__ = "0.7.4"\n', "0.7.4"),
        ("__version__ = version = '0.1.15.post2'\n", "0.1.15.post2"),
        ("__version__: str\nversion: str\n__version__ = version = '1.0'\n", "1.0"),
        ("__version__: str = '2.0'\n", "2.0"),
        ("__version__ = make()\n", None),
        ("if x:\n    __version__ = '1'\n", None),
        ("x__version__ = '1'\n", None),
    ],
)
def test_an_assigned_text_is_read_without_running_the_file(tmp_path: Path, text: str, expected: str | None) -> None:
    assert packages.assigned_text(str(write(tmp_path / "v.py", text)), "__version__") == expected


def test_flashinfer_without_build_meta_has_no_version(tmp_path: Path) -> None:
    write(tmp_path / "flashinfer" / "__init__.py", "")
    facts = packages.flashinfer_facts(str(tmp_path / "flashinfer"))
    assert "_build_meta.py" in facts["flashinfer.version"].undetermined
    write(tmp_path / "flashinfer" / "_build_meta.py", '__version__ = "0.0.0+unknown"\n')
    assert packages.flashinfer_facts(str(tmp_path / "flashinfer"))["flashinfer.version"].undetermined
    assert packages.flashinfer_facts(None)["flashinfer.version"] == ABSENT


def test_the_old_name_of_the_commit_is_understood(tmp_path: Path) -> None:
    write(tmp_path / "_build_meta.py", '__version__ = "0.6.0"\n__git_version__ = "abc"\n')
    facts = packages.flashinfer_facts(str(tmp_path))
    assert (facts["flashinfer.version"].value, facts["flashinfer.commit"].value) == ("0.6.0", "abc")


def test_a_cpu_build_of_torch_has_no_cuda_and_a_cuda_build_has(tmp_path: Path) -> None:
    text = "__version__ = '2.13.0{0}'\ndebug = False\ncuda: Optional[str] = {1}\nhip: Optional[str] = None\n"
    write(tmp_path / "version.py", text.format("+cpu", "None"))
    assert packages.torch_facts(str(tmp_path))["torch.cuda"] == ABSENT
    write(tmp_path / "version.py", text.format("", "'13.0'"))
    assert packages.torch_facts(str(tmp_path))["torch.cuda"].value == "13.0"
    assert packages.torch_facts(str(tmp_path / "none"))["torch.version"].undetermined


def test_pip_and_uv_agree_on_the_content_of_one_wheel(pip_python: Path, tmp_path: Path) -> None:
    if UV is None:
        pytest.skip("no uv on PATH")
    wheel = make_wheel(tmp_path)
    pip_install(pip_python, wheel)
    other = venv(tmp_path / "uv", pip=False)
    run(UV, "pip", "install", "--offline", "--no-deps", "--python", other, wheel)
    one, two = installed(pip_python).distribution("small-thing"), installed(other).distribution("small-thing")
    assert one is not None
    assert two is not None
    assert Path(one.metadata, "RECORD").read_text() != Path(two.metadata, "RECORD").read_text()
    assert content(pip_python) == content(other)


def test_content_ignores_byte_code_layout_and_the_installer(pip_python: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    pip_install(pip_python, "--no-compile", wheel)
    plain = content(pip_python)
    pip_install(pip_python, "--compile", wheel)
    assert content(pip_python) == plain
    run(pip_python, "-m", "pip", "install", "--no-index", "--no-deps", "--target", tmp_path / "target", wheel)
    distribution = packages.scan([str(tmp_path / "target")]).distribution("small-thing")
    assert distribution is not None
    assert packages.content_digest(distribution).value == plain


def test_content_sees_one_changed_byte_of_a_wheel(pip_python: Path, tmp_path: Path) -> None:
    pip_install(pip_python, make_wheel(tmp_path))
    before = content(pip_python)
    pip_install(pip_python, make_wheel(tmp_path, body="VALUE = 2\n"))
    assert content(pip_python) != before


def test_without_record_the_content_could_not_be_found_out(tmp_path: Path) -> None:
    (tmp_path / "thing-1.dist-info").mkdir()
    distribution = packages.scan([str(tmp_path)]).distribution("thing")
    assert distribution is not None
    assert "RECORD" in packages.content_digest(distribution).undetermined


@pytest.mark.real
def test_versions_are_what_the_libraries_call_themselves() -> None:
    script = (
        "import json, flashinfer, tvm_ffi, torch\n"
        "print(json.dumps([flashinfer.__version__, flashinfer.version.__git_commit__, tvm_ffi.__version__,"
        " torch.__version__, torch.version.cuda, flashinfer.__path__[0]]))"
    )
    environ = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True, timeout=300)
    version, commit, tvm_ffi, torch, cuda, path = json.loads(done.stdout.splitlines()[-1])
    found = packages.scan(packages.this_interpreter().search_path)
    facts = {**packages.flashinfer_facts(found.package("flashinfer")), **packages.torch_facts(found.package("torch"))}
    assert facts["flashinfer.version"].value == version
    assert facts["flashinfer.commit"].value == commit
    assert packages.tvm_ffi_version(found).value == tvm_ffi
    assert (facts["torch.version"].value, facts["torch.cuda"].value) == (torch, cuda)
    assert found.package("flashinfer") == path
