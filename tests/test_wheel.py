"""A wheel built from the sdist contains the whole package `fdjax` and nothing else."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist, and a wheel built from it and not from the checkout.

    .ci/run has built both already, from the same files.
    """
    if folder := os.environ.get("FDJAX_DIST"):
        return Path(folder)
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True)
    return out


@pytest.fixture(scope="module")
def wheel_files(built) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_installs_one_package(wheel_files):
    tops = {PurePosixPath(name).parts[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fdjax"}


@pytest.mark.parametrize("folder", ["fdjax", "models", "pallas_kernels"])
def test_wheel_holds_every_file(wheel_files, folder):
    """Modules and data. A missing embedded model or tuning table would show only at run time."""
    package = PurePosixPath("fdjax" if folder == "fdjax" else f"fdjax/{folder}")
    wanted = {
        str(package / path.relative_to(ROOT / folder).as_posix())
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.relative_to(ROOT / folder).parts[0] not in {"models", "pallas_kernels"}
    }
    wanted |= {f"{package}/__init__.py"}
    assert wanted <= wheel_files


def test_wheel_has_its_licence(wheel_files):
    assert any(name.endswith("/licenses/LICENSE") for name in wheel_files)


def test_sdist_has_no_links(built):
    """Links to places outside the package would break where links are not supported."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
