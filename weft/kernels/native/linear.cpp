// Matmul of a few rows with a matrix in checkpoint layout, at the speed of reading the weights.
//
// Threads take blocks of outputs in turn. Inside a block a core reads several streams in turn, each of them sequential
// from one output's weights to the next: with a single stream it gets a quarter less bandwidth.

#include <algorithm>
#include <cstdlib>

#include "activation.h"
#include "pool.h"

namespace weft {
namespace {

// Maximum number of outputs of a block; its weights stay in a core's cache while further rows are multiplied.
constexpr long BLOCK = 64;
constexpr long MOST_ROWS = 16;

// linear.py packs the same fields. Kinds: 0 float, 1 bfloat16. Inputs, bias and outputs have one kind; weights may be
// bfloat16 if these are float.
struct Product {
    const void* x;
    const void* weight;
    const void* bias;  // may be null
    void* y;
    int64_t rows, stride, inputs, outputs, activation;
    int64_t parts;  // 2: the activation of the first half of the outputs times the second half
    int64_t kind, weight_kind, threads;
};

template <class Weight, int PLACES, int ROWS>
inline void accumulate(const float* x, const Weight* weight, long inputs, long each, Vector (&total)[PLACES][ROWS]) {
    Vector value[ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) value[row] = load(x + row * inputs);
#pragma GCC unroll 8
    for (int place = 0; place < PLACES; place++) {
        Vector factor = load(weight + place * each * inputs);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) total[place][row] += factor * value[row];
    }
}

// The remainder of lines whose length is not a multiple of LANES.
template <class Weight, int PLACES, int ROWS>
void accumulate_rest(const float* x, const Weight* weight, long inputs, long each, long count,
                     Vector (&total)[PLACES][ROWS]) {
    for (int place = 0; place < PLACES; place++) {
        Vector factor = load(weight + place * each * inputs, count);
        for (int row = 0; row < ROWS; row++) total[place][row] += factor * load(x + row * inputs, count);
    }
}

// PLACES * ROWS sums of a block's `each` * PLACES outputs; output j * each + step goes to sums[row * BLOCK + ...].
template <class Weight, int PLACES, int ROWS>
void multiply(const float* x, const Weight* weight, long inputs, long each, float* sums) {
    for (long step = 0; step < each; step++) {
        const Weight* here = weight + step * inputs;
        Vector total[PLACES][ROWS] = {};
        long i = 0;
        for (; i + LANES <= inputs; i += LANES) accumulate<Weight, PLACES, ROWS>(x + i, here + i, inputs, each, total);
        if (i < inputs) accumulate_rest<Weight, PLACES, ROWS>(x + i, here + i, inputs, each, inputs - i, total);
        for (int place = 0; place < PLACES; place++)
            for (int row = 0; row < ROWS; row++) sums[row * BLOCK + place * each + step] = sum(total[place][row]);
    }
}

template <class Weight, int ROWS>
void multiply_block(const float* x, const Weight* weight, long inputs, long outputs, float* sums) {
    constexpr int PLACES = ROWS <= 3 ? 8 : 4;
    long each = outputs / PLACES, done = each * PLACES;
    multiply<Weight, PLACES, ROWS>(x, weight, inputs, each, sums);
    if (done < outputs) multiply<Weight, 1, ROWS>(x, weight + done * inputs, inputs, outputs - done, sums + done);
}

// All rows with a block of outputs, some rows at a time. `wide` are the inputs, [rows, inputs].
template <class Weight>
void multiply_rows(const Product& product, const float* wide, long first, long outputs, float* sums) {
    const Weight* weight = static_cast<const Weight*>(product.weight) + first * product.inputs;
    long inputs = product.inputs;
    for (long row = 0; row < product.rows;) {
        const float* x = wide + row * inputs;
        float* here = sums + row * BLOCK;
        long left = product.rows - row, some = left > 6 ? 4 : left > 4 ? 3 : left;
        switch (some) {
            case 1: multiply_block<Weight, 1>(x, weight, inputs, outputs, here); break;
            case 2: multiply_block<Weight, 2>(x, weight, inputs, outputs, here); break;
            case 3: multiply_block<Weight, 3>(x, weight, inputs, outputs, here); break;
            default: multiply_block<Weight, 4>(x, weight, inputs, outputs, here);
        }
        row += some;
    }
}

template <class Value>
void add_bias(const Product& product, long first, long outputs, float* sums) {
    if (!product.bias) return;
    const Value* bias = static_cast<const Value*>(product.bias) + first;
    for (long row = 0; row < product.rows; row++)
        for (long o = 0; o < outputs; o++) sums[row * BLOCK + o] += read(bias + o);
}

// Blocks of sums have room for whole vectors, so activations may compute a few unused ones.
void activate(const Product& product, long outputs, float* sums, const float* others) {
    for (long row = 0; row < product.rows; row++)
        for (long o = 0; o < outputs; o += LANES) {
            float* here = sums + row * BLOCK + o;
            Vector value = activated(load(here), product.activation);
            store(here, others ? value * load(others + row * BLOCK + o) : value);
        }
}

template <class Weight, class Value>
void compute_block(const Product& product, const float* wide, long first, long outputs, float* sums) {
    long width = product.outputs / product.parts;
    multiply_rows<Weight>(product, wide, first, outputs, sums);
    add_bias<Value>(product, first, outputs, sums);
    float* others = nullptr;
    if (product.parts == 2) {
        others = sums + product.rows * BLOCK;
        multiply_rows<Weight>(product, wide, first + width, outputs, others);
        add_bias<Value>(product, first + width, outputs, others);
    }
    if (product.activation || others) activate(product, outputs, sums, others);
    Value* y = static_cast<Value*>(product.y);
    for (long row = 0; row < product.rows; row++)
        for (long o = 0; o < outputs; o++) write(y + row * width + first + o, sums[row * BLOCK + o]);
}

// As few outputs as keep all threads busy, as many as one thread reads efficiently.
long block_size(long outputs, long threads) {
    long fair = outputs / (threads * 4) / 8 * 8;
    return std::min(BLOCK, std::max(8L, fair));
}

template <class Weight, class Value>
void compute(const Product& product, const float* wide) {
    long outputs = product.outputs / product.parts, block = block_size(outputs, product.threads);
    share((outputs + block - 1) / block, product.threads, [&](long number) {
        float sums[2 * MOST_ROWS * BLOCK] = {};
        long first = number * block;
        compute_block<Weight, Value>(product, wide, first, std::min(block, outputs - first), sums);
    });
}

template <class Input>
void widen(const Input* x, long stride, long rows, long inputs, float* wide) {
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inputs; i++) wide[row * inputs + i] = read(x + row * stride + i);
}

}  // namespace
}  // namespace weft

extern "C" void weft_linear(const weft::Product* call) {
    using namespace weft;
    const Product& product = *call;
    auto wide = static_cast<const float*>(product.x);
    float* room = nullptr;
    if (product.kind != 0 || (product.rows > 1 && product.stride != product.inputs)) {
        room = static_cast<float*>(std::malloc(product.rows * product.inputs * sizeof(float)));
        wide = room;
        if (product.kind == 0)
            widen(static_cast<const float*>(product.x), product.stride, product.rows, product.inputs, room);
        else
            widen(static_cast<const Brain*>(product.x), product.stride, product.rows, product.inputs, room);
    }
    if (product.kind != 0)
        compute<Brain, Brain>(product, wide);
    else if (product.weight_kind != 0)
        compute<Brain, float>(product, wide);
    else
        compute<float, float>(product, wide);
    std::free(room);
}
