"""The demo, `pararnn demo`: real text, both ways, agreement, and a byte model trained in parallel over time."""

from pararnn.demo.both_ways import BothWays, run_both_ways
from pararnn.demo.errors import DemoError
from pararnn.demo.model import ByteModel
from pararnn.demo.run import DemoResult, run
from pararnn.demo.settings import Settings
from pararnn.demo.train import StepLog

__all__ = ["BothWays", "ByteModel", "DemoError", "DemoResult", "Settings", "StepLog", "run", "run_both_ways"]
