// Vectors of integers: products of four adjacent codes and inputs, added up in 32 bits.
//
// A word holds four codes of one output, so a vector of WIDTH words holds those of WIDTH outputs. Codes have no sign and
// are at most TOP; a format's own zero is taken off at the end, by the sum of the inputs. Where instructions need codes
// with a sign, those of eight bits are lowered by half of their range.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "stored.h"

namespace weft {

#if defined(__AVX512BW__)
constexpr int WIDTH = 16, MOST_TOGETHER = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, MOST_TOGETHER = 4;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, MOST_TOGETHER = 4;
#else
constexpr int WIDTH = 4, MOST_TOGETHER = 1;
#endif
// Outputs whose sums are in registers at a time, and registers of them.
constexpr int TOGETHER = WIDTH == 16 ? 32 : 16, VECTORS = TOGETHER / WIDTH;

using Codes = uint32_t __attribute__((vector_size(WIDTH * 4)));
using Counts = int32_t __attribute__((vector_size(WIDTH * 4)));
using Floats = float __attribute__((vector_size(WIDTH * 4)));

template <class Value>
inline Value load_as(const void* from) {
    Value value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

// Four codes of a row, as one word.
inline int32_t four_of(const int8_t* codes) { return load_as<int32_t>(codes); }

// Products of codes and inputs in 32 bits, where a processor adds up four at once ----------------------------------------

#if !defined(__AVX2__) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#if defined(__aarch64__)
constexpr int SIGNED_ABOVE = 127;
#else
constexpr int SIGNED_ABOVE = 255;
#endif

inline Counts plus_products(Counts total, Codes codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Counts)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    return (Counts)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(total, vreinterpretq_s8_u32(codes), vreinterpretq_s8_s32(vdupq_n_s32(x)));
#elif defined(__aarch64__)
    int8x16_t own = vreinterpretq_s8_u32(codes), inputs = vreinterpretq_s8_s32(vdupq_n_s32(x));
    int16x8_t low = vmull_s8(vget_low_s8(own), vget_low_s8(inputs)), high = vmull_high_s8(own, inputs);
    return vaddq_s32(total, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#elif defined(__SSE2__)
    // The even ones of four, then the odd ones, as sixteen bits.
    __m128i inputs = _mm_set1_epi32(x);
    __m128i even = _mm_srai_epi16(_mm_slli_epi16(inputs, 8), 8), odd = _mm_srai_epi16(inputs, 8);
    total += (Counts)_mm_madd_epi16((__m128i)(codes & 0x00ff00ffu), even);
    return total + (Counts)_mm_madd_epi16((__m128i)(codes >> 8 & 0x00ff00ffu), odd);
#else
    for (int i = 0; i < WIDTH; i++)
        for (int shift = 0; shift < 32; shift += 8)
            total[i] += int32_t(codes[i] >> shift & 0xff) * int32_t(int8_t(x >> shift));
    return total;
#endif
}

// Quads of codes after which `turn` must be called.
constexpr int turn_of(int) { return BLOCK; }

template <int TOP>
struct CodeSum {
    Counts total;
    void begin(int32_t value) { total = Counts{} + value; }
    void add(Codes codes, int32_t x) {
        total = plus_products(total, TOP > SIGNED_ABOVE ? codes ^ 0x80808080u : codes, x);
    }
    void turn() {}
    Counts value() const { return total; }
};

// Sums of two rows with the outputs of a vector, eight inputs at a time.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_ROW_PAIRS = true;

template <int TOP>
struct RowPair {
    // Of the first two outputs and of the others: those of the first row, then those of the second.
    int32x4_t left, right;
    void begin(int32_t first, int32_t second) {
        left = right = vcombine_s32(vdup_n_s32(first), vdup_n_s32(second));
    }
    void add(Codes low, Codes high, const int8_t* first, const int8_t* second) {
        if constexpr (TOP > SIGNED_ABOVE) low ^= 0x80808080u, high ^= 0x80808080u;
        int8x16_t inputs = vcombine_s8(vld1_s8(first), vld1_s8(second));
        left = vmmlaq_s32(left, inputs, vreinterpretq_s8_u32(vzip1q_u32(low, high)));
        right = vmmlaq_s32(right, inputs, vreinterpretq_s8_u32(vzip2q_u32(low, high)));
    }
    Counts first() const { return vcombine_s32(vget_low_s32(left), vget_low_s32(right)); }
    Counts second() const { return vcombine_s32(vget_high_s32(left), vget_high_s32(right)); }
};
#endif

// Elsewhere sums of two products have 16 bits and saturate. Some of them fit without that, and are then widened. Codes
// of eight bits do not: there the sign moves from the codes to the inputs.
#else
constexpr int SIGNED_ABOVE = 127;

#if defined(__AVX512BW__)
struct Pairs {
    using Vector = __m512i;
    static Vector inputs(int32_t x) { return _mm512_set1_epi32(x); }
    static Vector products(Vector codes, Vector inputs) { return _mm512_maddubs_epi16(codes, inputs); }
    static Vector magnitudes(Vector codes) { return _mm512_abs_epi8(codes); }
    static Vector with_signs(Vector inputs, Vector codes) {
        return _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(codes), Vector{}, inputs);
    }
    static Vector plus(Vector first, Vector second) { return _mm512_add_epi16(first, second); }
    static Counts widened(Vector pairs) { return (Counts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
};
#else
struct Pairs {
    using Vector = __m256i;
    static Vector inputs(int32_t x) { return _mm256_set1_epi32(x); }
    static Vector products(Vector codes, Vector inputs) { return _mm256_maddubs_epi16(codes, inputs); }
    static Vector magnitudes(Vector codes) { return _mm256_abs_epi8(codes); }
    static Vector with_signs(Vector inputs, Vector codes) { return _mm256_sign_epi8(inputs, codes); }
    static Vector plus(Vector first, Vector second) { return _mm256_add_epi16(first, second); }
    static Counts widened(Vector pairs) { return (Counts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};
#endif

constexpr int turn_of(int top) {
    int fit = 32767 / (2 * 127 * top);
    return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

template <int TOP>
struct CodeSum {
    Counts total;
    Pairs::Vector pairs;
    int32_t start;
    void begin(int32_t value) {
        total = Counts{};
        pairs = Pairs::Vector{};
        // Added at the end, because registers are few.
        start = value;
    }
    void add(Codes codes, int32_t x) {
        if constexpr (TOP > SIGNED_ABOVE) {
            auto own = (Pairs::Vector)(codes ^ 0x80808080u), inputs = Pairs::with_signs(Pairs::inputs(x), own);
            total += Pairs::widened(Pairs::products(Pairs::magnitudes(own), inputs));
        } else {
            pairs = Pairs::plus(pairs, Pairs::products((Pairs::Vector)codes, Pairs::inputs(x)));
        }
    }
    void turn() {
        if constexpr (TOP > SIGNED_ABOVE) return;
        total += Pairs::widened(pairs);
        pairs = Pairs::Vector{};
    }
    Counts value() const { return total + start; }
};
#endif

#if !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_ROW_PAIRS = false;
template <int TOP>
struct RowPair;
#endif

// Tables ---------------------------------------------------------------------------------------------------------------

inline Codes look_up(Codes table, Codes places) {
#if defined(__AVX512BW__)
    return (Codes)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
#elif defined(__AVX2__)
    return (Codes)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#elif defined(__aarch64__)
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(places)));
#else
    uint8_t from[16], to[16];
    std::memcpy(from, &table, 16);
    std::memcpy(to, &places, 16);
    for (uint8_t& each : to) each = from[each & 15];
    return load_as<Codes>(to);
#endif
}

// A table of sixteen codes for `look_up`.
inline Codes repeated(const uint8_t* table) {
    uint8_t all[WIDTH * 4];
    for (int i = 0; i < WIDTH * 4; i++) all[i] = table[i % 16];
    return load_as<Codes>(all);
}

// Floats ---------------------------------------------------------------------------------------------------------------

inline Floats as_floats(Counts counts) { return __builtin_convertvector(counts, Floats); }

// `total + x * y`, rounded once where the processor can. Compilers tuned for some processors, such as Zen, would
// round a lone chain of sums twice and several at once only once, so that a row's bits would depend on its batch.
inline Floats plus_product(Floats total, Floats x, Floats y) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)total);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)total);
#elif defined(__aarch64__)
    return vfmaq_f32(total, x, y);
