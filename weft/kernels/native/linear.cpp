// Matmul of any number of rows with weights in panels, then bias and activation.
//
// Threads take pieces in turn: up to CHUNK rows and one panel of outputs or a few (for gated activations two or four).

#include "activation.h"
#include "panels.h"
#include "pool.h"

namespace weft {
namespace {

// Rows of a piece: each widening of its weights serves all of them, and INPUTS of their inputs stay in the second-level
// cache, for up to GROUP panels.
constexpr long CHUNK = 192, GROUP = 4;
// From this number of rows on pieces may have several panels, if each thread has at least SHARE pieces.
constexpr long MANY_ROWS = 96, SHARE = 16;

// linear.py packs the same fields. Kinds: 0 float, 1 bfloat16. Bias and outputs have one kind.
struct Product {
    const void* x;
    const void* panels;
    const void* bias;  // may be null
    void* y;
    void* room;  // for the inputs in float32
    int64_t rows, stride, inputs, outputs, activation;
    int64_t parts;  // 2: the activation of the first half of the outputs times the second half
    int64_t kind, weight_kind, result_kind, threads;
};

template <class Value>
void add_bias(const Value* bias, long count, long rows, float* sums) {
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < count; o++) sums[row * PANEL + o] += read(bias + o);
}

void activate(long kind, long rows, float* sums, const float* others) {
    for (long o = 0; o < rows * PANEL; o += LANES) {
        Vector value = activated(load(sums + o), kind);
        store(sums + o, others ? value * load(others + o) : value);
    }
}

// Panels [first, first + count) of each part, and blocks [from, to) of rows.
struct Piece {
    long first, count, from, to;
};

template <class Weights, class Result>
void compute_piece(const Product& product, const Rows& x, const Piece& piece) {
    alignas(64) float sums[GROUP * (CHUNK + MOST_ROWS) * PANEL];
    constexpr long EACH = std::is_same_v<Weights, Pair> ? HALF : PANEL;
    long width = product.outputs / product.parts, row = x.first(piece.from), rows = x.first(piece.to) - row;
    const Weights* panels[GROUP];
    for (long panel = 0; panel < product.parts * piece.count; panel++) {
        long number = piece.first + panel % piece.count + panel / piece.count * (width / PANEL);
        panels[panel] = static_cast<const Weights*>(product.panels) + number * x.inputs * EACH;
    }
    multiply(x, piece.from, piece.to, panels, product.parts * piece.count, sums);
    auto bias = static_cast<const Result*>(product.bias);
    for (long panel = 0; panel < piece.count; panel++) {
        long first = (piece.first + panel) * PANEL, count = std::min(PANEL, width - first);
        float* here = sums + panel * rows * PANEL;
        float* others = product.parts == 2 ? here + piece.count * rows * PANEL : nullptr;
        if (bias) add_bias(bias + first, count, rows, here);
        if (bias && others) add_bias(bias + width + first, count, rows, others);
        if (product.activation || others) activate(product.activation, rows, here, others);
    }
    long first = piece.first * PANEL, count = std::min(piece.count * PANEL, width - first);
    for (long r = 0; r < rows; r++) {
        Result* y = static_cast<Result*>(product.y) + (row + r) * width + first;
        for (long o = 0; o < count; o += LANES)
            store(y + o, load(sums + (o / PANEL * rows + r) * PANEL + o % PANEL), std::min(LANES, count - o));
    }
}

// The inputs as tiles read them: in place where that is possible, else in `room`.
template <class Value>
Rows arrange(const Product& product, float* room) {
    auto x = static_cast<const Value*>(product.x);
    Rows rows{room, product.rows, product.inputs, 0};
    if (Rows::are_packed(product.rows)) {
        share(rows.blocks(), product.threads, [&](long block) { pack_block(x, product.stride, rows, block, room); });
        return rows;
    }
    rows.stride = product.inputs;
    for (long row = 0; row < product.rows; row++)
        for (long i = 0; i < product.inputs; i++) room[row * product.inputs + i] = read(x + row * product.stride + i);
    return rows;
}

template <class Value, class Weights, class Result>
void compute(const Product& product) {
    float* room = static_cast<float*>(product.room);
    Rows x = arrange<Value>(product, room);
    long blocks = x.blocks();
    long chunks = (product.rows + CHUNK - 1) / CHUNK, panels = (product.outputs / product.parts + PANEL - 1) / PANEL;
    long group = std::clamp(panels * chunks / (SHARE * product.threads), 1L, GROUP / product.parts);
    if (product.rows < MANY_ROWS) group = 1;
    long groups = (panels + group - 1) / group;
    // Pieces of the same rows follow each other: their inputs stay in the second-level cache.
    share(groups * chunks, product.threads, [&](long piece) {
        long chunk = piece / groups, number = piece % groups, first = number * panels / groups;
        compute_piece<Weights, Result>(product, x, {first, (number + 1) * panels / groups - first,
                                                    chunk * blocks / chunks, (chunk + 1) * blocks / chunks});
    });
}

}  // namespace
}  // namespace weft

extern "C" void weft_linear(const weft::Product* call) {
    using namespace weft;
    if (call->result_kind != 0)
        compute<Brain, Pair, Brain>(*call);
    else if (call->kind != 0)
        call->weight_kind != 0 ? compute<Brain, Pair, float>(*call) : compute<Brain, float, float>(*call);
    else
        call->weight_kind != 0 ? compute<float, Pair, float>(*call) : compute<float, float, float>(*call);
}
