// An activation of a gate, times the gated values; sums of two matrices.

#include "activation.h"

namespace weft {
namespace {

// activation.py packs the same fields. Kinds: 0 float, 1 bfloat16. Strides of rows are in values.
struct Gating {
    const void *gate, *x;
    void* y;
    int64_t rows, size, gate_row, x_row, y_row, activation, kind;
};

// The activated gate is rounded before the multiplication, as in torch.
template <class Value>
void open(const Gating& given) {
    for (long row = 0; row < given.rows; row++) {
        auto gate = static_cast<const Value*>(given.gate) + row * given.gate_row;
        auto x = static_cast<const Value*>(given.x) + row * given.x_row;
        auto y = static_cast<Value*>(given.y) + row * given.y_row;
        for (long i = 0; i < given.size; i += LANES) {
            long count = given.size - i;
            store(y + i, activated(load(gate + i, count), given.activation), count);
            store(y + i, load(y + i, count) * load(x + i, count), count);
        }
    }
}

struct Addition {
    const void *x, *y;
    void* total;
    int64_t rows, size, x_row, y_row, kind;
};

template <class Value>
void add(const Addition& given) {
    for (long row = 0; row < given.rows; row++) {
        auto x = static_cast<const Value*>(given.x) + row * given.x_row;
        auto y = static_cast<const Value*>(given.y) + row * given.y_row;
        auto total = static_cast<Value*>(given.total) + row * given.size;
        for (long i = 0; i < given.size; i += LANES) {
            long count = given.size - i;
            store(total + i, load(x + i, count) + load(y + i, count), count);
        }
    }
}

}  // namespace
}  // namespace weft

extern "C" void weft_gate(const weft::Gating* call) {
    call->kind == 0 ? weft::open<float>(*call) : weft::open<weft::Brain>(*call);
}

extern "C" void weft_add(const weft::Addition* call) {
    call->kind == 0 ? weft::add<float>(*call) : weft::add<weft::Brain>(*call);
}
