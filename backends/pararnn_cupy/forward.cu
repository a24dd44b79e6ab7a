// The forward kernels. One thread runs one channel of one segment, so no thread of a block waits for another.
//
// plain_pass guesses each start by warm-up steps, or takes the caller's guess, and runs the segment. rerun_pass runs a segment again whose start is
// not, bit for bit, the end before it, until it meets what is stored; a channel in which no end changed thereby has
// joints that all match, and its states are the time loop's. The channels still open go through tangent_pass, whose
// last thread to arrive at a channel tests its joints and corrects its starts, and on the last launch walks, in order
// and exactly, what is open even then. Nothing waits for the host. time_loop is the loop itself.
//
// Layouts: gates (B, T, GATES, D), states (B, T, SLOTS, D), joints [entry](B, C, D), channels (B, D).

struct Place
{
    index_t b, c, channel, joint;
    int d;
    bool on;
};

// The lane of this thread among B x C x D.
__device__ __forceinline__ Place place_of(index_t B, index_t C, index_t D)
{
    const index_t lane = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
    Place at;
    at.on = lane < B * C * D;
    at.d = (int)(lane % D);
    at.c = lane / D % C;
    at.b = lane / D / C;
    at.channel = at.b * D + at.d;
    at.joint = lane;
    return at;
}

__device__ __forceinline__ void load_channel(work_t (&p)[PARAM_PLACES], work_t (&bias)[GATES], const work_t *params,
                                             const work_t *biases, index_t D, int d)
{
#pragma unroll
    for (int k = 0; k < PARAMS; k++) p[k] = params[k * D + d];
#pragma unroll
    for (int k = 0; k < GATES; k++) bias[k] = biases ? biases[k * D + d] : work_t(0);
}

__device__ __forceinline__ void load_start(work_t (&s)[SLOTS], const work_t *h0, index_t b, index_t D, int d)
{
#pragma unroll
    for (int k = 0; k < SLOTS; k++) s[k] = h0 ? h0[(b * SLOTS + k) * D + d] : work_t(0);
}

template <int COUNT>
__device__ __forceinline__ void put(work_t *joints, const work_t (&v)[COUNT], index_t joint, index_t lanes)
{
#pragma unroll
    for (int k = 0; k < COUNT; k++) joints[k * lanes + joint] = v[k];
}

template <int COUNT>
__device__ __forceinline__ void take(work_t (&v)[COUNT], const work_t *joints, index_t joint, index_t lanes)
{
#pragma unroll
    for (int k = 0; k < COUNT; k++) v[k] = joints[k * lanes + joint];
}

template <int COUNT>
__device__ __forceinline__ void take_fresh(work_t (&v)[COUNT], const work_t *joints, index_t joint, index_t lanes)
{
#pragma unroll
    for (int k = 0; k < COUNT; k++) v[k] = fresh(joints + k * lanes + joint);
}

__device__ __forceinline__ bool all_same(const work_t (&a)[SLOTS], const work_t (&b)[SLOTS])
{
    bool equal = true;
#pragma unroll
    for (int k = 0; k < SLOTS; k++) equal = equal && same(a[k], b[k]);
    return equal;
}

// What a step reads of one row: gate inputs as they are stored, the number of the start that is loaded before it (or a
// negative one), and whether it is padding.
struct Raw
{
    store_t g[GATES];
#if HAS_HEAD
    int head;
#endif
#if HAS_HOLD
    unsigned char hold;
#endif
};

// Heads (B, T), the starts that they load (N, SLOTS, D), and padding (B, T).
struct Told
{
    const int *head;
    const work_t *starts;
    const unsigned char *hold;
};

// The rows of one channel, read through pointers that move along time.
struct Rows
{
    const store_t *at;
    Told told;
    index_t width;
    int D, d;

    __device__ __forceinline__ Rows(const store_t *gates, const Told &rows, index_t b, index_t T, index_t row,
                                    index_t channels, int channel)
        : at(gates + (b * T + row) * GATES * channels + channel), told(rows), width(channels), D((int)channels),
          d(channel)
    {
        if (HAS_HEAD) told.head += b * T + row;
        if (HAS_HOLD) told.hold += b * T + row;
    }

