"""Fixtures that several test files share."""

import pytest


@pytest.fixture
def numpy_solver(monkeypatch):
    """Lets `auto` choose among the reference backends only, so that the stats are the array solver's."""
    # Not at the top: a plugin that imports the package early breaks import hooks.
    import pararnn.registry

    known = {n: b for n, b in pararnn.registry.backends().items() if n in ("numpy", "array")}
    monkeypatch.setattr(pararnn.registry, "_found", lambda: known)
    monkeypatch.setattr(pararnn.registry, "_registered", {})
