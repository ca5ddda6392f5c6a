// Pages of codes of eight bits, with a power of two for each token and head: `weft/kernels/pages.py` defines them.
//
// A number is its code times a power of two, so products and sums of codes, times the powers, are those of the numbers.
#pragma once

#include <algorithm>

#include "attention_cell.h"
#include "integers.h"

namespace weft {

// A power of two is stored as its exponent plus BIAS; BROKEN: the head holds what is no number.
constexpr int EXPONENT_BIAS = 127, BROKEN = 255;

// What BROKEN stands for is NaN, whatever its codes are: nothing that sees them looks like a number.
inline float power_of(uint32_t exponent) {
    uint32_t bits = exponent << 23 | uint32_t(exponent == BROKEN) << 22;
    return load_as<float>(&bits);
}

// A float of eight bits (e4m3). `load` gives it in 256ths, as sixteen-bit floats have the same bits.
struct Eight {
    uint8_t bits;
    static constexpr float LARGEST = 448.0f;
    static float unit(uint8_t exponent) { return power_of(exponent) * 256.0f; }

    // The nearest one, of two the even one. Below 2^-6 they are multiples of 2^-9, as are the floats around 2^14.
    static Eight of(float x) {
        uint32_t bits = load_as<uint32_t>(&x), magnitude = bits & 0x7fffffff;
        float shifted = load_as<float>(&magnitude) + 0x1p14f;
        uint32_t small = load_as<uint32_t>(&shifted) - (141u << 23);
        uint32_t wide = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
        return {uint8_t((magnitude < (121u << 23) ? small : wide) | (bits >> 24 & 0x80))};
    }
};

// An integer.
struct Whole {
    int8_t code;
    static constexpr float LARGEST = 127.0f;
    static float unit(uint8_t exponent) { return power_of(exponent); }
    static Whole of(float x) { return {int8_t(std::rint(x))}; }
};

template <>
constexpr bool ARE_CODES<Eight> = true;
template <>
constexpr bool ARE_CODES<Whole> = true;

// Write the codes of a head, and return the exponent of the least power of two that the largest code suffices for.
template <class Code>
uint8_t encode(const float* line, long size, Code* to) {
    // Of what is no number the bits are the largest.
    uint32_t largest = 0;
    for (long i = 0; i < size; i++) largest = std::max(largest, load_as<uint32_t>(line + i) & 0x7fffffff);
    if (largest >= 0x7f800000) {
        std::memset(to, 0, size);
        return BROKEN;
    }
    int exponent;
    float mantissa = std::frexp(load_as<float>(&largest) / Code::LARGEST, &exponent);
    if (mantissa == 0.5f) exponent--;
    exponent = std::clamp(exponent, 1 - EXPONENT_BIAS, EXPONENT_BIAS - 1);
    float inverse = power_of(EXPONENT_BIAS - exponent);
    for (long i = 0; i < size; i++) to[i] = Code::of(line[i] * inverse);
    return uint8_t(exponent + EXPONENT_BIAS);
}

#if defined(__aarch64__)

inline Four load_four(const Eight* from) {
    uint8x16_t codes = vld1q_u8(&from->bits);
    Four value;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        int16x8_t high = vreinterpretq_s16_u16(vshlq_n_u16(vmovl_u8(i ? vget_high_u8(codes) : vget_low_u8(codes)), 8));
        int16x8_t halves = vandq_s16(vshrq_n_s16(high, 1), vdupq_n_s16(int16_t(0xbf80)));
        value.part[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(halves)));
        value.part[2 * i + 1] = vcvt_high_f32_f16(vreinterpretq_f16_s16(halves));
    }
    return value;
}

inline Four load_four(const Whole* from) {
    int8x16_t codes = vld1q_s8(&from->code);
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}

#else

// Vectors of registers that `part` makes.
template <class Part>
inline Vector joined(const Part& part) {
    Floats parts[LANES / WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < LANES / WIDTH; i++) parts[i] = part(i * WIDTH);
    return load_as<Vector>(parts);
}

inline Vector load(const Eight* from) {
    return joined([&](int i) { return parts_of_eights(reinterpret_cast<const char*>(from + i)); });
}

inline Vector load(const Whole* from) {
    return joined([&](int i) { return byte_floats<SignedBytes>(reinterpret_cast<const char*>(from + i)); });
}

#endif

}  // namespace weft
