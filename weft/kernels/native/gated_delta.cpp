// The gated delta rule for rows of one token: a head's state is read once, with its key and its query together.
#include "delta.h"

using namespace weft;

namespace {

struct Rule {
    const Step* step;
    const void *q, *k, *v, *decays, *strengths;
    const float *rates, *bias;  // null if decays and strengths are given directly
    void* y;
    // Each state is [value_heads, key_dim, value_dim], each tail [key_heads, ring, key_dim],
    // [value_heads, ring, value_dim] and [value_heads, ring].
    float *keys, *corrected, *decay;
    int64_t q_stride, k_stride, v_stride, decays_stride, strengths_stride, tail_stride;
    int64_t key_heads, key_dim, value_heads, value_dim, ring, kind, decays_kind, strengths_kind;
    double most;  // factor of the sigmoid of a strength
    States states;
};

// A value head of a row.
struct Head {
    const Rule& call;
    Place at;
    long row, head, key_head;
    float total, through;  // log decay since the cell's start, and its exponential
    alignas(64) float key[MOST_SIZE], query[MOST_SIZE];
    // Results for the key and for the query.
    alignas(64) float for_key[MOST_SIZE], for_query[MOST_SIZE];

    OpenCell cell(float* part, long head, long size) const {
        long low = (at.start - at.offset) % call.ring;
        return {part + at.tail * call.tail_stride + head * call.ring * size, low, call.ring, size};
    }

    OpenCell keys() const { return cell(call.keys, key_head, call.key_dim); }
    OpenCell corrected() const { return cell(call.corrected, head, call.value_dim); }
    OpenCell decay() const { return cell(call.decay, head, 1); }

    State state(long slot) const { return call.states.at(slot, head, call.key_dim, call.value_dim, 0); }
};

// The key, the query and the decay of the new token; key and decay are stored in the tail.
template <class T>
void prepare(Head& own) {
    const Rule& call = own.call;
    long size = call.key_dim, place = own.key_head * size, offset = own.at.offset;
    read_unit<T>(call.k, own.row * call.k_stride + place, size, 1.0f, own.key);
    read_unit<T>(call.q, own.row * call.q_stride + place, size, 1.0f / std::sqrt(float(size)), own.query);
    // Value heads that share a key read only earlier tokens, so one may write while another reads.
    bool is_first = own.head % (call.value_heads / call.key_heads) == 0;
    if (is_first) std::memcpy(own.keys().token(offset), own.key, size * sizeof(float));
    float step = read_kind(call.decays, own.row * call.decays_stride + own.head, call.decays_kind);
    if (call.rates) step = call.rates[own.head] * softplus(step + call.bias[own.head]);
    own.total = step + (offset ? *own.decay().token(offset - 1) : 0.0f);
    own.through = std::exp(own.total);
    *own.decay().token(offset) = own.total;
}

// What the checkpoint and the cell's earlier tokens hold for the key and for the query.
void look_up(Head& own) {
    const Rule& call = own.call;
    long size = call.value_dim, offset = own.at.offset;
    alignas(64) float since[MOST_TOKENS + LANES], by_key[MOST_TOKENS], by_query[MOST_TOKENS];
    clear(own.for_key, size);
    clear(own.for_query, size);
    if (own.at.slot >= 0) {
        add_lines<2>({own.for_key, own.for_query}, {own.key, own.query}, own.state(own.at.slot), call.key_dim, size);
        scale(own.for_key, size, own.through);
        scale(own.for_query, size, own.through);
    }
    own.keys().stretches(offset, [&](long first, long count, const float* values) {
        multiply_rows<2>({by_key + first, by_query + first}, {own.key, own.query}, values, count, call.key_dim);
    });
    decays_since(own.decay(), offset, own.total, since);
    for (long i = 0; i < offset; i++) by_key[i] *= since[i], by_query[i] *= since[i];
    own.corrected().stretches(offset, [&](long first, long count, const float* values) {
        add_rows<2>({own.for_key, own.for_query}, {by_key + first, by_query + first}, values, size, count, size);
    });
}

template <class T>
void correct(Head& own) {
    const Rule& call = own.call;
    long size = call.value_dim, place = own.head * size;
    float rate = read_kind(call.strengths, own.row * call.strengths_stride + own.head, call.strengths_kind);
    if (call.rates) rate = float(call.most) * sigmoid(rate);
    correct_value(static_cast<const T*>(call.v) + own.row * call.v_stride + place, own, rate, own.key, call.key_dim,
                  own.corrected().token(own.at.offset),
                  static_cast<T*>(call.y) + own.row * call.value_heads * size + place, size);
}

void close(const Head& own) {
    const Rule& call = own.call;
    long tokens = own.at.offset + 1;
    alignas(64) float since[MOST_TOKENS + LANES];
    decays_since(own.decay(), tokens, own.total, since);
    State before = own.state(own.at.slot);
    close_state(own.at.slot >= 0 ? &before : nullptr, own.state(own.at.closing), call.key_dim, call.value_dim,
                {own.keys(), own.corrected(), own.key, tokens}, OneDecay{since, own.through});
}

template <class T>
void decode(Head& own) {
    prepare<T>(own);
    look_up(own);
    correct<T>(own);
    if (own.at.closing >= 0) close(own);
}

void decode_head(const Rule& call, long row, long head) {
    Head own{call, place(*call.step, row), row, head, head / (call.value_heads / call.key_heads)};
    if (call.kind)
        decode<Brain>(own);
    else
        decode<float>(own);
}

}  // namespace

extern "C" void weft_gated_delta(const Rule* call) {
    long heads = call->value_heads, all_heads = call->step->rows * heads;
    bool few = all_heads * call->key_dim * call->value_dim < FEW;
    share(all_heads, few ? 1 : call->step->threads, [&](long index) {
        long row = index / heads, first = index % heads, shared = heads / call->key_heads, end = first + 1;
        if (follows(*call->step, row)) return;
        if (follows(*call->step, row + 1)) {
            // Each token reads the keys of those before it, which one head writes for all that share them.
            if (first % shared) return;
            end = first + shared;
        }
        do
            for (long head = first; head < end; head++) decode_head(*call, row, head);
        while (follows(*call->step, ++row));
    });
}
