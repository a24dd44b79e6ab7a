// What CUDA C++ needs to be compiled for the CPU: its words, and the threads of a launch one after the other. The
// kernels have no barriers within a block, so any order of threads is a valid one.

#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

struct ThreadIndex
{
    unsigned int x;
};
[[maybe_unused]] static ThreadIndex blockIdx, blockDim, threadIdx;

static inline void __threadfence() {}

static inline int atomicAdd(int *at, int value)
{
    const int before = *at;
    *at += value;
    return before;
}

static inline float power_of_two(float x) { return exp2f(x); }
static inline float inverse_square_root(float x) { return 1.0f / sqrtf(x); }

static inline float bits_to_float(unsigned int bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline unsigned int float_to_bits(float x)
{
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

static inline float half_to_float(unsigned short bits)
{
    _Float16 x;
    std::memcpy(&x, &bits, sizeof x);
    return (float)x;
}

static inline unsigned short float_to_half(float x)
{
    const _Float16 y = (_Float16)x;
    unsigned short bits;
    std::memcpy(&bits, &y, sizeof y);
    return bits;
}
