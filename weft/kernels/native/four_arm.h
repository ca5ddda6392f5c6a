// Vectors in registers on ARM, where GCC keeps arrays of `Vector` in memory.
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

inline void store_four(float* to, const Four& value, long count) {
    if (count >= LANES) return store_four(to, value);
    float some[LANES];
    store_four(some, value);
    std::memcpy(to, some, count * sizeof(float));
}

// A vector of which every fourth float is added up already.
using Partial = float32x4_t;

inline Partial add_up(const Four& value) {
    const float32x4_t* part = value.part;
    return vaddq_f32(vaddq_f32(part[0], part[2]), vaddq_f32(part[1], part[3]));
}

inline float32x4_t fold(float32x4_t first, float32x4_t second) {
    float64x2_t a = vreinterpretq_f64_f32(first), b = vreinterpretq_f64_f32(second);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)));
}

// The sums of sixteen vectors, in order.
inline Vector sums(const Partial* part) {
    float found[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
        vst1q_f32(found + i, vpaddq_f32(fold(part[i], part[i + 1]), fold(part[i + 2], part[i + 3])));
    return load(found);
}

}  // namespace weft
