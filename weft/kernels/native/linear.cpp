// Matmul of any number of rows with weights in panels, then bias and activation.
//
// Threads take pieces in turn: one panel of outputs (two for gated activations) and up to CHUNK rows.

#include <type_traits>

#include "activation.h"
#include "panels.h"
#include "pool.h"

namespace weft {
namespace {

// Rows of a piece: each widening of its weights serves all of them, and their inputs stay in the second-level cache.
#if defined(__aarch64__)
constexpr long CHUNK = 192;
#else
constexpr long CHUNK = 384;
#endif
// There are fewer, but at least FEWEST, if threads would have less than SHARE pieces each.
constexpr long FEWEST = 96, SHARE = 8;

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

template <class Weights, class Result>
void compute_piece(const Product& product, const Rows& x, long panel, long from, long to) {
    alignas(64) float sums[2 * (CHUNK + MOST_ROWS) * PANEL];
    long width = product.outputs / product.parts, first = panel * PANEL, count = std::min(PANEL, width - first);
    long row = x.first(from), rows = x.first(to) - row;
    constexpr long EACH = std::is_same_v<Weights, Pair> ? HALF : PANEL;
    auto weights = static_cast<const Weights*>(product.panels);
    auto bias = static_cast<const Result*>(product.bias);
    float* others = product.parts == 2 ? sums + rows * PANEL : nullptr;
    multiply(x, from, to, weights + panel * x.inputs * EACH, sums);
    if (bias) add_bias(bias + first, count, rows, sums);
    if (others) {
        multiply(x, from, to, weights + (panel + width / PANEL) * x.inputs * EACH, others);
        if (bias) add_bias(bias + width + first, count, rows, others);
    }
    if (product.activation || others) activate(product.activation, rows, sums, others);
    Result* y = static_cast<Result*>(product.y) + row * width + first;
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < count; o += LANES)
            store(y + r * width + o, load(sums + r * PANEL + o), std::min(LANES, count - o));
}

// The inputs as tiles read them: in place where that is possible, else in `room`.
template <class Value>
Rows arrange(const Product& product, float* room) {
    auto x = static_cast<const Value*>(product.x);
    Rows rows(room, product.rows, product.inputs, 0);
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
    long panels = (product.outputs / product.parts + PANEL - 1) / PANEL;
    long least = (product.rows + CHUNK - 1) / CHUNK, most = std::max(least, product.rows / FEWEST);
    long chunks = std::clamp((SHARE * product.threads + panels - 1) / panels, least, most);
    // Pieces of the same rows follow each other: their inputs stay in the second-level cache.
    share(panels * chunks, product.threads, [&](long piece) {
        long chunk = piece / panels;
        compute_piece<Weights, Result>(product, x, piece % panels, chunk * blocks / chunks,
                                       (chunk + 1) * blocks / chunks);
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