    __device__ __forceinline__ void load(Raw &raw, int ahead) const
    {
#pragma unroll
        for (int k = 0; k < GATES; k++) raw.g[k] = at[(ahead * GATES + k) * D];
#if HAS_HEAD
        raw.head = told.head[ahead];
#endif
#if HAS_HOLD
        raw.hold = told.hold[ahead];
#endif
    }

    __device__ __forceinline__ void move(index_t rows)
    {
        at += rows * GATES * width;
        if (HAS_HEAD) told.head += rows;
        if (HAS_HOLD) told.hold += rows;
    }

    // The step's operands: gates, then what it is told.
    __device__ __forceinline__ void value(work_t (&g)[ROWS], const Raw &raw, const work_t (&bias)[GATES]) const
    {
#pragma unroll
        for (int k = 0; k < GATES; k++) g[k] = widen(raw.g[k]) + bias[k];
#if HAS_HEAD
        g[GATES] = raw.head >= 0 ? work_t(1) : work_t(0);
#endif
#if HAS_STARTS
#pragma unroll
        for (int k = 0; k < SLOTS; k++)
            g[GATES + 1 + k] = raw.head >= 0 ? told.starts[((index_t)raw.head * SLOTS + k) * width + d] : work_t(0);
#endif
#if HAS_HOLD
        g[ROWS - 1] = raw.hold ? work_t(1) : work_t(0);
#endif
    }
};

// Calls step(g, row) for rows first ... stop - 1. A group of rows is loaded while the group before it is computed.
template <class Step>
__device__ __forceinline__ void for_rows(Rows rows, const work_t (&bias)[GATES], index_t first, index_t stop,
                                         const Step &step)
{
    Raw next[AHEAD], now[AHEAD];
    work_t g[ROWS];
    index_t row = first;
    if (row + AHEAD <= stop)
    {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) rows.load(next[u], u);
        while (row + AHEAD <= stop)
        {
#pragma unroll
            for (int u = 0; u < AHEAD; u++) now[u] = next[u];
            rows.move(AHEAD);
            if (row + 2 * AHEAD <= stop)
            {
#pragma unroll
                for (int u = 0; u < AHEAD; u++) rows.load(next[u], u);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
            {
                rows.value(g, now[u], bias);
                step(g, row + u);
            }
            row += AHEAD;
        }
    }
#pragma unroll 1
    for (; row < stop; row++)
    {
        rows.load(now[0], 0);
        rows.move(1);
        rows.value(g, now[0], bias);
        step(g, row);
    }
}

struct States
{
    store_t *at;
    index_t D;

    __device__ __forceinline__ States(store_t *states, index_t b, index_t T, index_t width, int d)
        : at(states + b * T * SLOTS * width + d), D(width)
    {
    }

    __device__ __forceinline__ void write(const work_t (&s)[SLOTS], index_t row) const
    {
#pragma unroll
        for (int k = 0; k < SLOTS; k++) narrow(s[k], at + (row * SLOTS + k) * D);
    }

    __device__ __forceinline__ const store_t *operator()(index_t row, int slot) const
    {
        return at + (row * SLOTS + slot) * D;
    }
};

extern "C" __global__ void time_loop(const store_t *gates, const work_t *biases, const work_t *h0,
                                     const work_t *params, const int *heads, const work_t *begun,
                                     const unsigned char *held, store_t *states, work_t *estimate, int *walked,
                                     int *rounds, index_t B, index_t T, index_t D)
{
    const Place at = place_of(B, 1, D);
    if (!at.on) return;
    const Told told = {heads, begun, held};
    work_t s[SLOTS], p[PARAM_PLACES], bias[GATES];
    load_channel(p, bias, params, biases, D, at.d);
    load_start(s, h0, at.b, D, at.d);
    const States out(states, at.b, T, D, at.d);
    for_rows(Rows(gates, told, at.b, T, 0, D, at.d), bias, 0, T, [&](const work_t(&g)[ROWS], index_t row) {
        advance(s, g, p);
        out.write(s, row);
    });
    estimate[at.channel] = work_t(0);
    walked[at.channel] = rounds[at.channel] = 0;
}

