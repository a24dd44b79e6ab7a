"""The expression graph: a step traced once, differentiated, and printed for each backend."""

from pararnn.graph.derivative import jacobian, pullback, pushforward, topological
from pararnn.graph.expr import Expr, Graph, add, mul, neg
from pararnn.graph.namespace import SymbolicNamespace
from pararnn.graph.print_array import FUSED, array_function, compile_array, print_array
from pararnn.graph.program import Instruction, Program

__all__ = [
    "FUSED",
    "Expr",
    "Graph",
    "Instruction",
    "Program",
    "SymbolicNamespace",
    "add",
    "array_function",
    "compile_array",
    "jacobian",
    "mul",
    "neg",
    "print_array",
    "pullback",
    "pushforward",
    "topological",
]
