// Heads of queries and keys between their projection and attention: normed each for itself, and turned.
#pragma once

#include "vector.h"

namespace weft {

// Values of the largest head.
constexpr long MOST = 512;
// Vectors are written whole, so lines have room behind their end.
using Line = float[MOST + 2 * LANES];

// Cosines and sines of one position.
struct Angles {
    long half;  // pairs that turn; 0: none
    Line cosine, sine;
};

// In memory there are twice as many: the same cosines again, and sines first with the other sign.
template <class Value>
void read_angles(const Value* cosine, const Value* sine, long half, Angles& angles) {
    angles.half = half;
    for (long i = 0; i < half; i += LANES) {
        store(angles.cosine + i, load(cosine + i, half - i));
        store(angles.sine + i, load(sine + half + i, half - i));
    }
}

// `weight` may be null: then there is no norm. Behind the end there are zeros.
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

// Pairs (i, i + half) turn, what follows passes. Whoever writes over an end is overwritten by the next.
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
