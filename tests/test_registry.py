"""The one door for backends: a small one of a third party, the order in which `auto` asks, and what refusals say."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import pytest

import pararnn
import pararnn.registry
from pararnn import (
    Backend,
    BackendUnavailableError,
    NewtonConfig,
    NewtonDivergenceError,
    ParaGRU,
    ParaTanh,
    explain,
    newton_apply,
    newton_vjp,
    register_backend,
    sequential_apply,
    verify_agreement,
)
from pararnn.engine import ArrayEngine
from pararnn.registry import GROUP, backends, choose
from support import CELLS, error_of, problem, solve


class CountingEngine(ArrayEngine):
    """The array engine, which writes down what it ran."""

    def __init__(self, xp, record):
        super().__init__(xp)
        self.record = record

    def loop(self, loop, carry, rows, consts, *, reverse=False, keep=0):
        self.record.append("reverse" if reverse else "forward")
        return super().loop(loop, carry, rows, consts, reverse=reverse, keep=keep)


class ThirdParty(Backend):
    """All that a backend of one's own needs: a name, when it takes part, and an engine."""

    name, priority = "third", 99

    def __init__(self, absent=None, narrow=False):
        self.absent, self.narrow, self.record = absent, narrow, []

    def probe(self):
        return self.absent

    def accepts(self, problem):
        if self.narrow and problem.cell.state_slots > 1:
            return "it has no kernel for cells of several slots"
        return super().accepts(problem)

    def engine(self, problem):
        return CountingEngine(problem.xp, self.record)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Each test has a registry of its own."""
    monkeypatch.setattr(pararnn.registry, "_registered", {})


@pytest.fixture
def door(monkeypatch):
    """Puts entry points into the environment, beside the installed ones."""
    installed = list(entry_points(group=GROUP))
    yield lambda **values: _install(monkeypatch, installed, values)
    pararnn.registry._found.cache_clear()


def _install(monkeypatch, installed, values):
    extra = [EntryPoint(name, value, GROUP) for name, value in values.items()]
    monkeypatch.setattr(pararnn.registry, "entry_points", lambda group: [*installed, *extra] if group == GROUP else [])
    pararnn.registry._found.cache_clear()


# --- a backend of one's own ------


@pytest.mark.parametrize("kind", CELLS)
def test_a_third_party_backend_runs_everything_that_it_inherits(kind):
    mine = ThirdParty()
    register_backend(mine)
    cell, x = problem(kind, 60, dtype=np.float64)
    for config in (NewtonConfig(), NewtonConfig(scan_backend="third", segment_len=8), NewtonConfig(segment_len=7)):
        mine.record.clear()
        got, stats = solve(cell, x, config)
        assert stats.scan_backend == "third" and "forward" in mine.record
        assert error_of(cell, got, sequential_apply(cell, x)) < 1e-10
    mine.record.clear()
    states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=9))
    assert "reverse" not in mine.record
    grads = pullback(np.ones_like(states))
    assert "reverse" in mine.record
    _, reference = newton_vjp(cell, x, NewtonConfig(scan_backend="numpy"))
    for name, value in reference(np.ones_like(states)).params.items():
        np.testing.assert_allclose(grads.params[name], value, rtol=1e-9, atol=1e-12)
    assert explain(cell, x).backend == "third" and verify_agreement(cell, x).backend == "third"


def test_a_backend_may_bring_a_whole_solve_of_its_own():
    class Loop(ThirdParty):
        name = "loop"

        def newton(self, problem):
            from pararnn.sequential import run_sequential

            return run_sequential(problem), pararnn.NewtonStats(
                path="sequential",
                scan_backend=self.name,
                converged=True,
                max_residual=self.residual,
                agreement_estimate=0,
            )

        residual = 0.0

    register_backend(Loop())
    cell, x = problem(ParaGRU, 30)
    got, stats = solve(cell, x)
    assert (stats.scan_backend, stats.path) == ("loop", "sequential")
    np.testing.assert_array_equal(got, sequential_apply(cell, x))
    Loop.residual = 5.0
    with pytest.raises(NewtonDivergenceError, match="residual 5"):
        newton_apply(cell, x, NewtonConfig(max_iters=3))
    newton_apply(cell, x)  # without a pinned count there is no gate: the solver answers for its own result


def test_what_a_backend_does_not_take_goes_to_the_next_under_auto():
    register_backend(ThirdParty(narrow=True))
    cell, x = problem(ParaGRU, 20)
    assert solve(cell, x)[1].scan_backend == "third"
    two_slots, x = problem(pararnn.ParaLSTM, 20)
    _, stats = solve(two_slots, x)
    assert stats.scan_backend not in ("third", "array")
    told = explain(two_slots, x)
    assert told.refusals["third"] == "it has no kernel for cells of several slots"
    assert "not      third: it has no kernel for cells of several slots" in str(told)
    with pytest.raises(TypeError, match="scan_backend='third' cannot solve this: it has no kernel"):
        newton_apply(two_slots, x, NewtonConfig(scan_backend="third"))


def test_a_backend_that_is_absent_is_passed_over_by_auto_and_an_error_by_name():
    register_backend(ThirdParty(absent="the library libthird is not installed; pip install third"))
    cell, x = problem(ParaGRU, 20)
    assert solve(cell, x)[1].scan_backend != "third"
    assert explain(cell, x).refusals["third"].startswith("the library libthird is not installed")
    for run in (newton_apply, newton_vjp, explain, verify_agreement):
        with pytest.raises(
            BackendUnavailableError, match=r"scan_backend='third' cannot run here: the library libthird"
        ):
            run(cell, x, config=NewtonConfig(scan_backend="third"))
    assert issubclass(BackendUnavailableError, RuntimeError)


def test_auto_asks_by_priority_and_then_by_name():
    made = {}
    for name, priority in (("beta", 50), ("alpha", 50), ("late", -50), ("first", 60)):
        made[name] = type(name, (ThirdParty,), {"name": name, "priority": priority})(narrow=True)
        register_backend(made[name])
    order = list(backends())
    assert order[:3] == ["first", "alpha", "beta"] and order[-1] == "late"
    assert order.index("numpy") < order.index("array") < order.index("late")
    cell, x = problem(pararnn.ParaLSTM, 20)
    refused = list(explain(cell, x).refusals)
    assert refused[:3] == ["first", "alpha", "beta"] and "late" not in refused, (
        "who comes after the choice is not asked"
    )


def test_a_second_registration_replaces_the_first():
    cell, x = problem(ParaTanh, 20)
    first, second = ThirdParty(), ThirdParty()
    register_backend(first)
    register_backend(second)
    newton_apply(cell, x)
    assert second.record and not first.record


def test_what_is_no_backend_is_refused():
    for wrong in (object(), "numpy", None, np):
        with pytest.raises(TypeError, match=r"register_backend: .* has no .*derive from pararnn.Backend"):
            register_backend(wrong)
    for name in ("auto", "eager"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            register_backend(type("B", (Backend,), {"name": name})())


def test_an_error_inside_a_backend_is_the_users_to_see():
    class Broken(ThirdParty):
        name = "broken"

        def newton(self, problem):
            raise ZeroDivisionError("a fault of its own")

    register_backend(Broken())
    cell, x = problem(ParaTanh, 20)
    with pytest.raises(ZeroDivisionError, match="a fault of its own"):
        newton_apply(cell, x)


# --- entry points ------


def test_a_backend_behind_an_entry_point_is_found(door, monkeypatch):
    mine = ThirdParty()
    monkeypatch.setitem(sys.modules, "third_party_rnn", types.SimpleNamespace(backend=mine))
    door(third="third_party_rnn:backend")
    cell, x = problem(ParaGRU, 30)
    assert backends()["third"] is mine and solve(cell, x)[1].scan_backend == "third" and mine.record


def test_a_backend_whose_import_fails_is_kept_as_a_reason(door, monkeypatch):
    class Exploding(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.99: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "third_party_rnn", Exploding("third_party_rnn"))
    door(third="third_party_rnn:backend", gone="a_module_that_nobody_has:backend", number="math:pi")
    cell, x = problem(ParaGRU, 30)
    assert solve(cell, x)[1].converged, "the others work on"
    reasons = {
        "third": "could not be imported: OSError: libcudart.so.99",
        "gone": "could not be imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
        "number": "it is no backend: float has no name",
    }
    for name, reason in reasons.items():
        assert reason in backends()[name]
        with pytest.raises(BackendUnavailableError, match=f"scan_backend='{name}' cannot run here") as caught:
            newton_apply(cell, x, NewtonConfig(scan_backend=name))
        assert reason in str(caught.value)


def test_the_installed_backends_are_there_and_say_what_they_are():
    known = backends()
    assert {"array", "numpy"} <= set(known)
    for name, backend in known.items():
        if not isinstance(backend, str):
            assert backend.name == name and isinstance(backend.priority, int)
            sentence = backend.probe()
            assert sentence is None or (isinstance(sentence, str) and len(sentence.split()) > 3)
    assert known["array"].probe() is None and known["numpy"].probe() is None


def test_unknown_names_are_refused_with_the_known_ones():
    cell, x = problem(ParaGRU, 5)
    with pytest.raises(ValueError, match=r"'trition' is not known here; choose from auto, .*numpy.*array.*eager"):
        newton_apply(cell, x, NewtonConfig(scan_backend="trition"))


def test_where_nobody_takes_a_problem_every_reason_is_told():
    cell, x = problem(ParaGRU, 5)
    config = NewtonConfig(scan_tile="thomas4")
    with pytest.raises(
        TypeError, match=r"no backend takes this problem: .*numpy: numpy has no scan_tile.*array: array has"
    ):
        newton_apply(cell, x, config)


def test_numpy_refuses_other_libraries_and_array_takes_them():
    torch = pytest.importorskip("torch")
    cell, x = problem(ParaGRU, 12)
    there, tensor = cell.to(torch), torch.from_numpy(x)
    with pytest.raises(TypeError, match="takes NumPy arrays, and these are torch's"):
        newton_apply(there, tensor, NewtonConfig(scan_backend="numpy"))
    got, stats = solve(there, tensor, NewtonConfig(scan_backend="array"))
    assert stats.scan_backend == "array" and isinstance(got, torch.Tensor)


def test_choosing_has_no_side_effects():
    from pararnn.problem import make_problem

    cell, x = problem(ParaGRU, 12)
    made = make_problem("test", cell, x)
    assert choose(made).backend is choose(made).backend
    assert choose(made).refusals == choose(made).refusals


@pytest.mark.parametrize("fields", [{"coords": "log"}, {"jac_structure": "dense"}, {"picard_iters": 1}], ids=str)
@pytest.mark.parametrize("more", [{}, {"max_iters": 2}, {"segment_len": 4}], ids=str)
def test_an_order_that_the_cell_cannot_follow_is_refused_by_every_backend(fields, more):
    cell, x = problem(ParaGRU, 12)
    named = [name for name, backend in backends().items() if not isinstance(backend, str) and not backend.probe()]
    assert {"numpy", "array"} <= set(named)
    for name in ("auto", *named):
        config = NewtonConfig(scan_backend=name, **fields, **more)
        for run in (newton_apply, newton_vjp, explain):
            with pytest.raises((TypeError, ValueError), match=f"{next(iter(fields))}|{name}.*cannot solve"):
                run(cell, x, config)
