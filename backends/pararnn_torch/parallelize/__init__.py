"""parallelize: torch.nn's own recurrent layers, run in parallel over time with the weights they have."""

from pararnn_torch.parallelize.model import parallelize
from pararnn_torch.parallelize.modules import ParallelGRU, ParallelLSTM, ParallelRNN
from pararnn_torch.parallelize.step_cells import CellOverTime

__all__ = ["CellOverTime", "ParallelGRU", "ParallelLSTM", "ParallelRNN", "parallelize"]
