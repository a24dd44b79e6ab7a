"""Triton kernels for a matrix state with a diagonal decay: chunks at once, a scan of their states, and the gradient.

Arrays are (B, T, H, K or V) without gaps, states (B·H, N, K, V) and decays (B·H, N, K) of N chunks in float32. The
scores inside a chunk are products over its halves, their halves, and so on: at each level the rows of a right half
carry the decay since the border with the left one, whose columns carry the decay up to it. All levels are products of
whole chunks with the other halves masked, since a matrix unit is quicker than bookkeeping; so are the sums of log
decays. Every exponent is a sum from a border on and none a difference, so that nothing is lost behind a strong decay.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(ptr, base, stride, first, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows `first` … of (n_rows, n_columns) in float32, zero outside."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] >= 0) & (row[:, None] < n_rows) & (column[None, :] < n_columns)
    return tl.load(ptr + base + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _put(ptr, base, stride, first, n_rows, n_columns, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < n_rows) & (column[None, :] < n_columns)
    at = ptr + base + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decays(g, base, stride, first, time, width, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Log decays (ROWS, COLUMNS), zero outside. Below -200 a decay and all its products are zero in float32."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < time) & (column[None, :] < width)
    channel = 0 * column if SHARED else column
    at = g + base + row[:, None].to(tl.int64) * stride + channel[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(x < -200.0, -200.0, x)


@triton.jit
def _sums(mask, g):
    """Sums of log decays over the steps that a row of the mask names, (ROWS, COLUMNS).

    A product with ones and zeros of the two parts that g has in float16, which together hold 22 bits.
    """
    ones = mask.to(tl.float32).to(tl.float16)
    high = g.to(tl.float16)
    return tl.dot(ones, high) + tl.dot(ones, (g - high.to(tl.float32)).to(tl.float16))


@triton.jit
def _upto(ROWS: tl.constexpr, BEFORE: tl.constexpr):
    """The steps from the chunk's start through each row's, or to before it."""
    step = tl.arange(0, ROWS)
    return step[None, :] < step[:, None] if BEFORE else step[None, :] <= step[:, None]


@triton.jit
def _behind(ROWS: tl.constexpr):
    """The steps behind each row's."""
    step = tl.arange(0, ROWS)
    return step[None, :] > step[:, None]


