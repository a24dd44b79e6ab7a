"""The documentation is true: its snippets run and print what it says, its links resolve, the names in it exist.

A block of Python runs if the line before it is `<!-- runnable -->`, or `<!-- runnable: torch -->` where it needs that
library. The blocks of one page run in order and share their names. A block of text after `<!-- prints -->` is what the
blocks since the last such one print, with `...` for what may differ.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import pararnn

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
TEXTS = {page.relative_to(REPO).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^(?P<mark><!-- (?P<what>runnable|prints)(?:: (?P<needs>[\w ,]+))? -->\n+)?```(?P<info>\w*)[^\n]*\n"
                   r"(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)  # fmt: skip
MARK = re.compile(r"^<!-- (?:runnable|prints)", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
RUNNABLE = re.compile(r"^<!-- runnable", re.MULTILINE)
RUNNING = [name for name, text in TEXTS.items() if RUNNABLE.search(text)]


def without_code(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found = re.findall(r"^#+ +(.+?)\s*$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("name", RUNNING)
def test_the_snippets_run_and_print_what_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pararnn.registry._registered", {})
    names: dict[str, object] = {"__name__": "__main__"}
    printed, ran, lacking = io.StringIO(), 0, False
    for block in FENCE.finditer(TEXTS[name]):
        if block["what"] == "runnable":
            assert block["info"] == "python", f"{name}: a runnable block must be ```python"
            ran += 1
            if any(find_spec(library) is None for library in re.findall(r"\w+", block["needs"] or "")):
                lacking = True
                continue
            line = TEXTS[name].count("\n", 0, block.start("body"))
            code = compile("\n" * line + textwrap.dedent(block["body"]), name, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
        elif block["what"] == "prints" and lacking:
            printed, lacking = io.StringIO(), False
        elif block["what"] == "prints":
            said, got, flags = block["body"], printed.getvalue(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(said, got, flags)
            assert same, f"{name} says:\n{said}\nbut its snippets print:\n{got}"
            printed = io.StringIO()
    assert ran == len(RUNNABLE.findall(TEXTS[name])), f"{name}: a mark is not followed by a block"


@pytest.mark.parametrize("name", TEXTS)
def test_every_mark_stands_before_a_block(name):
    marked = [block for block in FENCE.finditer(TEXTS[name]) if block["mark"]]
    assert len(marked) == len(MARK.findall(TEXTS[name]))


@pytest.mark.parametrize("name", TEXTS)
def test_every_relative_link_resolves(name):
    for target in LINK.findall(without_code(TEXTS[name])):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (REPO / name).parent / file if file else REPO / name
        assert path.exists(), f"{name} links to {target}, which is not there"
        assert REPO in path.resolve().parents, f"{name} links to {target}, outside the project"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{name} links to {target}: no such heading"


def test_every_page_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in LINK.findall(TEXTS["README.md"])}
    assert {name for name in TEXTS if name.startswith("docs/")} <= linked


def test_the_readme_has_the_two_commands_and_a_picture():
    assert "python -m pip install . && pararnn demo\n" in TEXTS["README.md"]
    assert "bash .ci/run\n" in TEXTS["README.md"] and (REPO / ".ci/run").is_file()
    pictures = [target for target in LINK.findall(TEXTS["README.md"]) if target.endswith((".svg", ".png"))]
    assert pictures and all((REPO / target).stat().st_size > 1000 for target in pictures)


def exists(dotted: str) -> bool:
    """Whether `dotted` names a module, or an attribute of one."""
    parts = dotted.split(".")
    found, at = importlib.import_module(parts[0]), 1
    for part in parts[1:]:
        if not hasattr(found, part):
            break
        found, at = getattr(found, part), at + 1
    else:
        return True
    for cut in range(len(parts), at, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return all(hasattr(module, part) for part in parts[cut : cut + 1])
    return False


# Dotted words that begin like the package and are something else.
NO_NAMES = {"pararnn.backends", "pararnn.git"}


@pytest.mark.parametrize("name", TEXTS)
def test_the_names_that_a_page_mentions_exist(name):
    mentioned = set(re.findall(r"\b(pararnn(?:_\w+)?(?:\.[A-Za-z_]\w*)+)", TEXTS[name])) - NO_NAMES
    for dotted in sorted(mentioned):
        if dotted.endswith((".py", ".md", ".toml")):
            continue
        try:
            assert exists(dotted), f"{name} mentions {dotted}, which does not exist"
        except ImportError as error:
            assert error.name and not error.name.startswith("pararnn"), error  # offered, but its library is not here


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_imports_from_pararnn_is_there(name):
    for block in FENCE.finditer(TEXTS[name]):
        if block["info"] == "python":
            for line in re.findall(r"^\s*from pararnn import ([^(\n]+)$", block["body"], re.MULTILINE):
                for imported in line.split(","):
                    assert exists(f"pararnn.{imported.split(' as ')[0].strip()}"), f"{name}: {line}"


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_a_page_names_are_fields_of_a_configuration(name):
    fields = set(pararnn.NewtonConfig.__dataclass_fields__)
    for call in re.findall(r"NewtonConfig\(([^()]*)\)", TEXTS[name]):
        assert set(re.findall(r"(\w+)=", call)) <= fields, f"{name}: NewtonConfig({call})"


def test_the_speed_tables_are_those_of_the_saved_results():
    done = subprocess.run(
        [sys.executable, REPO / "benchmarks/readme_table.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def cells_of(name: str, first: str) -> list[str]:
    """The row of a page's table that begins with `first`."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", TEXTS[name], re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("dtypes", ["float64", "float32", "float16, bfloat16"])
