"""DemoError: a choice that the demo cannot follow, found before any work."""


class DemoError(ValueError):
    """The message says what was wanted, what came, and what would do."""
