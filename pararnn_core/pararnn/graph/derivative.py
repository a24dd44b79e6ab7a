"""Derivatives of traced expressions: pushforwards and Jacobian entries (tangent), pullbacks (cotangent).

Both read one table, `PARTIALS`, which gives for each operation the derivative by each operand. A kink
(maximum, minimum, abs) takes the mean of its two slopes on a tie, so that equal operands share a
cotangent evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pararnn.graph.expr import CONDITIONS, Expr, add, mul, neg


def _num(node: Expr, value: float) -> Expr:
    return node.graph.const(value)


def _div(a: Expr, b: Expr) -> Expr:
    return _num(a, 0.0) if a.is_number(0.0) else a.graph.apply("div", a, b)


def _one_minus(a: Expr) -> Expr:
    return a.graph.apply("sub", _num(a, 1.0), a)


def _kink(node: Expr, side: float) -> tuple[Expr, Expr]:
    """Slopes of maximum (side 1) and minimum (side -1): 1 for the operand that wins, 1/2 each on a tie.

    Written with `sign` because selecting is several times dearer than arithmetic on most array libraries.
    """
    a, b = node.args
    difference = node.graph.apply("sign", node.graph.apply("sub", a, b))
    first = add(_num(node, 0.5), mul(_num(node, 0.5 * side), difference))
    return first, _one_minus(first)


def _pow(node: Expr) -> tuple[Expr, ...]:
    base, exponent = node.args
    if exponent.is_const:
        lower = node.graph.apply("pow", base, _num(node, exponent.value - 1.0))
        return mul(exponent, lower), _num(node, 0.0)
    lower = node.graph.apply("pow", base, node.graph.apply("sub", exponent, _num(node, 1.0)))
    return mul(exponent, lower), mul(node, node.graph.apply("log", base))


def _logaddexp(node: Expr) -> tuple[Expr, ...]:
    a, b = node.args
    return node.graph.apply("sigmoid", node.graph.apply("sub", a, b)), node.graph.apply(
        "sigmoid", node.graph.apply("sub", b, a)
    )


def _where(node: Expr) -> tuple[Expr, ...]:
    one, zero = _num(node, 1.0), _num(node, 0.0)
    condition = node.args[0]
    return (
        zero,
        node.graph.apply("where", condition, one, zero),
        node.graph.apply("where", condition, zero, one),
    )


PARTIALS: dict[str, Callable[[Expr], tuple[Expr, ...]]] = {
    "add": lambda n: (_num(n, 1.0), _num(n, 1.0)),
    "sub": lambda n: (_num(n, 1.0), _num(n, -1.0)),
    "mul": lambda n: (n.args[1], n.args[0]),
    "div": lambda n: (_div(_num(n, 1.0), n.args[1]), neg(_div(n, n.args[1]))),
    "pow": _pow,
    "neg": lambda n: (_num(n, -1.0),),
    "exp": lambda n: (n,),
    "expm1": lambda n: (add(n, _num(n, 1.0)),),
    "log": lambda n: (_div(_num(n, 1.0), n.args[0]),),
    "log1p": lambda n: (_div(_num(n, 1.0), n.graph.apply("add", _num(n, 1.0), n.args[0])),),
    "sqrt": lambda n: (_div(_num(n, 0.5), n),),
    "tanh": lambda n: (_one_minus(mul(n, n)),),
    "sigmoid": lambda n: (mul(n, _one_minus(n)),),
    "sin": lambda n: (n.graph.apply("cos", n.args[0]),),
    "cos": lambda n: (neg(n.graph.apply("sin", n.args[0])),),
    "abs": lambda n: (n.graph.apply("sign", n.args[0]),),
    "sign": lambda n: (_num(n, 0.0),),
    "logaddexp": _logaddexp,
    "maximum": lambda n: _kink(n, 1.0),
    "minimum": lambda n: _kink(n, -1.0),
    "where": _where,
}


def topological(outputs: Sequence[Expr]) -> list[Expr]:
    """Every node that `outputs` need, operands first."""
    order: list[Expr] = []
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(out, False) for out in reversed(outputs)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if id(arg) not in seen)
    return order


def _selected(slope: Expr, tangent: Expr) -> Expr:
    """slope * tangent; a slope chosen by `where` selects the tangent, so 0 * inf cannot arise."""
    if slope.op == "where" and slope.args[1].is_const and slope.args[2].is_const:
        condition, yes, no = slope.args
        yes, no = mul(yes, tangent), mul(no, tangent)
        return yes if yes is no else slope.graph.apply("where", condition, yes, no)
    if tangent.op == "where" and any(branch.is_number(0.0) for branch in tangent.args[1:]):
        # Where nothing flows, an infinite slope has nothing to multiply.
        condition, yes, no = tangent.args
        return slope.graph.apply("where", condition, mul(slope, yes), mul(slope, no))
    return mul(slope, tangent)


def pushforward(outputs: Sequence[Expr], inputs: Sequence[Expr], seeds: Sequence[Expr]) -> list[Expr]:
    """Sum over j of d outputs[i] / d inputs[j] * seeds[j], for each i, by one forward sweep."""
    zero = outputs[0].graph.const(0.0)
    tangents = {id(wrt): seed for wrt, seed in zip(inputs, seeds, strict=True) if not seed.is_number(0.0)}
    for node in topological(outputs):
        if node.op in ("input", "const") or node.op in CONDITIONS:
            continue
        live = [(k, tangents[id(a)]) for k, a in enumerate(node.args) if id(a) in tangents]
        if not live:
            continue
        partials = PARTIALS[node.op](node)
        total = zero
        for k, tangent in live:
            total = add(total, _selected(partials[k], tangent))
        if not total.is_number(0.0):
            tangents[id(node)] = total
    return [tangents.get(id(out), zero) for out in outputs]


def jacobian(outputs: Sequence[Expr], inputs: Sequence[Expr]) -> list[list[Expr]]:
    """J[i][j] = d outputs[i] / d inputs[j]; entries that are structurally zero are the constant 0."""
    one = outputs[0].graph.const(1.0)
    columns = [pushforward(outputs, [wrt], [one]) for wrt in inputs]
    return [[column[i] for column in columns] for i in range(len(outputs))]


def pullback(outputs: Sequence[Expr], cotangents: Sequence[Expr], inputs: Sequence[Expr]) -> list[Expr]:
    """Sum over i of cotangents[i] * d outputs[i] / d inputs[j], for each j, by one reverse sweep."""
    graph = outputs[0].graph
    zero = graph.const(0.0)
    sums: dict[int, Expr] = {}

    def gather(node: Expr, term: Expr) -> None:
        sums[id(node)] = add(sums.get(id(node), zero), term)

    for out, cotangent in zip(outputs, cotangents, strict=True):
        gather(out, cotangent)
    for node in reversed(topological(outputs)):
        cotangent = sums.get(id(node), zero)
        if node.op in ("input", "const") or node.op in CONDITIONS or cotangent.is_number(0.0):
            continue
        for arg, slope in zip(node.args, PARTIALS[node.op](node), strict=True):
            if not arg.is_const:
                gather(arg, _selected(slope, cotangent))
    return [sums.get(id(wrt), zero) for wrt in inputs]
