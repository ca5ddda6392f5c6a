// Start of a step: token embeddings, and the cosines and sines of the positions.

#include "vector.h"

namespace weft {
namespace {

// embedding.py packs the same fields, here and below. Kinds: 0 float, 1 bfloat16.
struct Lookup {
    const int32_t* tokens;
    const void* table;
    void* y;
    int64_t rows, size, kind;
    float scale;
};

template <class Value>
void look_up(const Lookup& given) {
    for (long row = 0; row < given.rows; row++) {
        auto from = static_cast<const Value*>(given.table) + given.tokens[row] * given.size;
        auto to = static_cast<Value*>(given.y) + row * given.size;
        for (long i = 0; i < given.size; i += LANES)
            store(to + i, load(from + i, given.size - i) * given.scale, given.size - i);
    }
}

struct Turn {
    const int32_t* positions;
    const float* frequency;  // [half]
    void *cosine, *sine;     // [rows, 2 * half]; the first half of the sines is negative
    int64_t rows, half, kind;
    float scale;
};

template <class Value>
void turn(const Turn& given) {
    for (long row = 0; row < given.rows; row++) {
        auto cosine = static_cast<Value*>(given.cosine) + 2 * row * given.half;
        auto sine = static_cast<Value*>(given.sine) + 2 * row * given.half;
        for (long i = 0; i < given.half; i++) {
            float angle = float(given.positions[row]) * given.frequency[i];
            float along = std::cos(angle) * given.scale, across = std::sin(angle) * given.scale;
            write(cosine + i, along);
            write(cosine + given.half + i, along);
            write(sine + i, -across);
            write(sine + given.half + i, across);
        }
    }
}

}  // namespace
}  // namespace weft

extern "C" void weft_look_up(const weft::Lookup* call) {
    call->kind == 0 ? weft::look_up<float>(*call) : weft::look_up<weft::Brain>(*call);
}

extern "C" void weft_turn(const weft::Turn* call) {
    call->kind == 0 ? weft::turn<float>(*call) : weft::turn<weft::Brain>(*call);
}
