// The delta rule with decays by channel for rows of one token: a head's state is read once, with key and query together.
#include "delta.h"

using namespace weft;

namespace {

struct ChannelRule {
    const Step* step;
    const void *q, *k, *v, *decays, *strengths;
    const float *rates, *bias;  // null if decays and strengths are given directly
    void* y;
    // Each state is [heads, key_dim, value_dim], each tail [heads, ring, key_dim], [heads, ring, value_dim] and
    // [heads, ring, key_dim].
    float *keys, *corrected, *decay;
    int64_t q_stride, k_stride, v_stride, decays_stride, strengths_stride, tail_stride;
    int64_t heads, key_dim, value_dim, ring, kind, decays_kind, strengths_kind;
    States states;
};

// A head of a row.
struct ChannelHead {
    const ChannelRule& call;
    Place at;
    long row, head;
    alignas(64) float key[MOST_SIZE], query[MOST_SIZE];
    // Log decays since the cell's start, and their exponentials.
    alignas(64) float total[MOST_SIZE], through[MOST_SIZE];
    // Results for the key and for the query.
    alignas(64) float for_key[MOST_SIZE], for_query[MOST_SIZE];

    OpenCell cell(float* part, long size) const {
        long low = (at.start - at.offset) % call.ring;
        return {part + at.tail * call.tail_stride + head * call.ring * size, low, call.ring, size};
    }

    OpenCell keys() const { return cell(call.keys, call.key_dim); }
    OpenCell corrected() const { return cell(call.corrected, call.value_dim); }
    OpenCell decay() const { return cell(call.decay, call.key_dim); }

    State state(long slot) const { return call.states.at(slot, head, call.key_dim, call.value_dim, 0); }
};

// The key, the query and the decays of the new token; key and decays are stored in the tail.
template <class T>
void prepare(ChannelHead& own) {
    const ChannelRule& call = own.call;
    long size = call.key_dim, place = own.head * size, offset = own.at.offset;
    read_unit<T>(call.k, own.row * call.k_stride + place, size, 1.0f, own.key);
    read_unit<T>(call.q, own.row * call.q_stride + place, size, 1.0f / std::sqrt(float(size)), own.query);
    const float* before = offset ? own.decay().token(offset - 1) : nullptr;
    for (long i = 0; i < size; i++) {
        float step = read_kind(call.decays, own.row * call.decays_stride + place + i, call.decays_kind);
        if (call.rates) step = call.rates[own.head] * softplus(step + call.bias[place + i]);
        own.total[i] = step + (before ? before[i] : 0.0f);
    }
    for (long i = 0; i < size; i += LANES) store(own.through + i, exponential(load(own.total + i, size - i)));
    std::memcpy(own.keys().token(offset), own.key, size * sizeof(float));
    std::memcpy(own.decay().token(offset), own.total, size * sizeof(float));
}

// The weights of an earlier token for the key and for the query.
void weigh_token(const ChannelHead& own, long token, float& by_key, float& by_query) {
    const float *key = own.keys().token(token), *decay = own.decay().token(token);
    Vector key_sum = {}, query_sum = {};
    for (long i = 0; i < own.call.key_dim; i += LANES) {
        long count = own.call.key_dim - i;
        Vector decayed = exponential(load(own.total + i, count) - load(decay + i, count)) * load(key + i, count);
        key_sum += decayed * load(own.key + i);
        query_sum += decayed * load(own.query + i);
    }
    by_key = sum(key_sum), by_query = sum(query_sum);
}

// What the checkpoint and the cell's earlier tokens hold for the key and for the query.
void look_up(ChannelHead& own) {
    const ChannelRule& call = own.call;
    long size = call.value_dim, offset = own.at.offset;
    alignas(64) float by_key[MOST_TOKENS], by_query[MOST_TOKENS];
    clear(own.for_key, size);
    clear(own.for_query, size);
    if (own.at.slot >= 0) {
        alignas(64) float key[MOST_SIZE], query[MOST_SIZE];
        for (long i = 0; i < call.key_dim; i += LANES) {
            store(key + i, load(own.key + i) * load(own.through + i));
            store(query + i, load(own.query + i) * load(own.through + i));
        }
        add_lines<2>({own.for_key, own.for_query}, {key, query}, own.state(own.at.slot), call.key_dim, size);
    }
    for (long token = 0; token < offset; token++) weigh_token(own, token, by_key[token], by_query[token]);
    own.corrected().stretches(offset, [&](long first, long count, const float* values) {
        add_rows<2>({own.for_key, own.for_query}, {by_key + first, by_query + first}, values, size, count, size);
    });
}

template <class T>
void correct(ChannelHead& own) {
    const ChannelRule& call = own.call;
    long size = call.value_dim, place = own.head * size;
    float rate = read_kind(call.strengths, own.row * call.strengths_stride + own.head, call.strengths_kind);
    if (call.rates) rate = sigmoid(rate);
    correct_value(static_cast<const T*>(call.v) + own.row * call.v_stride + place, own, rate, own.key, call.key_dim,
                  own.corrected().token(own.at.offset),
                  static_cast<T*>(call.y) + own.row * call.heads * size + place, size);
}

void close(const ChannelHead& own) {
    const ChannelRule& call = own.call;
    State before = own.state(own.at.slot);
    close_state(own.at.slot >= 0 ? &before : nullptr, own.state(own.at.closing), call.key_dim, call.value_dim,
                {own.keys(), own.corrected(), own.key, own.at.offset + 1},
                LineDecays{own.total, own.through, own.decay()});
}

template <class T>
void decode(ChannelHead& own) {
    prepare<T>(own);
    look_up(own);
    correct<T>(own);
    if (own.at.closing >= 0) close(own);
}

}  // namespace

extern "C" void weft_channel_delta(const ChannelRule* call) {
    long heads = call->heads, all_heads = call->step->rows * heads;
    bool few = all_heads * call->key_dim * call->value_dim < FEW;
    share(all_heads, few ? 1 : call->step->threads, [&](long index) {
        ChannelHead own{*call, place(*call->step, index / heads), index / heads, index % heads};
        if (call->kind)
            decode<Brain>(own);
        else
            decode<float>(own);
    });
}
