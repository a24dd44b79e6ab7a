"""Serving: states of many requests in pages, prefill and decode in one call, speculative decoding."""

from pararnn.serving.blocks import BlockStackPool
from pararnn.serving.draft import LinearDraftResult, verify_linear_draft
from pararnn.serving.paged import paged_apply
from pararnn.serving.pool import FreeList, PagedStatePool, Slot

__all__ = [
    "BlockStackPool",
    "FreeList",
    "LinearDraftResult",
    "PagedStatePool",
    "Slot",
    "paged_apply",
    "verify_linear_draft",
]
