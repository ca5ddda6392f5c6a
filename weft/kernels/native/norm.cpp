// Root-mean-square norms of a few rows, with what is added before them or gates them. Arithmetic is float32.

#include "activation.h"

namespace weft {
namespace {

// One over the root mean square of a line.
template <class Value>
float inverse(const Value* x, long size, float eps) {
    Vector squares = {};
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(x + i, size - i);
        squares += value * value;
    }
    return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

template <class Value, class Weight>
void norm(const Value* x, const Weight* weight, float eps, long size, Value* y) {
    float factor = inverse(x, size, eps);
    for (long i = 0; i < size; i += LANES)
        store(y + i, load(x + i, size - i) * factor * load(weight + i, size - i), size - i);
}

template <class Value>
void add(const Value* x, const Value* change, float factor, long size, Value* y) {
    for (long i = 0; i < size; i += LANES)
        store(y + i, load(x + i, size - i) + factor * load(change + i, size - i), size - i);
}

struct Join {
    const void *x, *change, *change_weight, *weight;
    void *joined, *normed;
    float factor, change_eps, eps;
    long rows, size;
};

// joined = x + factor * change, where the change may have a norm of its own; normed = the norm of that.
template <class Value, class Weight>
void join(const Join& given) {
    auto weight = static_cast<const Weight*>(given.weight);
    auto own = static_cast<const Weight*>(given.change_weight);
    for (long row = 0; row < given.rows; row++) {
        long first = row * given.size;
        auto x = static_cast<const Value*>(given.x) + first;
        auto normed = static_cast<Value*>(given.normed) + first;
        if (given.change) {
            auto change = static_cast<const Value*>(given.change) + first;
            auto joined = static_cast<Value*>(given.joined) + first;
            if (own) {
                norm(change, own, given.change_eps, given.size, normed);
                change = normed;
            }
            add(x, change, given.factor, given.size, joined);
            x = joined;
        }
        norm(x, weight, given.eps, given.size, normed);
    }
}

// Rows lie in `parts` of equal size, each normed for itself; a row of x or gates begins every so many values.
struct Gated {
    const void *x, *gate, *weight;
    void* y;
    float eps;
    long rows, parts, size, x_row, gate_row;
    long weight_part;  // 0 if all parts share their weights
    bool gate_first;
};

template <class Input, class Gate, class Weight>
void gated_part(const Input* x, const Gate* gate, const Weight* weight, const Gated& given, Gate* y, float* line) {
    long size = given.size;
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(x + i, size - i);
        store(line + i, given.gate_first ? value * activated(load(gate + i, size - i), SILU) : value);
    }
    float factor = inverse(line, size, given.eps);
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(line + i) * factor * load(weight + i, size - i);
        store(y + i, given.gate_first ? value : value * activated(load(gate + i, size - i), SILU), size - i);
    }
}

template <class Input, class Gate, class Weight>
void gated(const Gated& given, float* line) {
    for (long row = 0; row < given.rows; row++)
        for (long part = 0; part < given.parts; part++) {
            long first = part * given.size;
            gated_part(static_cast<const Input*>(given.x) + row * given.x_row + first,
                       static_cast<const Gate*>(given.gate) + row * given.gate_row + first,
                       static_cast<const Weight*>(given.weight) + part * given.weight_part, given,
                       static_cast<Gate*>(given.y) + row * given.parts * given.size + first, line);
        }
}

}  // namespace
}  // namespace weft

// Kinds: 0 float, 1 bfloat16. Rows are contiguous; a change of null leaves x as it is.
extern "C" void weft_join(const void* x, const void* change, const void* change_weight, const void* weight,
                          void* joined, void* normed, float factor, float change_eps, float eps, long rows, long size,
                          long kind, long weight_kind) {
    using namespace weft;
    Join given{x, change, change_weight, weight, joined, normed, factor, change_eps, eps, rows, size};
    if (kind == 0)
        join<float, float>(given);
    else if (weight_kind == 0)
        join<Brain, float>(given);
    else
        join<Brain, Brain>(given);
}

// `line`: room for `size` floats, rounded up to a whole vector.
extern "C" void weft_gated_norm(const void* x, const void* gate, const void* weight, void* y, float* line, float eps,
                                long rows, long parts, long size, long x_row, long gate_row, long weight_part,
                                long gate_first, long x_kind, long kind, long weight_kind) {
    using namespace weft;
    Gated given{x, gate, weight, y, eps, rows, parts, size, x_row, gate_row, weight_part, gate_first != 0};
    if (kind == 0)
        gated<float, float, float>(given, line);
    else if (x_kind == 0)
        weight_kind == 0 ? gated<float, Brain, float>(given, line) : gated<float, Brain, Brain>(given, line);
    else
        weight_kind == 0 ? gated<Brain, Brain, float>(given, line) : gated<Brain, Brain, Brain>(given, line);
}
