// The state space recurrence for rows of one token: reads of the state and the open cell for C, and the new token.
#include "states.h"

using namespace weft;

namespace {

// Columns of a state that are summed together: their sums and rows stay in a core's cache.
constexpr long MOST_COLUMNS = 1024;
// Elements of a state below which threads cost more than they save, and rows per thread from which none is split.
constexpr long FEW = 32768, MANY_ROWS = 4;

struct Scan {
    const Step* step;
    const void *x, *dt, *B, *C;
    const float *A, *D, *bias;
    void* y;
    // Each state is [groups, size, heads of a group * head_dim], each tail [heads, ring, head_dim],
    // [groups, ring, size] and [heads, ring].
    float *inputs, *keys, *decay;
    int64_t x_stride, dt_stride, B_stride, C_stride, tail_stride;
    int64_t heads, head_dim, groups, size, ring, kind, dt_kind;
    float least, most;
    States states;
};

// Some heads of a group in a row.
struct Block {
    const Scan& call;
    Place at;
    long row, group, first, heads;
    alignas(64) float query[MOST_SIZE], key[MOST_SIZE];
    alignas(64) float scores[MOST_TOKENS + LANES];
    alignas(64) float read[MOST_COLUMNS + LANES];

    long width() const { return call.heads / call.groups * call.head_dim; }

    OpenCell cell(float* part, long head, long size) const {
        long low = (at.start - at.offset) % call.ring;
        return {part + at.tail * call.tail_stride + head * call.ring * size, low, call.ring, size};
    }

