"""The built wheel holds the three packages and works where nothing else of the checkout is."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("replayssm_jax", "pallas_kernels", "models")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the checkout with the build backend of this environment."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """The bin folder of a new environment with the wheel; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    # A .pth below another folder is not read, so an editable install in this environment stays out of sight.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(command, folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), check=True, cwd=folder, env=environment, capture_output=True, text=True
    ).stdout


def test_contents(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = "replayssm_jax-0.1.0.dist-info/"
    expected |= {info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    expected |= {info + "licenses/LICENSE"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names == expected
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info.rstrip("/")}
    assert wheel.stat().st_size < 20_000_000


def test_imports_come_from_the_wheel(elsewhere, tmp_path):
    program = "import replayssm_jax, models, pallas_kernels; print(models.__file__)"
    place = run([elsewhere / "python", "-c", program], tmp_path)
    assert Path(place.strip()).is_relative_to(elsewhere.parent)
    missing = "import importlib.util as u; print([u.find_spec(name) for name in ('bench', 'tests')])"
    assert run([elsewhere / "python", "-c", missing], tmp_path).strip() == "[None, None]"


def test_generates_with_the_embedded_checkpoint(elsewhere, tmp_path):
    command = [elsewhere / "replayssm", "generate", "--prompt", "KING HENRY.", "--max-new-tokens", "16"]
    result = json.loads(run([*command, "--json"], tmp_path))
    assert len(json.dumps(result)) > 50
    # Nothing was written where it ran.
    assert list(tmp_path.iterdir()) == []
