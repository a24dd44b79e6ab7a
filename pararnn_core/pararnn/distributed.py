"""pararnn.distributed: what training in several processes needs, for the array library that offers it."""

from __future__ import annotations

from pararnn.lazy import offered_module

__getattr__, __dir__ = offered_module(__name__)
