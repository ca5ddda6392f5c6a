// What a matmul of PyTorch's library needs before and after it: panels of 16-bit weights as a matrix of floats, and bias,
// activation and rounding of the sums.

#include "activation.h"
#include "panels.h"
#include "team.h"

namespace weft {
namespace {

// Inputs of a piece of weights, and rows of a piece of sums.
constexpr long PIECE_INPUTS = 512, PIECE_ROWS = 16;

// widening.py packs the same fields.
struct PanelsToWiden {
    const Pair* panels;  // [count, inputs, HALF]
    float* to;           // [inputs, stride]: PANEL outputs of each panel side by side
    Parallel parallel;
    int64_t count, inputs, stride, threads;
};

// Kinds: 0 float, 1 bfloat16. Strides of rows are in values.
struct Finish {
    const float* sums;  // of two parts, the second begins after `apart` sums
    const void* bias;   // may be null; of two parts, the second begins after `bias_apart` values
    void* y;
    Parallel parallel;
    int64_t rows, count, sums_row, y_row, apart, bias_apart, activation, kind, threads;
};

void widen_piece(const PanelsToWiden& work, long panel, long first) {
    long end = std::min(work.inputs, first + PIECE_INPUTS);
    const Pair* from = work.panels + (panel * work.inputs + first) * HALF;
    float* to = work.to + first * work.stride + panel * PANEL;
    for (long i = first; i < end; i++, from += HALF, to += work.stride)
        for (int j = 0; j < HALF; j += WIDTH) {
            Lane low, high;
            load_pairs(from + j, low, high);
            store_lane(to + j, low);
            store_lane(to + HALF + j, high);
        }
}

template <class Value>
void finish_row(const Finish& work, const float* sums, Value* y) {
    auto bias = static_cast<const Value*>(work.bias);
    for (long o = 0; o < work.count; o += LANES) {
        long count = work.count - o;
        Vector value = load(sums + o, count);
        if (bias) value += load(bias + o, count);
        value = activated(value, work.activation);
        if (work.apart) {
            Vector other = load(sums + work.apart + o, count);
            if (bias) other += load(bias + work.bias_apart + o, count);
            value *= other;
        }
        store(y + o, value, count);
    }
}

template <class Value>
void finish(const Finish& work) {
    share_in_team(work.parallel, (work.rows + PIECE_ROWS - 1) / PIECE_ROWS, work.threads, [&](long piece) {
        long end = std::min(work.rows, (piece + 1) * PIECE_ROWS);
        for (long row = piece * PIECE_ROWS; row < end; row++)
            finish_row(work, work.sums + row * work.sums_row, static_cast<Value*>(work.y) + row * work.y_row);
    });
}

}  // namespace
}  // namespace weft

extern "C" void weft_widen(const weft::PanelsToWiden* call) {
    using namespace weft;
    long pieces = (call->inputs + PIECE_INPUTS - 1) / PIECE_INPUTS;
    share_in_team(call->parallel, call->count * pieces, call->threads,
                  [&](long piece) { widen_piece(*call, piece / pieces, piece % pieces * PIECE_INPUTS); });
}

extern "C" void weft_finish(const weft::Finish* call) {
    call->kind == 0 ? weft::finish<float>(*call) : weft::finish<weft::Brain>(*call);
}
