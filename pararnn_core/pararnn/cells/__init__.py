"""Cells: each is one file of mathematics."""

from pararnn.cells.base import ChannelwiseCell, Projection
from pararnn.cells.cfc import ParaCfC
from pararnn.cells.gru import ParaGRU
from pararnn.cells.hopfield import ParaHopfield
from pararnn.cells.lem import ParaLEM
from pararnn.cells.lru import ParaLRU
from pararnn.cells.lstm import ParaLSTM
from pararnn.cells.m2rnn import ParaM2RNN
from pararnn.cells.mingru import ParaMinGRU
from pararnn.cells.minlstm import ParaMinLSTM
from pararnn.cells.mixing import MixingCell
from pararnn.cells.nlru import ParaNLRU
from pararnn.cells.protocol import RNNCell, check_cell
from pararnn.cells.reset_first_gru import ResetFirstGRU
from pararnn.cells.rwkv7 import ParaRWKV7
from pararnn.cells.s5 import ParaS5
from pararnn.cells.slstm import ParaSLSTM
from pararnn.cells.stock import StockGRU, StockLSTM, StockRNN
from pararnn.cells.stock_cfc import StockCfC
from pararnn.cells.tanh import ParaTanh
from pararnn.cells.titans import ParaTitans
from pararnn.cells.unicornn import ParaUnICORNN

__all__ = [
    "ChannelwiseCell",
    "MixingCell",
    "ParaCfC",
    "ParaGRU",
    "ParaHopfield",
    "ParaLEM",
    "ParaLRU",
    "ParaLSTM",
    "ParaM2RNN",
    "ParaMinGRU",
    "ParaMinLSTM",
    "ParaNLRU",
    "ParaRWKV7",
    "ParaS5",
    "ParaSLSTM",
    "ParaTanh",
    "ParaTitans",
    "ParaUnICORNN",
    "Projection",
    "RNNCell",
    "ResetFirstGRU",
    "StockCfC",
    "StockGRU",
    "StockLSTM",
    "StockRNN",
    "check_cell",
]
