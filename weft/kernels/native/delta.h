// Common parts of the delta rules.
#pragma once

#include "states.h"

namespace weft {

constexpr float EPSILON = 1e-6f;
// Elements of a state below which threads cost more than they save.
constexpr long FEW = 32768;

// A key or a query of the given length.
template <class T>
inline void read_unit(const void* from, long index, long size, float length, float* to) {
    widen(static_cast<const T*>(from) + index, size, to);
    Vector squares = {};
    for (long i = 0; i < size; i += LANES) squares += load(to + i) * load(to + i);
    scale(to, size, length / std::sqrt(sum(squares) + EPSILON));
}

// Store the corrected value in the tail; the output is what the query finds in the updated state.
template <class T, class Head>
inline void correct_value(const T* v, const Head& own, float rate, const float* key, long key_dim, float* kept, T* y,
                          long size) {
    float score;
    multiply_rows<1>({&score}, {own.query}, key, 1, key_dim);
    for (long i = 0; i < size; i += LANES) {
        Vector corrected = (load(v + i, size - i) - load(own.for_key + i)) * rate;
        store(kept + i, corrected, size - i);
        store(y + i, load(own.for_query + i) + score * corrected, size - i);
    }
}

}  // namespace weft
