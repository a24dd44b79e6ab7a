"""Cells: each is one file of mathematics."""

from pararnn.cells.base import ChannelwiseCell, Projection
from pararnn.cells.gru import ParaGRU
from pararnn.cells.lstm import ParaLSTM
from pararnn.cells.protocol import RNNCell, check_cell
from pararnn.cells.slstm import ParaSLSTM
from pararnn.cells.tanh import ParaTanh

__all__ = ["ChannelwiseCell", "ParaGRU", "ParaLSTM", "ParaSLSTM", "ParaTanh", "Projection", "RNNCell", "check_cell"]