extern "C" __global__ void plain_pass(const store_t *gates, const work_t *biases, const work_t *h0,
                                      const work_t *params, const int *heads, const work_t *begun,
                                      const unsigned char *held, const work_t *guess, store_t *states, work_t *starts,
                                      work_t *ends, int *opened, int *counters, work_t *estimate, int *walked,
                                      int *rounds, index_t B, index_t T, index_t D, index_t L, index_t C, index_t W)
{
    const Place at = place_of(B, C, D);
    if (!at.on) return;
    const Told told = {heads, begun, held};
    const index_t lanes = B * C * D, begin = at.c * L, stop = begin + L < T ? begin + L : T;
    const index_t first = guess ? begin : begin > W ? begin - W : 0;
    work_t s[SLOTS], p[PARAM_PLACES], bias[GATES];
    load_channel(p, bias, params, biases, D, at.d);
    // A warm-up that reaches back to the beginning starts from the true state.
    if (guess && begin > 0)
    {
#pragma unroll
        for (int k = 0; k < SLOTS; k++) s[k] = guess[((at.b * T + begin - 1) * SLOTS + k) * D + at.d];
    }
    else load_start(s, first == 0 ? h0 : (const work_t *)0, at.b, D, at.d);
    const States out(states, at.b, T, D, at.d);
    if (begin == first) put(starts, s, at.joint, lanes);
    for_rows(Rows(gates, told, at.b, T, first, D, at.d), bias, first, stop, [&](const work_t(&g)[ROWS], index_t row) {
        advance(s, g, p);
        if (row >= begin) out.write(s, row);
        else if (row == begin - 1) put(starts, s, at.joint, lanes);
    });
    put(ends, s, at.joint, lanes);
    if (at.c == 0)
    {
        opened[at.channel] = counters[at.channel] = walked[at.channel] = rounds[at.channel] = 0;
        estimate[at.channel] = work_t(0);
    }
}

// Runs rows first ... stop - 1 from s, or until the states are those that were run from `old` before: then true. A
// state that has met the other follows it ever after. Stored halves do not show all bits of a state, so for them the
// old states are run again beside the new ones.
__device__ __forceinline__ bool rerun(const store_t *gates, const Told &told, const States &states, const work_t (&bias)[GATES],
                                      const work_t (&p)[PARAM_PLACES], work_t (&s)[SLOTS], work_t (&old)[SLOTS],
                                      index_t b, index_t T, index_t first, index_t stop, index_t D, int d)
{
    constexpr int GROUP = AHEAD < 4 ? AHEAD : 4;
    Rows rows(gates, told, b, T, first, D, d);
    for (index_t row = first; row < stop; row += GROUP)
    {
        Raw raw[GROUP];
#if STORED_AS_COMPUTED
        store_t stored[GROUP][SLOTS];
#endif
        bool met = false;
#pragma unroll
        for (int u = 0; u < GROUP; u++)
        {
            if (row + u >= stop) break;
            rows.load(raw[u], u);
#if STORED_AS_COMPUTED
#pragma unroll
            for (int k = 0; k < SLOTS; k++) stored[u][k] = fresh(states(row + u, k));
#endif
        }
        rows.move(GROUP);
#pragma unroll
        for (int u = 0; u < GROUP; u++)
        {
            if (row + u >= stop) break;
            work_t g[ROWS];
            rows.value(g, raw[u], bias);
            advance(s, g, p);
            states.write(s, row + u);
#if STORED_AS_COMPUTED
#pragma unroll
            for (int k = 0; k < SLOTS; k++) old[k] = stored[u][k];
#else
            advance(old, g, p);
#endif
            met = all_same(s, old);
        }
        if (met) return true;
    }
    return false;
}

extern "C" __global__ void rerun_pass(const store_t *gates, const work_t *biases, const work_t *params,
                                      const int *heads, const work_t *begun, const unsigned char *held, store_t *states, const work_t *starts, const work_t *ends, work_t *new_ends,
                                      int *opened, index_t B, index_t T, index_t D, index_t L, index_t C)
{
    const Place at = place_of(B, C, D);
    if (!at.on) return;
    const Told told = {heads, begun, held};
    const index_t lanes = B * C * D, begin = at.c * L, stop = begin + L < T ? begin + L : T;
    work_t s[SLOTS], e[SLOTS], start[SLOTS];
    take(e, ends, at.joint, lanes);
    bool changed = false;
    if (at.c > 0)
    {
        take(s, ends, at.joint - D, lanes);
        take(start, starts, at.joint, lanes);
        if (!all_same(s, start))
        {
            work_t p[PARAM_PLACES], bias[GATES];
            load_channel(p, bias, params, biases, D, at.d);
            const States out(states, at.b, T, D, at.d);
            if (!rerun(gates, told, out, bias, p, s, start, at.b, T, begin, stop, D, at.d))
            {
                changed = !all_same(s, e);
#pragma unroll
                for (int k = 0; k < SLOTS; k++) e[k] = s[k];
            }
        }
    }
    put(new_ends, e, at.joint, lanes);
    // The segment after this one was run from the old end.
    if (changed && at.c + 1 < C) opened[at.channel] = 1;
}

