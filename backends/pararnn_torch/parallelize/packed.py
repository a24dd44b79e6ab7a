"""Sequences of several lengths in one padded batch: where each ends, and how it is turned round within its length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Lengths:
    """The lengths of a packed batch, longest first; padding stands after each sequence's end.

    A recurrence looks back only, so padding behind the end changes nothing before it, and results there are dropped.
    """

    def __init__(self, batch_sizes: torch.Tensor, device: torch.device) -> None:
        self.batch_sizes = batch_sizes
        steps = torch.arange(int(batch_sizes[0]))
        # Sequence b lasts as long as more than b sequences do.
        self.on_host = (batch_sizes[None, :] > steps[:, None]).sum(dim=1)
        self.longest = int(batch_sizes.shape[0])
        self.last = (self.on_host - 1).to(device)
        time = torch.arange(self.longest)
        turned = self.on_host[:, None] - 1 - time
        turned = torch.where(turned >= 0, turned, time)
        self._turned = (turned + self.longest * steps[:, None]).reshape(-1).to(device)

    def padded(self, data: torch.Tensor) -> torch.Tensor:
        """The packed rows (sum of lengths, I) as (B, T, I), zeros behind the ends."""
        return pad_packed_sequence(PackedSequence(data, self.batch_sizes), batch_first=True)[0]

    def packed(self, y: torch.Tensor) -> torch.Tensor:
        """The rows of (B, T, D) that are no padding."""
        return pack_padded_sequence(y, self.on_host, batch_first=True).data

    def flipped(self, y: torch.Tensor) -> torch.Tensor:
        """Each sequence from its last step to its first; doing it twice changes nothing."""
        return y.flatten(0, 1).index_select(0, self._turned).view(y.shape)

    def ends(self, states: torch.Tensor) -> torch.Tensor:
        """The state (B, …) at each sequence's last step."""
        return states[torch.arange(states.shape[0], device=states.device), self.last]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first, stop, length) of each run of sequences of one length."""
        values, counts = torch.unique_consecutive(self.on_host, return_counts=True)
        first = 0
        for length, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield first, first + count, length
            first += count