    // Where a slot's state has a head's first column.
    State state(long slot, long head) const {
        long own = (head - group * (call.heads / call.groups)) * call.head_dim;
        return call.states.at(slot, group, call.size, width(), own);
    }
};

// What the cell's tokens and the checkpoint hold for C. All blocks of a group need the scores; one adds the new key.
template <class T>
void look_up(Block& block, bool keeps) {
    const Scan& call = block.call;
    long offset = block.at.offset, size = call.size;
    widen(static_cast<const T*>(call.B) + block.row * call.B_stride + block.group * size, size, block.key);
    widen(static_cast<const T*>(call.C) + block.row * call.C_stride + block.group * size, size, block.query);
    OpenCell keys = block.cell(call.keys, block.group, size);
    keys.stretches(offset, [&](long first, long count, const float* values) {
        multiply_rows<1>({block.scores + first}, {block.query}, values, count, size);
    });
    // The new key comes from the input, because another thread may be writing it to the tail.
    multiply_rows<1>({block.scores + offset}, {block.query}, block.key, 1, size);
    if (keeps) std::memcpy(keys.token(offset), block.key, size * sizeof(float));
    if (block.at.slot < 0) return;
    long columns = block.heads * call.head_dim;
    clear(block.read, columns);
    add_lines<1>({block.read}, {block.query}, block.state(block.at.slot, block.first), size, columns);
}

float time_step(const Scan& call, long row, long head) {
    float raw = read_kind(call.dt, row * call.dt_stride + head, call.dt_kind);
    if (!call.bias) return raw;
    float step = softplus(raw + call.bias[head]);
    // NaN stays NaN.
    return step < call.least ? call.least : step > call.most ? call.most : step;
}

// Add the new token to the tail and return its output.
template <class T>
void finish(Block& block, long head, float dt, float* sums) {
    const Scan& call = block.call;
    long size = call.head_dim, place = head * size;
    const T* x = static_cast<const T*>(call.x) + block.row * call.x_stride + place;
    T* y = static_cast<T*>(call.y) + block.row * call.heads * size + place;
    float* kept = block.cell(call.inputs, head, size).token(block.at.offset);
    float score = block.scores[block.at.offset], skip = call.D ? call.D[head] : 0.0f;
    for (long i = 0; i < size; i += LANES) {
        Vector value = load(x + i, size - i), input = value * dt, total = load(sums + i) + score * input;
        if (call.D) total += value * skip;
        store(kept + i, input, size - i);
        store(y + i, total, size - i);
    }
}

template <class T>
void decode_head(Block& block, long head) {
    const Scan& call = block.call;
    long offset = block.at.offset, size = call.head_dim;
    alignas(64) float weights[MOST_TOKENS + LANES], sums[MOST_COLUMNS + LANES];
    float dt = time_step(call, block.row, head);
    OpenCell decay = block.cell(call.decay, head, 1);
    float total = dt * call.A[head] + (offset ? *decay.token(offset - 1) : 0.0f);
    *decay.token(offset) = total;
    clear(sums, size);
    if (block.at.slot >= 0) {
        std::memcpy(sums, block.read + (head - block.first) * size, size * sizeof(float));
        scale(sums, size, std::exp(total));
    }
    decays_since(decay, offset, total, weights);
    for (long i = 0; i < offset; i++) weights[i] *= block.scores[i];
    block.cell(call.inputs, head, size).stretches(offset, [&](long first, long count, const float* values) {
        add_rows<1>({sums}, {weights + first}, values, size, count, size);
    });
    finish<T>(block, head, dt, sums);
}

void close_head(const Block& block, long head) {
    const Scan& call = block.call;
    const Place& at = block.at;
    long tokens = at.offset + 1, size = call.head_dim;
    alignas(64) float since[MOST_TOKENS + LANES];
    OpenCell decay = block.cell(call.decay, head, 1);
    float total = *decay.token(at.offset);
    decays_since(decay, tokens, total, since);
    State before = block.state(at.slot, head);
    Cell cell{block.cell(call.keys, block.group, call.size), block.cell(call.inputs, head, size), block.key, tokens};
    close_state(at.slot >= 0 ? &before : nullptr, block.state(at.closing, head), call.size, size, cell,
                OneDecay{since, std::exp(total)});
}

template <class T>
void decode(Block& block) {
    bool is_first = block.first % (block.call.heads / block.call.groups) == 0;
    look_up<T>(block, is_first);
    for (long head = block.first; head < block.first + block.heads; head++) {
        decode_head<T>(block, head);
        if (block.at.closing >= 0) close_head(block, head);
    }
}

// Heads [first, last) of a group.
void decode_block(const Scan& call, long row, long group, long first, long last) {
    Block block{call, place(*call.step, row), row, group, group * (call.heads / call.groups) + first, last - first};
    if (call.kind)
        decode<Brain>(block);
    else
        decode<float>(block);
}

// Number of blocks of a group's heads.
long cuts(const Scan& call) {
    long shared = call.heads / call.groups, threads = call.step->threads;
    long most = std::max<long>(1, MOST_COLUMNS / call.head_dim);
    long cuts = (shared + most - 1) / most;
    if (call.step->rows < MANY_ROWS * threads) cuts = std::max<long>(cuts, (threads + call.groups - 1) / call.groups);
    return std::min(cuts, shared);
}

}  // namespace

extern "C" void weft_ssd(const Scan* call) {
    long shared = call->heads / call->groups, blocks = cuts(*call);
    long all_blocks = call->step->rows * call->groups * blocks;
    bool few = call->step->rows * call->heads * call->head_dim * call->size < FEW;
    share(all_blocks, few ? 1 : call->step->threads, [&](long index) {
        long cut = index % blocks, group = index / blocks % call->groups, row = index / blocks / call->groups;
        long end = cut + 1;
        if (follows(*call->step, row)) return;
        if (follows(*call->step, row + 1)) {
            // Each token reads the keys of those before it, which one block writes for its group.
            if (cut) return;
            end = blocks;
        }
        do
            for (long each = cut; each < end; each++)
                decode_block(*call, row, group, shared * each / blocks, shared * (each + 1) / blocks);
        while (follows(*call->step, ++row));
    });
}
