// RMS norms, with the addition before them or their gate. Arithmetic is float32. Threads share blocks of rows.

#include <algorithm>

#include "activation.h"
#include "pool.h"

namespace weft {
namespace {

// Rows of a block: fewer are not worth a second thread. norm.py has the same number.
constexpr long BLOCK = 64;

// body(first row, end of rows, block) for every block.
template <class Body>
void share_rows(long rows, long threads, const Body& body) {
    long blocks = (rows + BLOCK - 1) / BLOCK;
    share(blocks, threads, [&](long block) { body(block * BLOCK, std::min(rows, (block + 1) * BLOCK), block); });
}

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

// norm.py packs the same fields, here and below. Kinds: 0 float, 1 bfloat16. Rows are contiguous.
struct Join {
    const void* x;
    const void* change;  // may be null
    const void* change_weight;
    const void* weight;
    void *joined, *normed;
    int64_t rows, size, kind, weight_kind, threads;
    float factor, change_eps, eps;
};

// joined = x + factor * change, where the change may have its own norm; normed = the norm of that.
template <class Value, class Weight>
void join_rows(const Join& given, long begin, long end) {
    auto weight = static_cast<const Weight*>(given.weight);
    auto own = static_cast<const Weight*>(given.change_weight);
    for (long row = begin; row < end; row++) {
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

template <class Value, class Weight>
void join(const Join& given) {
    share_rows(given.rows, given.threads,
               [&](long begin, long end, long) { join_rows<Value, Weight>(given, begin, end); });
}

// Rows consist of `parts` of equal size, each normed separately; strides of rows are in values.
struct Gated {
    const void *x, *gate, *weight;
    void* y;
    float* lines;  // for each block of rows, room for `size` floats, rounded up to a whole vector
    int64_t rows, parts, size, x_row, gate_row, y_row;
    int64_t weight_part;  // 0 if all parts share their weights
    int64_t gate_first, x_kind, kind, weight_kind, threads;
    float eps;
};

template <class Input, class Gate, class Weight>
void gated_part(const Input* x, const Gate* gate, const Weight* weight, const Gated& given, float* line, Gate* y) {
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
void gated(const Gated& given) {
    long room = (given.size + LANES - 1) / LANES * LANES;
    share_rows(given.rows, given.threads, [&](long begin, long end, long block) {
        for (long row = begin; row < end; row++)
            for (long part = 0; part < given.parts; part++) {
                long first = part * given.size;
                gated_part(static_cast<const Input*>(given.x) + row * given.x_row + first,
                           static_cast<const Gate*>(given.gate) + row * given.gate_row + first,
                           static_cast<const Weight*>(given.weight) + part * given.weight_part, given,
                           given.lines + block * room, static_cast<Gate*>(given.y) + row * given.y_row + first);
            }
    });
}

}  // namespace
}  // namespace weft

extern "C" void weft_join(const weft::Join* call) {
    using namespace weft;
    if (call->kind == 0)
        join<float, float>(*call);
    else if (call->weight_kind == 0)
        join<Brain, float>(*call);
    else
        join<Brain, Brain>(*call);
}

extern "C" void weft_gated_norm(const weft::Gated* call) {
    using namespace weft;
    bool short_weights = call->weight_kind != 0;
    if (call->kind == 0)
        gated<float, float, float>(*call);
    else if (call->x_kind == 0)
        short_weights ? gated<float, Brain, Brain>(*call) : gated<float, Brain, float>(*call);
    else
        short_weights ? gated<Brain, Brain, Brain>(*call) : gated<Brain, Brain, float>(*call);
}