def test_the_tolerances_of_the_contract_are_those_of_the_code(dtypes):
    from pararnn.solve import DEFAULT_TOL
    from pararnn.verify import _ATOL

    for dtype in dtypes.split(", "):
        stated = [float(cell) for cell in cells_of("docs/numerics.md", dtypes)]
        assert stated == pytest.approx([_ATOL[dtype], DEFAULT_TOL[dtype], 5.0 * DEFAULT_TOL[dtype]])


@pytest.mark.parametrize(
    "cells",
    [
        "ParaGRU",
        "ParaLSTM, ParaLEM",
        "ParaTanh, ParaNLRU, ParaCfC, ParaTitans",
        "ParaMinGRU, ParaMinLSTM, ParaLRU, ParaS5",
        "ParaSLSTM",
        "ParaUnICORNN",
    ],
)
def test_the_iteration_counts_of_the_page_are_those_of_the_tables(cells):
    from pararnn.k_star import K_STAR

    for cell in cells.split(", "):
        stated = cells_of("docs/numerics.md", cells)
        known = [str(K_STAR[cell].get(time, "none agrees")) for time in (32, 512, 8192, 131072)]
        assert stated == known


def test_the_order_of_backends_is_the_registry_s():
    rows = re.findall(r"^\| (-?\d+) \| `(\w+)` \|", TEXTS["docs/choosing-a-backend.md"], re.MULTILINE)
    listed = {name: int(priority) for priority, name in rows}
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(listed) == {"array", *project["project"]["entry-points"]["pararnn.backends"]}
    assert list(listed.values()) == sorted(listed.values(), reverse=True)
    for name, backend in pararnn.backends().items():
        if name in listed and not isinstance(backend, str):
            assert backend.priority == listed[name]


def test_a_step_may_use_what_the_page_lists():
    from pararnn.graph.expr import ARITY
    from pararnn.graph.namespace import KNOWN

    (listed,) = re.findall(r"^- Of `xp`: (.*?)\.$", TEXTS["docs/add-a-cell.md"], re.MULTILINE | re.DOTALL)
    alias = {"absolute", "add", "divide", "multiply", "negative", "subtract", "sigmoid"}
    assert set(re.findall(r"`(\w+)`", listed)) == set(KNOWN) - alias
    assert f"there are {len(ARITY)}" in re.sub(r"\s+", " ", TEXTS["docs/add-a-backend.md"])


def test_every_public_name_says_what_it_does():
    for name in pararnn.__all__:
        text = getattr(pararnn, name).__doc__
        assert text and text.strip().splitlines()[0].endswith((".", ":")), name


def test_every_public_scan_says_what_it_does():
    from pararnn import scans

    for name in scans.__all__:
        text = getattr(scans, name).__doc__
        assert text and ">>>" in text, name
