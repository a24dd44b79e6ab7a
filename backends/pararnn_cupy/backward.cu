// The backward kernels. adjoint_maps sweeps each segment from its end, the cotangent after it unknown, as an affine
// map; join_maps joins the maps from right to left; back_propagate sweeps once more with the right cotangents, writes
// those of the gate inputs, and adds up those of the parameters and the bias.

struct Sweep
{
    Rows rows;
    const store_t *states, *cotangent;
    index_t first, D;

    struct Step
    {
        Raw inputs;
        store_t s[SLOTS], c[SLOTS];
    };

    // From row `begin` on.
    __device__ __forceinline__ Sweep(const store_t *gates, const Told &told, const store_t *all_states,
                                     const store_t *all_cotangents, index_t b, index_t T, index_t begin, index_t width,
                                     int d)
        : rows(gates, told, b, T, begin, width, d), states(all_states + b * T * SLOTS * width + d),
          cotangent(all_cotangents + b * T * SLOTS * width + d), first(begin), D(width)
    {
    }

    __device__ __forceinline__ void load(Step &raw, index_t row) const
    {
        Rows here = rows;
        here.move(row - first);
        here.load(raw.inputs, 0);
#pragma unroll
        for (int k = 0; k < SLOTS; k++)
        {
            // The state before row 0 is the start, which is not stored here; any row will do in its place.
            raw.s[k] = states[((row > 0 ? row - 1 : 0) * SLOTS + k) * D];
            raw.c[k] = cotangent[(row * SLOTS + k) * D];
        }
    }

    // Calls take(s, g, c, row) for rows stop - 1 ... begin; s is the state before the row.
    template <class Take>
    __device__ __forceinline__ void run(const work_t (&bias)[GATES], const work_t (&start)[SLOTS], index_t stop,
                                        const Take &take) const
    {
        Step next[AHEAD_BACK], now[AHEAD_BACK];
        index_t row = stop - 1;
        const index_t whole = (stop - first) / AHEAD_BACK;
        if (whole > 0)
        {
#pragma unroll
            for (int u = 0; u < AHEAD_BACK; u++) load(next[u], row - u);
        }
        for (index_t turn = 0; turn < whole; turn++)
        {
#pragma unroll
            for (int u = 0; u < AHEAD_BACK; u++) now[u] = next[u];
            if (turn + 1 < whole)
            {
#pragma unroll
                for (int u = 0; u < AHEAD_BACK; u++) load(next[u], row - AHEAD_BACK - u);
            }
#pragma unroll
            for (int u = 0; u < AHEAD_BACK; u++) one(bias, start, now[u], row - u, take);
            row -= AHEAD_BACK;
        }
#pragma unroll 1
        for (; row >= first; row--)
        {
            load(now[0], row);
            one(bias, start, now[0], row, take);
        }
    }

    template <class Take>
    __device__ __forceinline__ void one(const work_t (&bias)[GATES], const work_t (&start)[SLOTS], const Step &raw,
                                        index_t row, const Take &take) const
    {
        work_t s[SLOTS], g[ROWS], c[SLOTS];
        rows.value(g, raw.inputs, bias);
#pragma unroll
        for (int k = 0; k < SLOTS; k++)
        {
            s[k] = row > 0 ? widen(raw.s[k]) : start[k];
            c[k] = widen(raw.c[k]);
        }
        take(s, g, c, row);
    }
};

extern "C" __global__ void adjoint_maps(const store_t *gates, const work_t *biases, const work_t *h0,
                                        const work_t *params, const int *heads, const work_t *begun,
                                        const unsigned char *held, const store_t *states, const store_t *cotangent,
                                        work_t *maps, work_t *offsets, index_t B, index_t T, index_t D, index_t L,
                                        index_t C)
{
    const Place at = place_of(B, C, D);
    if (!at.on) return;
    const Told told = {heads, begun, held};
    const index_t lanes = B * C * D, begin = at.c * L, stop = begin + L < T ? begin + L : T;
    work_t n[ENTRIES], b[OFFSETS], start[SLOTS], p[PARAM_PLACES], bias[GATES];
    load_channel(p, bias, params, biases, D, at.d);
    load_start(start, h0, at.b, D, at.d);
    adjoint_identity(n);
#pragma unroll
    for (int k = 0; k < OFFSETS; k++) b[k] = work_t(0);
    Sweep(gates, told, states, cotangent, at.b, T, begin, D, at.d)
        .run(bias, start, stop,
             [&](const work_t(&s)[SLOTS], const work_t(&g)[ROWS], const work_t(&c)[SLOTS], index_t) {
                 adjoint_map_step(n, b, s, c, g, p);
             });
    put(maps, n, at.joint, lanes);
    put(offsets, b, at.joint, lanes);
}

