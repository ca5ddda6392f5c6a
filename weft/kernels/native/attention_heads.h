// Query and key heads between their projection and attention: each normed separately, and rotated.
#pragma once

#include "vector.h"

namespace weft {

// Values of the largest head.
constexpr long MOST = 512;
// Vectors are written whole, so lines have room after their end.
using Line = float[MOST + 2 * LANES];

// Cosines and sines of one position.
struct Angles {
    long half;  // pairs that rotate; 0: none
    Line cosine, sine;
};

// Memory holds twice as many: the same cosines again, and the sines first with the opposite sign.
template <class Value>
void read_angles(const Value* cosine, const Value* sine, long half, Angles& angles) {
    angles.half = half;
    for (long i = 0; i < half; i += LANES) {
        store(angles.cosine + i, load(cosine + i, half - i));
        store(angles.sine + i, load(sine + half + i, half - i));
    }
}

// `weight` may be null: then there is no norm. Zeros follow the end.
template <class Value, class Weight>
void read_head(const Value* from, const Weight* weight, float eps, long size, float* line) {
    Vector squares = {};
    store(line + size, Vector{});
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(from + i, size - i);
        squares += value * value;
        store(line + i, value);
    }
    if (!weight) return;
    float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (long i = 0; i < size; i += LANES)
        store(line + i, rounded<Value>(load(line + i) * factor * load(weight + i, size - i)));
}

// Rotate pairs (i, i + half), copy the rest. A vector written past its end is overwritten by the next.
template <class Value>
void turn(const float* line, const Angles& angles, long size, float* turned) {
    long half = angles.half;
    for (long i = 0; i < half; i += LANES) {
        Vector along = rounded<Value>(load(line + i) * load(angles.cosine + i));
        store(turned + i, rounded<Value>(along - load(line + half + i) * load(angles.sine + i)));
    }
    for (long i = 0; i < half; i += LANES) {
        Vector along = rounded<Value>(load(line + half + i) * load(angles.cosine + i));
        store(turned + half + i, rounded<Value>(along + load(line + i) * load(angles.sine + i)));
    }
    for (long i = 2 * half; i < size; i += LANES) store(turned + i, load(line + i));
}

}  // namespace weft