@triton.jit
def chunk_products(
    x, y, g, shifts, wholes, time, chunks, heads, width, height, channels,
    FROM_START: tl.constexpr, BEFORE: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Σ_t (x_t ⊙ decay) y_tᵀ of each chunk, the decay behind a step or, FROM_START, up to it; and the whole decay."""
    program = tl.program_id(0)
    n = program % chunks
    sequence = program // chunks
    head = sequence % heads
    rows = (sequence // heads).to(tl.int64) * time * heads + head
    first = n * C
    decays = _decays(g, rows * channels, heads * channels, first, time, width, SHARED, C, BK)
    if FROM_START:
        mask = _upto(C, BEFORE)
    else:
        mask = _behind(C)
    factor = tl.exp(_sums(mask, decays))
    left = _tile(x, rows * width, heads * width, first, time, width, C, BK) * factor
    at = program.to(tl.int64) * width
    for begin in range(0, height, BV):
        right = _tile(y, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        product = tl.dot(tl.trans(left), right, input_precision=PRECISION)
        _put(shifts, at * height + begin, height, 0, width, height - begin, product, BK, BV)
    if not FROM_START:
        channel = tl.arange(0, BK)
        whole = tl.exp(tl.sum(decays, 0))
        tl.store(wholes + at + channel, whole, mask=channel < width)


@triton.jit
def _join(early_map, early_shift, late_map, late_shift):
    return late_map * early_map, late_map * early_shift + late_shift


@triton.jit
def scan_chunks(
    shifts, wholes, initial, befores, final, chunks, width, height, blocks,
    REVERSE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of a sequence, R chunks at a time, in either direction of time, and the last one."""
    program = tl.program_id(0)
    sequence = (program // blocks).to(tl.int64)
    size = width * height
    entry = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    channel = entry // height
    state = tl.load(initial + sequence * size + entry, mask=inside, other=0.0)
    step = tl.arange(0, R)
    for begin in range(0, chunks, R):
        index = begin + step
        present = (index < chunks)[:, None] & inside[None, :]
        n = sequence * chunks + (chunks - 1 - index if REVERSE else index)
        maps = tl.load(wholes + n[:, None] * width + channel[None, :], mask=present, other=1.0)
        terms = tl.load(shifts + n[:, None] * size + entry[None, :], mask=present, other=0.0)
        if begin == 0:
            tl.store(befores + n[:, None] * size + entry[None, :], state[None, :] + 0.0 * terms,
                     mask=present & (index == 0)[:, None])  # fmt: skip
        maps, terms = tl.associative_scan((maps, terms), 0, _join)
        after = maps * state[None, :] + terms
        following = n[:, None] + (-1 if REVERSE else 1)
        more = present & (index + 1 < chunks)[:, None]
        tl.store(befores + following * size + entry[None, :], after, mask=more)
        state = tl.sum(tl.where((step == R - 1)[:, None], after, 0.0), 0)
    tl.store(final + sequence * size + entry, state, mask=inside)


@triton.jit
def _level(queries, keys, decays, size, BEFORE: tl.constexpr, C: tl.constexpr):
    """Queries of right halves and keys of left ones of `size` rows with their decays; then the decays, the right rows,
    the scores of this level, and the steps that each decay is of."""
    step = tl.arange(0, C)
    right = (step // size) % 2 == 1
    within = step[:, None] // size == step[None, :] // size
    if BEFORE:
        earlier = step[None, :] < step[:, None]
    else:
        earlier = step[None, :] <= step[:, None]
    later = step[None, :] > step[:, None]
    mask = within & ((right[:, None] & earlier) | ((right[:, None] == 0) & later))
    factor = tl.exp(_sums(mask, decays))
    here = (step[:, None] // (2 * size) == step[None, :] // (2 * size)) & right[:, None] & (right[None, :] == 0)
    rows = tl.where(right[:, None], queries * factor, 0.0)
    columns = tl.where(right[:, None], 0.0, keys * factor)
    return rows, columns, factor, right, here, mask


@triton.jit
def outputs(
    q, k, v, g, u, befores, o, scale, time, chunks, heads, width, height, channels,
    BEFORE: tl.constexpr, BONUS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    LEVELS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o = scale · (A v + (q e^{↑}) S) of each chunk."""
    program = tl.program_id(0)
    n = program % chunks
    sequence = program // chunks
    head = sequence % heads
    rows = (sequence // heads).to(tl.int64) * time * heads + head
    first = n * C
    base, stride = rows * channels, heads * channels
    queries = _tile(q, rows * width, heads * width, first, time, width, C, BK) * scale
    keys = _tile(k, rows * width, heads * width, first, time, width, C, BK)
    decays = _decays(g, base, stride, first, time, width, SHARED, C, BK)
    a = tl.zeros((C, C), dtype=tl.float32)
    for level in range(LEVELS):
        rights, lefts, _, _, here, _ = _level(queries, keys, decays, 1 << level, BEFORE, C)
        a += tl.where(here, tl.dot(rights, tl.trans(lefts), input_precision=PRECISION), 0.0)
    own = queries * keys
    if BONUS:
        channel = tl.arange(0, BK)
        own = own * tl.load(u + head * width + channel, mask=channel < width, other=0.0).to(tl.float32)[None, :]
    step = tl.arange(0, C)
    diagonal = tl.sum(own, 1)
    if BONUS or not BEFORE:
        a = tl.where(step[:, None] == step[None, :], diagonal[:, None], a)
    up = tl.exp(_sums(_upto(C, BEFORE), decays))
    at = program.to(tl.int64) * width * height
    for begin in range(0, height, BV):
        values = _tile(v, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        state = _tile(befores, at + begin, height, 0, width, height - begin, BK, BV)
        out = tl.dot(queries * up, state, input_precision=PRECISION)
        out += tl.dot(a, values, input_precision=PRECISION)
        _put(o, rows * height + begin, heads * height, first, time, height - begin, out, C, BV)


@triton.jit
def gradients(
    q, k, v, g, u, befores, afters, wholes, given, of_q, of_k, of_v, of_g, of_u,
    scale, time, chunks, heads, width, height, channels,
    BEFORE: tl.constexpr, BONUS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    LEVELS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Cotangents of one chunk's q, k, v, g and its part of u's; `afters` is the cotangent of the state behind it."""
    program = tl.program_id(0)
    n = program % chunks
    sequence = program // chunks
    head = sequence % heads
    rows = (sequence // heads).to(tl.int64) * time * heads + head
    first = n * C
    base, stride = rows * channels, heads * channels
    step = tl.arange(0, C)
    channel = tl.arange(0, BK)
    same = step[:, None] == step[None, :]
    queries = _tile(q, rows * width, heads * width, first, time, width, C, BK) * scale
    keys = _tile(k, rows * width, heads * width, first, time, width, C, BK)
    decays = _decays(g, base, stride, first, time, width, SHARED, C, BK)
    at = program.to(tl.int64) * width
    of_a = tl.zeros((C, C), dtype=tl.float32)
    of_rows = tl.zeros((C, BK), dtype=tl.float32)
    of_columns = tl.zeros((C, BK), dtype=tl.float32)
    of_whole = tl.zeros((BK,), dtype=tl.float32)
    for begin in range(0, height, BV):
        values = _tile(v, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        cotangent = _tile(given, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        state = _tile(befores, at * height + begin, height, 0, width, height - begin, BK, BV)
        after = _tile(afters, at * height + begin, height, 0, width, height - begin, BK, BV)
        of_a += tl.dot(cotangent, tl.trans(values), input_precision=PRECISION)
        of_rows += tl.dot(cotangent, tl.trans(state), input_precision=PRECISION)
        of_columns += tl.dot(values, tl.trans(after), input_precision=PRECISION)
        of_whole += tl.sum(state * after, 1)
    up = tl.exp(_sums(_upto(C, BEFORE), decays))
    down = tl.exp(_sums(_behind(C), decays))
    of_rows = of_rows * up
    of_columns = of_columns * down
    kept = keys * down
    whole = tl.load(wholes + at + channel, mask=channel < width, other=0.0)
    # A sum of log decays is a mask times them, so their cotangent is the transposed mask times that of the sum.
    of_decay = tl.dot(tl.trans(_upto(C, BEFORE).to(tl.float32)), queries * of_rows, input_precision=PRECISION)
    of_decay += tl.dot(tl.trans(_behind(C).to(tl.float32)), keys * of_columns, input_precision=PRECISION)
    of_decay += (of_whole * whole)[None, :]
    inside_q = tl.zeros((C, BK), dtype=tl.float32)
    inside_k = tl.zeros((C, BK), dtype=tl.float32)
    a = tl.zeros((C, C), dtype=tl.float32)
    for level in range(LEVELS):
        rights, lefts, factor, right, here, mask = _level(queries, keys, decays, 1 << level, BEFORE, C)
        a += tl.where(here, tl.dot(rights, tl.trans(lefts), input_precision=PRECISION), 0.0)
        part = tl.where(here, of_a, 0.0)
        # Rows of a right half have no part in keys, rows of a left one none in queries.
        of_right = tl.dot(part, lefts, input_precision=PRECISION)
        of_left = tl.dot(tl.trans(part), rights, input_precision=PRECISION)
        inside_q += tl.where(right[:, None], of_right * factor, 0.0)
        inside_k += tl.where(right[:, None], 0.0, of_left * factor)
        of_sums = tl.where(right[:, None], of_right * rights, of_left * lefts)
        of_decay += tl.dot(tl.trans(mask.to(tl.float32)), of_sums, input_precision=PRECISION)
    if SHARED:
        of_decay = tl.sum(of_decay, 1)[:, None]
        _put(of_g, base, stride, first, time, 1, of_decay, C, 1)
    else:
        _put(of_g, base, stride, first, time, width, of_decay, C, BK)
    diagonal = tl.sum(tl.where(same, of_a, 0.0), 1)[:, None]
    own = queries * keys
    of_q_all = inside_q + of_rows
    of_k_all = inside_k + of_columns
    if BONUS:
        bonus = tl.load(u + head * width + channel, mask=channel < width, other=0.0).to(tl.float32)[None, :]
        tl.store(of_u + at + channel, tl.sum(diagonal * own, 0), mask=channel < width)
        of_q_all += diagonal * bonus * keys
        of_k_all += diagonal * bonus * queries
        own = own * bonus
    elif not BEFORE:
        of_q_all += diagonal * keys
        of_k_all += diagonal * queries
    if BONUS or not BEFORE:
        a = tl.where(same, tl.sum(own, 1)[:, None], a)
    _put(of_q, rows * width, heads * width, first, time, width, of_q_all * scale, C, BK)
    _put(of_k, rows * width, heads * width, first, time, width, of_k_all, C, BK)
    for begin in range(0, height, BV):
        cotangent = _tile(given, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        after = _tile(afters, at * height + begin, height, 0, width, height - begin, BK, BV)
        of_values = tl.dot(tl.trans(a), cotangent, input_precision=PRECISION)
        of_values += tl.dot(kept, after, input_precision=PRECISION)
        _put(of_v, rows * height + begin, heads * height, first, time, height - begin, of_values, C, BV)


@triton.jit
def rank_one_chunks(
    r, w, k, v, a, b, maps, shifts, reads, parts, scale, time, chunks, heads, width, height,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Each chunk of a rank-one recurrence as S' = M S + N and o = Q S + P: maps M, shifts N, reads Q, parts P.

    See pararnn.linear_attention.rank_one. I - A_ab is inverted by halves: with X the inverses of its diagonal blocks
    and A₂₁ what lies beside them, the next larger blocks are X + X A₂₁ X.
    """
    program = tl.program_id(0)
    n = program % chunks
    sequence = program // chunks
    head = sequence % heads
    rows = (sequence // heads).to(tl.int64) * time * heads + head
    first = n * C
    base, stride = rows * width, heads * width
    queries = _tile(r, base, stride, first, time, width, C, BK) * scale
    keys = _tile(k, base, stride, first, time, width, C, BK)
    listens = _tile(a, base, stride, first, time, width, C, BK)
    writes = _tile(b, base, stride, first, time, width, C, BK)
    decays = _decays(w, base, stride, first, time, width, False, C, BK)
    step = tl.arange(0, C)
    channel = tl.arange(0, BK)
    same = step[:, None] == step[None, :]
    later = step[None, :] > step[:, None]
    rk = tl.where(same, tl.sum(queries * keys, 1)[:, None], 0.0)
    rb = tl.where(same, tl.sum(queries * writes, 1)[:, None], 0.0)
    ak = tl.zeros((C, C), dtype=tl.float32)
    inverse = tl.where(same, 1.0, tl.zeros((C, C), dtype=tl.float32))
    for level in range(LEVELS):
        size = 1 << level
        right = ((step // size) % 2 == 1)[:, None]
        within = step[:, None] // size == step[None, :] // size
        here = (step[:, None] // (2 * size) == step[None, :] // (2 * size)) & right & ((step // size) % 2 == 0)[None, :]
        upto = tl.exp(_sums(within & (later == 0), decays))
        before = tl.exp(_sums(within & (later == 0) & (same == 0), decays))
        after = tl.exp(_sums(within & later, decays))
        up = tl.where(right, queries * upto, 0.0)
        listening = tl.where(right, listens * before, 0.0)
        left = tl.trans(tl.where(right, 0.0, keys * after))
        writing = tl.trans(tl.where(right, 0.0, writes * after))
        rk += tl.where(here, tl.dot(up, left, input_precision=PRECISION), 0.0)
        rb += tl.where(here, tl.dot(up, writing, input_precision=PRECISION), 0.0)
        ak += tl.where(here, tl.dot(listening, left, input_precision=PRECISION), 0.0)
        beside = tl.where(here, tl.dot(listening, writing, input_precision="tf32x3"), 0.0)
        grown = tl.dot(beside, inverse, input_precision="tf32x3")
        inverse += tl.dot(inverse, grown, input_precision="tf32x3")
    before = listens * tl.exp(_sums((later == 0) & (same == 0), decays))
    after = tl.exp(_sums(later, decays))
    kept = tl.trans(keys * after)
    written = tl.trans(writes * after)
    effect = tl.dot(inverse, before, input_precision=PRECISION)
    whole = tl.exp(tl.sum(decays, 0))
    chunk_map = tl.where(channel[:, None] == channel[None, :], whole[:, None], 0.0)
    chunk_map += tl.dot(written, effect, input_precision=PRECISION)
    at = program.to(tl.int64) * width
    _put(maps, at * width, width, 0, width, width, chunk_map, BK, BK)
    read = queries * tl.exp(_sums(later == 0, decays)) + tl.dot(rb, effect, input_precision=PRECISION)
    # By sequence and chunk, with room for whole chunks.
    place = program.to(tl.int64) * C
    _put(reads, place * width, width, 0, C, width, read, C, BK)
    for begin in range(0, height, BV):
        values = _tile(v, rows * height + begin, heads * height, first, time, height - begin, C, BV)
        heard = tl.dot(ak, values, input_precision=PRECISION)
        own = tl.dot(inverse, heard, input_precision=PRECISION)
        shift = tl.dot(kept, values, input_precision=PRECISION) + tl.dot(written, own, input_precision=PRECISION)
        _put(shifts, at * height + begin, height, 0, width, height - begin, shift, BK, BV)
        part = tl.dot(rk, values, input_precision=PRECISION) + tl.dot(rb, own, input_precision=PRECISION)
        _put(parts, place * height + begin, height, 0, C, height - begin, part, C, BV)
