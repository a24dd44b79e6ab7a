"""Finds all backends once, as the effect of being imported."""

from pararnn.registry import backends

backends()