// The exact finish of one channel: segments in order, run again from the true start until they meet what is stored.
__device__ __noinline__ int walk(const store_t *gates, const Told &told, const work_t *biases, const work_t *params,
                                 store_t *states, const work_t *starts, const work_t *ends, const Place &at, index_t B, index_t T,
                                 index_t D, index_t L, index_t C)
{
    const index_t lanes = B * C * D, first = at.b * C * D + at.d;
    work_t s[SLOTS], start[SLOTS], p[PARAM_PLACES], bias[GATES];
    load_channel(p, bias, params, biases, D, at.d);
    const States out(states, at.b, T, D, at.d);
    take_fresh(s, starts, first, lanes);
    int count = 0;
    for (index_t c = 0; c < C; c++)
    {
        const index_t begin = c * L, stop = begin + L < T ? begin + L : T;
        take_fresh(start, starts, first + c * D, lanes);
        bool met = all_same(s, start);
        if (!met)
        {
            met = rerun(gates, told, out, bias, p, s, start, at.b, T, begin, stop, D, at.d);
            count++;
        }
        if (met) take_fresh(s, ends, first + c * D, lanes);
    }
    return count;
}

struct Joint
{
    work_t m[ENTRIES], w[ENTRIES], z[SLOTS], e[SLOTS], following[SLOTS];
};

__device__ __forceinline__ void load_joint(Joint &j, const work_t *prods, const work_t *grows, const work_t *sizes,
                                           const work_t *ends, const work_t *starts, index_t joint, index_t lanes,
                                           index_t D, bool last)
{
    take_fresh(j.m, prods, joint, lanes);
    take_fresh(j.w, grows, joint, lanes);
    take_fresh(j.z, sizes, joint, lanes);
    take_fresh(j.e, ends, joint, lanes);
    // After the last segment stands its own end.
    if (last) take_fresh(j.following, ends, joint, lanes);
    else take_fresh(j.following, starts, joint + D, lanes);
}

// Tests the joints of one channel and corrects its starts; returns whether it is still open.
__device__ __noinline__ bool join(const work_t *prods, const work_t *grows, const work_t *sizes, const work_t *ends,
                                  work_t *starts, unsigned char *stale, work_t *estimate, const Place &at, index_t B,
                                  index_t D, index_t C, work_t tol, work_t accept, bool correcting)
{
    const index_t lanes = B * C * D, first = at.b * C * D + at.d;
    work_t d[SLOTS], n[SLOTS], moved[SLOTS], worst[SLOTS], largest[SLOTS], lo[SLOTS], hi[SLOTS], start[SLOTS];
    take_fresh(start, starts, first, lanes);
    box(lo, hi, start);
#pragma unroll
    for (int k = 0; k < SLOTS; k++) d[k] = n[k] = moved[k] = worst[k] = largest[k] = work_t(0);
    bool exact = true;
    Joint next;
    load_joint(next, prods, grows, sizes, ends, starts, first, lanes, D, C == 1);
    for (index_t c = 0; c < C; c++)
    {
        const Joint now = next;
        const index_t joint = first + c * D;
        if (c + 1 < C) load_joint(next, prods, grows, sizes, ends, starts, joint + D, lanes, D, c + 2 == C);
        work_t inside[SLOTS], reach[SLOTS], shift[SLOTS], f[SLOTS], corrected[SLOTS];
        exact = exact && all_same(now.e, now.following);
        // Rounding is relative to how large a slot is inside the segment where it happens.
#pragma unroll
        for (int k = 0; k < SLOTS; k++)
        {
            const work_t size = magnitude(start[k]);
            reach[k] = size < infinity() ? larger(now.z[k], size) : now.z[k];
        }
        through(inside, now.w, reach);
#pragma unroll
        for (int k = 0; k < SLOTS; k++)
        {
            f[k] = ROUNDING * larger(inside[k], reach[k]);
            largest[k] = larger(largest[k], now.z[k]);
            shift[k] = magnitude(d[k]);
            reach[k] = shift[k] + n[k];
        }
        through(inside, now.w, shift);
#pragma unroll
        for (int k = 0; k < SLOTS; k++) moved[k] = larger(moved[k], inside[k]);
        through(inside, now.w, reach);
#pragma unroll
        for (int k = 0; k < SLOTS; k++) worst[k] = larger(worst[k], inside[k] + f[k]);
        correct(d, n, corrected, now.m, now.e, now.following, f, lo, hi);
        if (correcting && c + 1 < C)
        {
            put(starts, corrected, joint + D, lanes);
            stale[joint + D] = !all_same(corrected, now.following);
        }
#pragma unroll
        for (int k = 0; k < SLOTS; k++) start[k] = now.following[k];
    }
    stale[first] = 0;
    work_t scale[SLOTS], error = 0;
    measure(scale, largest);
    bool good = true;
#pragma unroll
    for (int k = 0; k < SLOTS; k++)
    {
        good = good && moved[k] <= tol * scale[k] && worst[k] <= accept * scale[k];
        error = larger(error, worst[k] / scale[k]);
    }
    estimate[at.channel] = exact ? work_t(0) : error;
    return !(good || exact);
}