#else
    return total + x * y;
#endif
}

using Bytes = uint8_t __attribute__((vector_size(WIDTH)));
using HalfBits = uint16_t __attribute__((vector_size(WIDTH * 2)));

// Sixteen-bit floats.
inline Floats from_halves(const void* from) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#elif defined(__aarch64__)
    return vcvt_f32_f16(load_as<float16x4_t>(from));
#else
    Counts bits = __builtin_convertvector(load_as<HalfBits>(from), Counts), magnitude = bits & 0x7fff;
    // Those without an exponent of their own are integers times a power of two.
    Floats wide = (Floats)((magnitude << 13) + (112 << 23)), small = as_floats(magnitude) * 0x1p-24f;
    wide = magnitude < 0x7c00 ? wide : (Floats)((magnitude << 13) + (224 << 23));
    wide = magnitude < 0x400 ? small : wide;
    return (Floats)((Counts)wide | (bits & 0x8000) << 16);
#endif
}

// 256ths of floats of eight bits (e4m3), which have the bits of sixteen-bit floats.
inline Floats parts_of_eights(const char* from) {
#if defined(__AVX512BW__)
    __m256i codes = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_as<__m128i>(from)), 8);
    __m256i halves = _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(short(0xbf80)));
    return (Floats)_mm512_cvtph_ps(halves);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i codes = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8);
    __m128i halves = _mm_and_si128(_mm_srai_epi16(codes, 1), _mm_set1_epi16(short(0xbf80)));
    return (Floats)_mm256_cvtph_ps(halves);
#else
    HalfBits wide = __builtin_convertvector(load_as<Bytes>(from), HalfBits);
    wide = (wide & 0x80) << 8 | (wide & 0x7f) << 7;
    return from_halves(&wide);
#endif
}

inline Floats from_eights(const char* from) { return parts_of_eights(from) * 256.0f; }

using SignedBytes = int8_t __attribute__((vector_size(WIDTH)));

// Bytes as integers. Compilers move some of their own conversions through registers, byte by byte.
inline Counts widened(Bytes bytes) {
#if defined(__AVX512BW__)
    return (Counts)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (Counts)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&bytes));
#else
    return __builtin_convertvector(bytes, Counts);
#endif
}

inline Counts widened(SignedBytes bytes) {
#if defined(__AVX512BW__)
    return (Counts)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (Counts)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&bytes));
#else
    return __builtin_convertvector(bytes, Counts);
#endif
}

template <class Some>
inline Floats byte_floats(const char* from) {
    return as_floats(widened(load_as<Some>(from)));
}

}  // namespace weft
