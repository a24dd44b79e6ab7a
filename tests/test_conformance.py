"""The conformance suite on the backends that run everywhere, and its command line."""

from __future__ import annotations

import pytest

from pararnn import Backend, register_backend, registry
from pararnn_conformance import NotTested, Refused, Target, check, failure_of, instances, registration
from pararnn_conformance.__main__ import main

# Whole on NumPy; the short suite where every operation is a call into a library that compiles or checks it.
TARGETS = {
    "numpy": False,
    "array": False,
    "array@torch": True,
    "array@array_api_strict": True,
    "array@jax.numpy": True,
    "jax": True,
}
# JAX compiles every operation anew for every shape: what runs within seconds, the rest with -m slow.
SOON_ON_JAX = (
    "agreement.oracle", "agreement.start", "agreement.half", "gradients.final", "gradients.linear", "honesty.explained",
    "lengths.", "memory.layouts", "pinned.corrections", "refusals.",
)  # fmt: skip


def cases():
    for name, quick in TARGETS.items():
        for instance in instances(quick=quick):
            later = "jax" in name and not instance.name.startswith(SOON_ON_JAX)
            marks = [pytest.mark.slow] if later else []
            yield pytest.param(name, instance, id=f"{name}-{instance.name}", marks=marks)


@pytest.fixture(scope="session")
def targets():
    """One target by name, made once."""
    made: dict[str, Target] = {}

    def target(name: str) -> Target:
        if name not in made:
            try:
                made[name] = Target(name)
            except NotTested as error:
                pytest.skip(str(error))
        return made[name]

    return target


@pytest.mark.parametrize(("name", "instance"), list(cases()))
def test_keeps_the_contract(targets, name, instance):
    try:
        failure = failure_of(instance, targets(name))
    except Refused as sentence:
        pytest.skip(str(sentence))
    assert failure is None, failure


@pytest.fixture
def registered():
    """Registers backends for one test."""
    before = dict(registry._registered)
    yield register_backend
    registry._registered.clear()
    registry._registered.update(before)


class Absent(Backend):
    name, priority = "absent", -1

    def probe(self):
        return "it needs a machine that is not here"


class Picky(Backend):
    name, priority = "picky", -1

    def accepts(self, problem):
        return "it takes nothing today"


def lines_of(capsys):
    return capsys.readouterr().out.strip().splitlines()


def test_command_line_ends_with_the_table_and_the_totals(capsys):
    assert main(["numpy", "array", "--only", "honesty.lyapunov"]) == 0
    assert lines_of(capsys)[-3:] == [
        "numpy      ran 3 checks, 0 failed",
        "array      ran 3 checks, 0 failed",
        "6 passed, 0 failed",
    ]


def test_a_backend_that_cannot_run_is_not_tested_unless_it_is_required(capsys, registered):
    registered(Absent())
    assert main(["absent", "--only", "lyapunov"]) == 0
    assert lines_of(capsys) == ["absent     NOT TESTED: it needs a machine that is not here", "0 passed, 0 failed"]
    assert main(["numpy", "--require-backend", "absent", "--only", "lyapunov"]) == 1
    out = lines_of(capsys)
    assert "absent is required and was not tested" in out and out[-1] == "3 passed, 0 failed"


def test_a_backend_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2 and "numpy" in capsys.readouterr().err
    assert main(["--require-backend", "nonsense", "--only", "lyapunov"]) == 1
    assert any(line.startswith("nonsense   NOT TESTED: no backend of this name") for line in lines_of(capsys))


def test_a_backend_that_refuses_everything_has_not_been_tested(capsys, registered):
    registered(Picky())
    assert main(["--require-backend", "picky", "--only", "lyapunov"]) == 1
    out = lines_of(capsys)
    assert any("3 refused: it takes nothing today" in line for line in out)
    assert "picky is required and was not tested" in out


def test_a_library_that_is_missing_is_a_sentence():
    with pytest.raises(NotTested, match="no_such_library could not be imported"):
        Target("array@no_such_library")


def test_a_backend_says_in_which_library_it_wants_its_arrays(registered):
    strict = pytest.importorskip("array_api_strict")

    class Mine(Backend):
        name, priority = "mine", -1

        def example_namespace(self):
            return strict, strict.Device("CPU_DEVICE")

    registered(Mine())
    target = Target("mine")
    assert target.xp is strict
    (instance,) = instances(only="forward[Echo-float32-65-segments]")
    assert failure_of(instance, target) is None


def test_a_failed_check_is_shown_and_counted(capsys, monkeypatch):
    monkeypatch.setattr(registration, "_instances", [])

    @check("P00", value=(1, 2))
    def odd(target, value):
        """Only odd numbers pass."""
        assert value % 2, f"{value} is even"

    assert main(["numpy"]) == 1
    out = lines_of(capsys)
    assert "FAILED numpy test_conformance.odd[2]" in out and "    2 is even" in out
    assert out[-2:] == ["numpy      ran 2 checks, 1 failed", "1 passed, 1 failed"]
    assert main(["--list", "--only", "odd"]) == 0
    assert "Only odd numbers pass." in capsys.readouterr().out


def test_every_check_has_an_idea_and_names_what_it_shows():
    names = [i.name for i in instances()]
    assert len(names) == len(set(names)) > 1000
    for instance in instances():
        assert instance.idea, instance.name
        assert all(word[0] in "PO" and word[1:].isdigit() for word in instance.shows.split()), instance.name
        assert instance.shows, instance.name