extern "C" __global__ void tangent_pass(const store_t *gates, const work_t *biases, const work_t *params,
                                        const int *heads, const work_t *begun, const unsigned char *held,
                                        store_t *states, work_t *starts, work_t *ends, const work_t *new_ends,
                                        work_t *prods, work_t *grows, work_t *sizes, unsigned char *stale, int *opened,
                                        int *counters, work_t *estimate, int *walked, int *rounds, index_t B,
                                        index_t T, index_t D, index_t L, index_t C, index_t is_first, index_t is_last,
                                        double tol, double accept)
{
    const Place at = place_of(B, C, D);
    if (!at.on || !opened[at.channel]) return;
    const Told told = {heads, begun, held};
    const index_t lanes = B * C * D, begin = at.c * L, stop = begin + L < T ? begin + L : T;
    if (is_first || stale[at.joint])
    {
        work_t s[SLOTS], m[ENTRIES], w[ENTRIES], z[SLOTS], p[PARAM_PLACES], bias[GATES];
        load_channel(p, bias, params, biases, D, at.d);
        if (is_first && at.c > 0)
        {
            take(s, new_ends, at.joint - D, lanes);
            put(starts, s, at.joint, lanes);
        }
        else take(s, starts, at.joint, lanes);
        identity(m);
        identity(w);
#pragma unroll
        for (int k = 0; k < SLOTS; k++) z[k] = work_t(0);
        const States out(states, at.b, T, D, at.d);
        for_rows(Rows(gates, told, at.b, T, begin, D, at.d), bias, begin, stop, [&](const work_t(&g)[ROWS], index_t row) {
            advance_tangent(s, m, w, g, p);
            out.write(s, row);
            // The scale is that of the finite results: a start far outside what follows must not hide errors.
#pragma unroll
            for (int k = 0; k < SLOTS; k++)
            {
                const work_t size = magnitude(s[k]);
                z[k] = size < infinity() && size > z[k] ? size : z[k];
            }
        });
        put(ends, s, at.joint, lanes);
        put(prods, m, at.joint, lanes);
        put(grows, w, at.joint, lanes);
        put(sizes, z, at.joint, lanes);
    }
    // The thread that arrives last at its channel sees what all others wrote.
    __threadfence();
    if (atomicAdd(counters + at.channel, 1) != (int)(C - 1)) return;
    __threadfence();
    counters[at.channel] = 0;
    rounds[at.channel] += 1;
    bool open = join(prods, grows, sizes, ends, starts, stale, estimate, at, B, D, C, (work_t)tol, (work_t)accept,
                     !is_last);
    if (open && is_last)
    {
        walked[at.channel] = walk(gates, told, biases, params, states, starts, ends, at, B, T, D, L, C);
        estimate[at.channel] = work_t(0);
        open = false;
    }
    opened[at.channel] = open;
}