// One thread for each channel: futures are the cotangents that come into each segment from behind it.
extern "C" __global__ void join_maps(const work_t *maps, const work_t *offsets, work_t *futures, work_t *grad_h0,
                                     index_t B, index_t D, index_t C)
{
    constexpr int GROUP = ENTRIES + SLOTS > 6 ? 2 : 8;
    const Place at = place_of(B, 1, D);
    if (!at.on) return;
    const index_t lanes = B * C * D, first = at.b * C * D + at.d;
    work_t v[SLOTS];
#pragma unroll
    for (int k = 0; k < SLOTS; k++) v[k] = work_t(0);
    for (index_t c = C - 1; c >= 0; c -= GROUP)
    {
        work_t n[GROUP][ENTRIES], b[GROUP][OFFSETS];
#pragma unroll
        for (int u = 0; u < GROUP; u++)
        {
            if (c - u < 0) break;
            take(n[u], maps, first + (c - u) * D, lanes);
            take(b[u], offsets, first + (c - u) * D, lanes);
        }
#pragma unroll
        for (int u = 0; u < GROUP; u++)
        {
            if (c - u < 0) break;
            put(futures, v, first + (c - u) * D, lanes);
            adjoint_joint(v, n[u], b[u]);
        }
    }
#pragma unroll
    for (int k = 0; k < SLOTS; k++) grad_h0[(at.b * SLOTS + k) * D + at.d] = v[k];
}

// The cotangents of the gate inputs may be written over them: a thread reads its rows before it writes them.
// Without futures there is one segment, and its cotangent at the front is that of h0.
extern "C" __global__ void back_propagate(const store_t *gates, const work_t *biases, const work_t *h0,
                                          const work_t *params, const int *heads, const work_t *begun,
                                        const unsigned char *held, const store_t *states, const store_t *cotangent,
                                          const work_t *futures, work_t *grad_h0, store_t *grad_gates, work_t *sums,
                                          work_t *grad_starts, index_t B, index_t T, index_t D, index_t L, index_t C,
                                          index_t documents)
{
    const Place at = place_of(B, C, D);
    if (!at.on) return;
    const Told told = {heads, begun, held};
    const index_t lanes = B * C * D, begin = at.c * L, stop = begin + L < T ? begin + L : T;
    work_t b[SLOTS], start[SLOTS], p[PARAM_PLACES], bias[GATES], total[PARAM_PLACES], gate_total[GATES];
    load_channel(p, bias, params, biases, D, at.d);
    load_start(start, h0, at.b, D, at.d);
#pragma unroll
    for (int k = 0; k < SLOTS; k++) b[k] = futures ? futures[k * lanes + at.joint] : work_t(0);
#pragma unroll
    for (int k = 0; k < PARAM_PLACES; k++) total[k] = work_t(0);
#pragma unroll
    for (int k = 0; k < GATES; k++) gate_total[k] = work_t(0);
    store_t *out = grad_gates + at.b * T * GATES * D + at.d;
    Sweep(gates, told, states, cotangent, at.b, T, begin, D, at.d)
        .run(bias, start, stop,
             [&](const work_t(&s)[SLOTS], const work_t(&g)[ROWS], const work_t(&c)[SLOTS], index_t row) {
                 work_t o[DRAWN], a[PARAM_PLACES];
                 back_propagate_step(b, o, a, s, c, g, p);
#pragma unroll
                 for (int k = 0; k < PARAMS; k++) total[k] += a[k];
#pragma unroll
                 for (int k = 0; k < GATES; k++)
                 {
                     gate_total[k] += o[k];
                     narrow(o[k], out + (row * GATES + k) * D);
                 }
#if HAS_STARTS
                 // One step loads a start; those behind the documents' are shared, and nobody asks for their gradient.
                 const index_t number = heads[at.b * T + row];
                 if (number >= 0 && number < documents)
                 {
#pragma unroll
                     for (int k = 0; k < SLOTS; k++)
                         grad_starts[(number * SLOTS + k) * D + at.d] = o[GATES + k];
                 }
#endif
             });
    // Partial sums by segment, added up later in a fixed order: atomics would make gradients depend on timing.
#pragma unroll
    for (int k = 0; k < PARAMS; k++) sums[k * lanes + at.joint] = total[k];
#pragma unroll
    for (int k = 0; k < GATES; k++) sums[(PARAMS + k) * lanes + at.joint] = gate_total[k];
    if (!futures)
    {
#pragma unroll
        for (int k = 0; k < SLOTS; k++) grad_h0[(at.b * SLOTS + k) * D + at.d] = b[k];
    }
}
