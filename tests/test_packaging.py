"""However pararnn is installed, users get the same packages, typed, and an import that stays light."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
BACKENDS = PROJECT["project"]["entry-points"]["pararnn.backends"]
PACKAGES = {
    "pararnn": REPO / "pararnn_core/pararnn",
    **{path.name: path for path in (REPO / "backends").glob("pararnn_*")},
    **{path.name: path for path in (REPO / "conformance").glob("pararnn_*")},
}
LEFTOVERS = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
HEAVY = {"torch", "jax", "jaxlib", "numba", "triton", "cupy", "matplotlib", "scipy"}


def run(*command, **options):
    """Run a Python command to its end and return what it printed, or fail with all that it said."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def importable(paths):
    """Those of the files below an import root that Python could import or a package would carry as data."""
    return {
        path.as_posix()
        for path in paths
        if (len(path.parts) > 1 or path.suffix == ".py")
        and not path.parts[0].endswith(".dist-info")
        and path.parts[0] not in ("bin", "Scripts")  # where pip --target puts commands
        and "__pycache__" not in path.parts
    }


def files_below(root):
    return [path.relative_to(root) for path in root.rglob("*") if path.is_file()]


def unpack_wheel(folder, target):
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def entry_points_in(site):
    """The entry points of the one distribution in a folder, as {group: {name: object}}."""
    (path,) = site.glob("pararnn-*.dist-info/entry_points.txt")
    parser = ConfigParser(delimiters=("=",))
    parser.read(path, encoding="utf-8")
    return {group: dict(parser[group]) for group in parser.sections()}


@pytest.fixture(scope="module")
def installs(tmp_path_factory):
    """A folder with the unpacked wheel, one with the wheel of the sdist, one with an editable install."""
    tmp = tmp_path_factory.mktemp("packaging")
    # Built from a copy: a build must neither write to the tree nor depend on git.
    tree = tmp / "tree"
    shutil.copytree(REPO, tree, ignore=shutil.ignore_patterns(*LEFTOVERS))
    build = ("-m", "build", "--no-isolation", "--outdir")
    run(*build, tmp / "direct", "--wheel", tree)
    # Without --wheel or --sdist, build makes the sdist and then the wheel from that sdist.
    run(*build, tmp / "by_sdist", tree)
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    run(*pip, tmp / "editable", "--editable", tree)
    return {
        "wheel": unpack_wheel(tmp / "direct", tmp / "wheel"),
        "sdist": unpack_wheel(tmp / "by_sdist", tmp / "sdist"),
        "editable": tmp / "editable",
    }


def exposed(site):
    """All that a folder makes importable, directly or through its .pth files."""
    roots = [site]
    for pth in site.glob("*.pth"):
        roots += [Path(line) for line in pth.read_text(encoding="utf-8").splitlines() if line]
    return importable(path for root in roots for path in files_below(root))


def test_every_install_exposes_the_same_packages_and_nothing_else(installs):
    by_wheel = exposed(installs["wheel"])
    assert {Path(name).parts[0] for name in by_wheel} == set(PACKAGES)
    in_tree = {Path(package, name) for package, path in PACKAGES.items() for name in files_below(path)}
    assert by_wheel == importable(in_tree)
    assert exposed(installs["sdist"]) == by_wheel
    assert exposed(installs["editable"]) == by_wheel


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(installs, package):
    assert f"{package}/py.typed" in exposed(installs["wheel"])


@pytest.mark.parametrize("how", ["wheel", "sdist", "editable"])
def test_every_install_has_the_command_and_a_door_for_each_backend(installs, how):
    declared = entry_points_in(installs[how])
    assert declared["console_scripts"] == {"pararnn": "pararnn.cli:main"}
    assert declared["pararnn.backends"] == BACKENDS
    folders = {name for name in PACKAGES if PACKAGES[name].parent.name == "backends"}
    # Every folder has its door; one may have a second, for another way of running.
    assert {f"{name}:backend" for name in folders} <= set(BACKENDS.values())
    assert {value.partition(":")[0] for value in BACKENDS.values()} == folders


def test_this_environment_has_the_entry_points_of_this_tree():
    found = {point.name: point.value for point in entry_points(group="pararnn.backends")}
    assert BACKENDS.items() <= found.items(), "stale install: install pararnn again"


def test_p20_import_loads_nothing_heavy(installs):
    """P20: pararnn imports and works where only NumPy is, so importing it may load nothing heavier."""
    loaded = run(
        "-c",
        "import sys, pararnn; print(pararnn.__file__, *sorted(sys.modules), sep='\\n')",
        env={**os.environ, "PYTHONPATH": str(installs["wheel"])},
        cwd=installs["wheel"],
    ).splitlines()
    assert Path(loaded[0]).is_relative_to(installs["wheel"])
    assert not HEAVY & {name.partition(".")[0] for name in loaded[1:]}
