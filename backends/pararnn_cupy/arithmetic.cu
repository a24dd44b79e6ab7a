// Numbers: how they are stored, computed in and widened, and the functions that a cell's step may call.
// No header is included, so that NVRTC needs none. NaN is a value here: no comparison turns it into a number.

typedef long long index_t;

#if WORK_IS_DOUBLE
typedef double work_t;
#else
typedef float work_t;
#endif

// Half precision as bits: only loads and stores know what they mean.
struct half_bits { unsigned short bits; };
struct brain_bits { unsigned short bits; };

#ifdef __CUDACC__
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse_square_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(unsigned short bits)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

__device__ __forceinline__ unsigned short float_to_half(float x)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float bits_to_float(unsigned int bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned int float_to_bits(float x) { return __float_as_uint(x); }
#endif

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(half_bits x) { return half_to_float(x.bits); }
__device__ __forceinline__ float widen(brain_bits x) { return bits_to_float((unsigned int)x.bits << 16); }

__device__ __forceinline__ void narrow(float x, float *to) { *to = x; }
__device__ __forceinline__ void narrow(double x, double *to) { *to = x; }
__device__ __forceinline__ void narrow(float x, half_bits *to) { to->bits = float_to_half(x); }

// To nearest, ties to even, in integers: cards before compute capability 8.0 have no instruction for it.
__device__ __forceinline__ void narrow(float x, brain_bits *to)
{
    const unsigned int bits = float_to_bits(x);
    const bool is_nan = x != x;
    to->bits = (unsigned short)(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Reads that must see what other threads of the same launch have written.
__device__ __forceinline__ float fresh(const float *at) { return *(const volatile float *)at; }
__device__ __forceinline__ double fresh(const double *at) { return *(const volatile double *)at; }
__device__ __forceinline__ half_bits fresh(const half_bits *at)
{
    return half_bits{((const volatile half_bits *)at)->bits};
}
__device__ __forceinline__ brain_bits fresh(const brain_bits *at)
{
    return brain_bits{((const volatile brain_bits *)at)->bits};
}

__device__ __forceinline__ bool same(work_t a, work_t b) { return a == b || (a != a && b != b); }
__device__ __forceinline__ work_t larger(work_t a, work_t b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ work_t smaller(work_t a, work_t b) { return a < b || a != a ? a : b; }
__device__ __forceinline__ work_t sign(work_t x) { return x > 0 ? work_t(1) : x < 0 ? work_t(-1) : x; }

#if WORK_IS_DOUBLE
__device__ __forceinline__ work_t fused(work_t a, work_t b, work_t c) { return fma(a, b, c); }
__device__ __forceinline__ work_t infinity() { return 1e308 * 10.0; }
__device__ __forceinline__ work_t exponential(work_t x) { return exp(x); }
__device__ __forceinline__ work_t exponential_minus_one(work_t x) { return expm1(x); }
__device__ __forceinline__ work_t logarithm(work_t x) { return log(x); }
__device__ __forceinline__ work_t logarithm_of_one_plus(work_t x) { return log1p(x); }
__device__ __forceinline__ work_t square_root(work_t x) { return sqrt(x); }
__device__ __forceinline__ work_t sine(work_t x) { return sin(x); }
__device__ __forceinline__ work_t cosine(work_t x) { return cos(x); }
__device__ __forceinline__ work_t magnitude(work_t x) { return fabs(x); }
__device__ __forceinline__ work_t power(work_t a, work_t b) { return pow(a, b); }
__device__ __forceinline__ work_t hyperbolic_tangent(work_t x) { return tanh(x); }
__device__ __forceinline__ work_t sigmoid(work_t x) { return 1.0 / (1.0 + exp(-x)); }
#else
__device__ __forceinline__ work_t fused(work_t a, work_t b, work_t c) { return fmaf(a, b, c); }
__device__ __forceinline__ work_t infinity() { return 1e38f * 10.0f; }
__device__ __forceinline__ work_t exponential(work_t x) { return expf(x); }
__device__ __forceinline__ work_t exponential_minus_one(work_t x) { return expm1f(x); }
__device__ __forceinline__ work_t logarithm(work_t x) { return logf(x); }
__device__ __forceinline__ work_t logarithm_of_one_plus(work_t x) { return log1pf(x); }
__device__ __forceinline__ work_t square_root(work_t x) { return sqrtf(x); }
__device__ __forceinline__ work_t sine(work_t x) { return sinf(x); }
__device__ __forceinline__ work_t cosine(work_t x) { return cosf(x); }
__device__ __forceinline__ work_t magnitude(work_t x) { return fabsf(x); }
__device__ __forceinline__ work_t power(work_t a, work_t b) { return powf(a, b); }

// 1 / x for x >= 1 in two instructions; a division takes about ten.
__device__ __forceinline__ float reciprocal(float x)
{
    const float root = inverse_square_root(x);
    return root * root;
}

// Full relative precision where the gate is nearly shut.
__device__ __forceinline__ work_t sigmoid(work_t x) { return reciprocal(1.0f + power_of_two(-1.4426950408889634f * x)); }

// A polynomial near zero, where 1 - 2 / (exp(2|x|) + 1) would lose its relative precision.
__device__ __forceinline__ work_t hyperbolic_tangent(work_t x)
{
    const float square = x * x;
    float tail = fused(square, 0.002528503f, -0.008527936f);
    tail = fused(tail, square, 0.021818874f);
    tail = fused(tail, square, -0.053964745f);
    tail = fused(tail, square, 0.13333325f);
    tail = fused(tail, square, -0.33333334f);
    const float near_zero = fused(x * square, tail, x);
    // The power of a large number is infinite and of a very negative one zero: both give the right limit.
    const float far = fused(reciprocal(1.0f + power_of_two(2.8853900817779268f * x)), -2.0f, 1.0f);
    return fabsf(x) < 0.55f ? near_zero : far;
}
#endif

__device__ __forceinline__ work_t not_a_number() { return infinity() - infinity(); }

__device__ __forceinline__ work_t log_add_exp(work_t a, work_t b)
{
    // Equal infinities have no difference.
    const work_t gap = a == b ? work_t(0) : a - b;
    return larger(a, b) + logarithm_of_one_plus(exponential(-magnitude(gap)));
}
