// Vectors of sixteen floats, in the extensions of GCC and Clang, which map them to the CPU's own vectors. Values are
// float32 in registers; in memory they are float or bfloat16 (`Brain`).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace weft {

static_assert(sizeof(long) == 8, "indices are long; without 64 bits the references run");

constexpr long LANES = 16;
using Vector = float __attribute__((vector_size(64)));
using Integers = int32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

// Floats of one register. GCC chooses between shorter vectors with one instruction, but between longer ones float by
// float, so choices are made register by register.
#if defined(__AVX512F__)
constexpr int REGISTER = 16;
#elif defined(__AVX__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;
#endif
using Lane = float __attribute__((vector_size(REGISTER * 4)));
using LaneIntegers = int32_t __attribute__((vector_size(REGISTER * 4)));

// The upper half of a float32.
struct Brain {
    uint16_t bits;
};

inline float read(const float* from) { return *from; }

inline float read(const Brain* from) {
    uint32_t wide = uint32_t(from->bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline void write(float* to, float value) { *to = value; }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void write(Brain* to, float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    to->bits = std::isnan(value) ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// body(i) for the registers of a vector.
template <class Body>
inline void each_lane(const Body& body) {
#pragma GCC unroll 4
    for (int i = 0; i < LANES / REGISTER; i++) body(i);
}

struct Registers {
    Lane lane[LANES / REGISTER];

    template <class Long>
    explicit Registers(Long value) {
        static_assert(sizeof(value) == sizeof(lane));
        std::memcpy(lane, &value, sizeof(lane));
    }

    Vector vector() const {
        Vector value;
        std::memcpy(&value, lane, sizeof(lane));
        return value;
    }
};

// low < high ? yes : no; `no` where one of them is NaN.
inline Vector if_less(Vector low, Vector high, Vector yes, Vector no) {
    Registers a(low), b(high), chosen(yes), other(no);
    each_lane([&](int i) { chosen.lane[i] = a.lane[i] < b.lane[i] ? chosen.lane[i] : other.lane[i]; });
    return chosen.vector();
}

// `yes` where x is a number, `no` where it is NaN.
template <class Long>
inline Long if_number(Vector x, Long yes, Long no) {
    Registers tested(x), chosen(yes), other(no);
    each_lane([&](int i) { chosen.lane[i] = tested.lane[i] == tested.lane[i] ? chosen.lane[i] : other.lane[i]; });
    return (Long)chosen.vector();
}

inline Vector load(const float* from) {
    Vector value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Vector load(const Brain* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    Integers wide = __builtin_convertvector(halves, Integers) << 16;
    return (Vector)wide;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof(value)); }

inline __attribute__((always_inline)) void store(Brain* to, Vector value) {
    Integers wide = (Integers)value;
    Integers rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    Integers quiet = {};
    rounded = if_number(value, rounded, quiet + 0x7fc0);
    Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof(halves));
}

// The first `count` values only, zeros for the rest: the end of a line whose length is not a multiple of LANES.
template <class Value>
inline Vector load(const Value* from, long count) {
    if (count >= LANES) return load(from);
    Value part[LANES] = {};
    std::memcpy(part, from, count * sizeof(Value));
    return load(part);
}

template <class Value>
inline void store(Value* to, Vector value, long count) {
    if (count >= LANES) return store(to, value);
    Value part[LANES];
    store(part, value);
    std::memcpy(to, part, count * sizeof(Value));
}

// The value as it would be after a round trip through memory.
template <class Value>
inline Vector rounded(Vector value) {
    Value kept[LANES];
    store(kept, value);
    return load(kept);
}

inline Vector all(float value) { return Vector{} + value; }

inline float sum(Vector value) {
    float part[LANES];
    std::memcpy(part, &value, sizeof(value));
    for (long width = LANES / 2; width; width /= 2)
        for (long i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

// Lanes of two vectors in blocks of twice WIDTH: the first half of a block comes from the first vector.
constexpr int near_lane(int width, int lane) {
    int inside = lane % (2 * width), block = lane - inside;
    return inside < width ? lane : int(LANES) + block + inside - width;
}

#if defined(__has_builtin)
#define WEFT_HAS_SHUFFLEVECTOR __has_builtin(__builtin_shufflevector)
#else
#define WEFT_HAS_SHUFFLEVECTOR 0
#endif

template <int WIDTH, int AWAY, int... LANE>
inline Vector pick(Vector first, Vector second, std::integer_sequence<int, LANE...>) {
#if WEFT_HAS_SHUFFLEVECTOR
    return __builtin_shufflevector(first, second, (near_lane(WIDTH, LANE) + AWAY)...);
#else
    return __builtin_shuffle(first, second, Integers{(near_lane(WIDTH, LANE) + AWAY)...});
#endif
}

using EveryLane = std::make_integer_sequence<int, int(LANES)>;

// The sums of the halves of every block of twice WIDTH lanes: first vector, then second.
template <int WIDTH>
inline Vector folded(Vector first, Vector second) {
    return pick<WIDTH, 0>(first, second, EveryLane{}) + pick<WIDTH, WIDTH>(first, second, EveryLane{});
}

// The sums of sixteen vectors, in order: a transposition that adds as it goes. Each has the bits of `sum`.
inline Vector sums(const Vector* part) {
    Vector eights[8], fours[4], twos[2];
    for (long i = 0; i < 8; i++) eights[i] = folded<8>(part[i], part[i + 8]);
    for (long i = 0; i < 4; i++) fours[i] = folded<4>(eights[i], eights[i + 4]);
    for (long i = 0; i < 2; i++) twos[i] = folded<2>(fours[i], fours[i + 2]);
    return folded<1>(twos[0], twos[1]);
}

// e^x within two units in the last place; 0 below -87.3, infinity above 88.7, NaN stays NaN.
inline Lane exponential(Lane x) {
    constexpr Lane zero = {};
    Lane inside = x < 88.72f ? x : zero + 88.72f;
    inside = inside > -87.33f ? inside : zero - 87.33f;
    // x = n ln 2 + r with |r| <= ln 2 / 2; adding and subtracting 1.5 * 2^23 rounds n to an integer.
    Lane shifted = inside * 1.44269504f + 12582912.0f;
    Lane n = shifted - 12582912.0f;
    Lane r = inside - n * 0.693145752f - n * 1.42860677e-6f;
    Lane power = zero + 1.98069280e-4f;
    power = power * r + 1.39341105e-3f;
    power = power * r + 8.33345205e-3f;
    power = power * r + 4.16657962e-2f;
    power = power * r + 1.66666662e-1f;
    power = power * r + 0.5f;
    power = power * r * r + r + 1.0f;
    // In two steps, because 2^128 is not a float but e^88.72 is.
    LaneIntegers whole = __builtin_convertvector(n, LaneIntegers), half = whole >> 1;
    power = power * (Lane)((half + 127) << 23) * (Lane)((whole - half + 127) << 23);
    power = x > -87.33f ? power : zero;
    power = x < 88.72f ? power : zero + INFINITY;
    return x == x ? power : x;
}

#if !defined(__AVX512F__)
inline Vector exponential(Vector x) {
    Registers result(x);
    each_lane([&](int i) { result.lane[i] = exponential(result.lane[i]); });
    return result.vector();
}
#endif

// Near zero by its series, because there the exponentials cancel.
inline Vector tangent(Vector x) {
    Vector square = x * x;
    Vector series = x * (1.0f - square * (1.0f / 3.0f - square * (2.0f / 15.0f)));
    return if_less(square, all(0.01f), series, 1.0f - 2.0f / (1.0f + exponential(2.0f * x)));
}

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace weft
