// The inner loops of attention on ARM, with all sums in registers. GCC keeps arrays of `Vector` in memory there.
#pragma once

#include <arm_neon.h>

#include "vector.h"

namespace weft {

// A vector as registers.
struct Four {
    float32x4_t part[4];
};

inline Four load_four(const float* from) {
    return {{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}

inline Four load_four(const Brain* from) {
    uint16x8_t first = vld1q_u16(&from[0].bits), second = vld1q_u16(&from[8].bits);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(first, 16)),
             vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(second), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(second, 16))}};
}

// The first `count` values only, zeros for the rest.
template <class Value>
inline Four load_four(const Value* from, long count) {
    if (count >= LANES) return load_four(from);
    Value some[LANES] = {};
    std::memcpy(some, from, count * sizeof(Value));
    return load_four(some);
}

inline void store_four(float* to, const Four& value) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, value.part[i]);
}

// Products of a query with a key, of which every fourth is added up already.
using Partial = float32x4_t;

// Products of QUERIES with one key; each query has room for LANES tokens.
template <class Value, long QUERIES>
inline void multiply_key(const Value* key, const float* queries, long padded, long size, Partial* products) {
    Four sums[QUERIES] = {};
    for (long i = 0; i < size; i += LANES) {
        Four values = load_four(key + i, size - i);
#pragma GCC unroll 8
        for (long query = 0; query < QUERIES; query++) {
            Four wanted = load_four(queries + query * padded + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[query].part[j] = vfmaq_f32(sums[query].part[j], wanted.part[j], values.part[j]);
        }
    }
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) {
        const float32x4_t* part = sums[query].part;
        products[query * LANES] = vaddq_f32(vaddq_f32(part[0], part[2]), vaddq_f32(part[1], part[3]));
    }
}

inline float32x4_t fold(float32x4_t first, float32x4_t second) {
    float64x2_t a = vreinterpretq_f64_f32(first), b = vreinterpretq_f64_f32(second);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)));
}

// The sums of sixteen products, in order.
inline Vector sums(const Partial* part) {
    float found[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
        vst1q_f32(found + i, vpaddq_f32(fold(part[i], part[i + 1]), fold(part[i + 2], part[i + 3])));
    return load(found);
}

// Adds one vector of the values of `count` tokens, of which `rest` are used, times the weights of QUERIES to the mix.
// `next`: values that are read after these; may be null.
template <class Value, long QUERIES, long CHUNK>
inline void mix_values(const Value* values, long stride, long count, const Value* next, long rest,
                       const float (*weights)[CHUNK], const float* shrinking, float* mixed, long line) {
    Four sums[QUERIES];
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) {
        sums[query] = load_four(mixed + query * line);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[query].part[j] = vmulq_n_f32(sums[query].part[j], shrinking[query]);
    }
    for (long token = 0; token < count; token++, values += stride) {
        if (next) __builtin_prefetch(next + token * stride);
        Four value = load_four(values, rest);
#pragma GCC unroll 8
        for (long query = 0; query < QUERIES; query++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[query].part[j] = vfmaq_n_f32(sums[query].part[j], value.part[j], weights[query][token]);
    }
#pragma GCC unroll 8
    for (long query = 0; query < QUERIES; query++) store_four(mixed + query * line, sums[query]);
}

}  // namespace weft
