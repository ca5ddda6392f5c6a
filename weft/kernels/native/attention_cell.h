// Attention of a few queries over some tokens of one cell: scores, running softmax, and the mix of values. Only tokens
// that the caller marks as visible are read: NaN may follow them.
#pragma once

#include "vector.h"
#if defined(__aarch64__)
#include "attention_arm.h"
#endif

namespace weft {

// Queries, keys and vectors of values in registers at once; AVX-512 has 32 registers that hold a whole vector.
#ifdef __AVX512F__
constexpr long MOST_QUERIES = 6, TOKENS = 4, ABREAST = 4;
#else
constexpr long MOST_QUERIES = 4, TOKENS = 1, ABREAST = 1;
#endif
// Tokens that are scored before their values are mixed.
constexpr long CHUNK = 64;

struct Scoring {
    float scale;
    float softcap;  // 0: none
};

// What a query has seen so far, `padded` + 2 * LANES floats: the values, each times e^(score - top), in whole vectors;
// the sum of these weights, lane by lane; and the top, the greatest score.
struct Seen {
    float* mixed;
    long padded;
    float* totals() const { return mixed + padded; }
    float* top() const { return mixed + padded + LANES; }
};

// Whether pages hold codes (pages.h): then `load` gives multiples of a unit, and each token's head has its own.
template <class Number>
constexpr bool ARE_CODES = false;

// Keys or values of one head. Only codes have exponents.
template <class Number>
struct Heads {
    Number* numbers;  // null: none
    uint8_t* exponents;
};

// One key head's tokens in memory.
template <class Number>
struct Tokens {
    Heads<Number> keys, values;
    long stride, exponent_stride;  // from token to token
    long size;  // numbers of a head
    long count;
    Heads<Number> next_keys, next_values;  // read after these, prefetched meanwhile; may be null
};

// Heads of consecutive tokens are too far apart for the hardware prefetcher.
template <class Value>
inline void fetch(const Value* from, long size) {
    for (long i = 0; i < size; i += 64 / long(sizeof(Value))) __builtin_prefetch(from + i);
}

// The units of up to LANES tokens; 0 behind them.
template <class Code>
inline Vector units(const uint8_t* exponents, long stride, long count) {
    float found[LANES] = {};
    for (long i = 0; i < count && i < LANES; i++) found[i] = Code::unit(exponents[i * stride]);
    return load(found);
}

inline void forget(Seen seen) {
    for (long i = 0; i < seen.padded + LANES; i += LANES) store(seen.mixed + i, Vector{});
    *seen.top() = -INFINITY;
}

#if !defined(__aarch64__)
using Partial = Vector;
#endif

template <int WIDTH>
inline Vector greater_half(Vector value) {
    Vector near = pick<WIDTH, 0>(value, value, EveryLane{}), far = pick<WIDTH, WIDTH>(value, value, EveryLane{});
    return if_less(far, near, near, far);
}

inline float top_of(Vector value) {
    return greater_half<1>(greater_half<2>(greater_half<4>(greater_half<8>(value))))[0];
}

// Add the product of one vector of every query with one of every token.
template <long QUERIES, long KEYS>
inline void multiply(const Vector* keys, const float* queries, long padded, Vector (&part)[QUERIES][KEYS]) {
    for (long query = 0; query < QUERIES; query++) {
        Vector wanted = load(queries + query * padded);
        for (long key = 0; key < KEYS; key++) part[query][key] += wanted * keys[key];
    }
}

// Products of QUERIES with TOKENS, before the sum over lanes; each query has room for LANES tokens.
template <class Number, long QUERIES, long KEYS>
inline void products_of(const Number* keys, long stride, const float* queries, long padded, long size,
                        Partial* products) {
#if defined(__aarch64__)
    static_assert(KEYS == 1);
    multiply_key<Number, QUERIES>(keys, queries, padded, size, products);
#else
    Vector part[QUERIES][KEYS] = {}, key[KEYS];
    long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        for (long token = 0; token < KEYS; token++) key[token] = load(keys + token * stride + i);
        multiply(key, queries + i, padded, part);
    }
    if (whole < size) {
        for (long token = 0; token < KEYS; token++) key[token] = load(keys + token * stride + whole, size - whole);
        multiply(key, queries + whole, padded, part);
    }
    for (long query = 0; query < QUERIES; query++)
        for (long token = 0; token < KEYS; token++) products[query * LANES + token] = part[query][token];
#endif
}

// Scores of up to sixteen tokens from `first` on; those beyond the last are never the greatest and weigh nothing.
template <class Number, long QUERIES>
inline void score(const Tokens<Number>& tokens, long first, const float* queries, long padded, Scoring scoring,
                  Vector* scores) {
    constexpr Vector lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    // Entries beyond the last token stay undefined: each ends in its own lane, which is ignored.
    Partial products[QUERIES][LANES];
    long token = 0, count = tokens.count - first, stride = tokens.stride, size = tokens.size;
    count = count < LANES ? count : LANES;
    const Number* keys = tokens.keys.numbers + first * stride;
    if (tokens.next_keys.numbers)
        for (long i = first; i < first + count; i++) fetch(tokens.next_keys.numbers + i * stride, size);
    for (; token + TOKENS <= count; token += TOKENS)
        products_of<Number, QUERIES, TOKENS>(keys + token * stride, stride, queries, padded, size, products[0] + token);
    for (; token < count; token++)
        products_of<Number, QUERIES, 1>(keys + token * stride, stride, queries, padded, size, products[0] + token);
    Vector unit;
    if constexpr (ARE_CODES<Number>)
        unit = units<Number>(tokens.keys.exponents + first * tokens.exponent_stride, tokens.exponent_stride, count);
    for (long query = 0; query < QUERIES; query++) {
        Vector product = sums(products[query]);
        if constexpr (ARE_CODES<Number>) product *= unit;
        Vector value = product * scoring.scale;
        if (scoring.softcap != 0) value = scoring.softcap * tangent(value / scoring.softcap);
        scores[query * (CHUNK / LANES)] = if_less(lane, all(float(count)), value, all(-INFINITY));
    }
}

// Convert scores to weights relative to the maximum so far. Return the factor for everything seen before.
inline float weigh(const Vector* scores, long tiles, Seen seen, float* weights) {
    Vector best = scores[0];
    for (long tile = 1; tile < tiles; tile++) best = scores[tile] > best ? scores[tile] : best;
    // NaN propagates.
    float before = *seen.top(), found = top_of(best), top = before > found ? before : found;
    float shrinking = std::exp(before - top);
    Vector total = load(seen.totals()) * shrinking;
    for (long tile = 0; tile < tiles; tile++) {
        Vector weight = exponential(scores[tile] - top);
        store(weights + tile * LANES, weight);
        total += weight;
    }
    store(seen.totals(), total);
    *seen.top() = top;
    return shrinking;
}

// Add VECTORS of every value from `at` on, times the weights of QUERIES, to the mix. The last vector has only `rest`
// values: LANES, or fewer at the end of a head.
template <class Number, long QUERIES, long VECTORS>
inline void mix(const Tokens<Number>& tokens, long at, long rest, const float (*weights)[CHUNK], const float* shrinking,
                float* mixed, long line) {
    const Number* values = tokens.values.numbers + at;
    const Number* next = tokens.next_values.numbers ? tokens.next_values.numbers + at : nullptr;
#if defined(__aarch64__)
    static_assert(VECTORS == 1);
    mix_values<Number, QUERIES>(values, tokens.stride, tokens.count, next, rest, weights, shrinking, mixed, line);
#else
    Vector part[QUERIES][VECTORS], value[VECTORS];
    for (long query = 0; query < QUERIES; query++)
        for (long i = 0; i < VECTORS; i++) part[query][i] = load(mixed + query * line + i * LANES) * shrinking[query];
    for (long token = 0; token < tokens.count; token++, values += tokens.stride) {
        if (next) fetch(next + token * tokens.stride, VECTORS * LANES);
        for (long i = 0; i < VECTORS - 1; i++) value[i] = load(values + i * LANES);
        value[VECTORS - 1] = load(values + (VECTORS - 1) * LANES, rest);
        for (long query = 0; query < QUERIES; query++)
            for (long i = 0; i < VECTORS; i++) part[query][i] += weights[query][token] * value[i];
    }
    for (long query = 0; query < QUERIES; query++)
        for (long i = 0; i < VECTORS; i++) store(mixed + query * line + i * LANES, part[query][i]);
#endif
}

// Multiply the weights of every token with the unit of its values.
template <class Code, long QUERIES>
inline void weigh_units(const Tokens<Code>& tokens, float (*weights)[CHUNK]) {
    long stride = tokens.exponent_stride;
    for (long first = 0; first < tokens.count; first += LANES) {
        Vector unit = units<Code>(tokens.values.exponents + first * stride, stride, tokens.count - first);
        for (long query = 0; query < QUERIES; query++)
            store(weights[query] + first, load(weights[query] + first) * unit);
    }
    if (tokens.next_keys.numbers)
        for (auto exponents : {tokens.next_keys.exponents, tokens.next_values.exponents})
            fetch(exponents, tokens.count * stride);
}

// QUERIES that share their keys over up to CHUNK tokens. `seen` is the first query's; the others' follow it.
template <class Number, long QUERIES>
void attend(const Tokens<Number>& tokens, const float* queries, Scoring scoring, Seen seen) {
    long padded = seen.padded, line = padded + 2 * LANES, tiles = (tokens.count + LANES - 1) / LANES;
    Vector scores[QUERIES][CHUNK / LANES] = {};
    float weights[QUERIES][CHUNK], shrinking[QUERIES];
    for (long tile = 0; tile < tiles; tile++)
        score<Number, QUERIES>(tokens, tile * LANES, queries, padded, scoring, scores[0] + tile);
    for (long query = 0; query < QUERIES; query++)
        shrinking[query] = weigh(scores[query], tiles, {seen.mixed + query * line, padded}, weights[query]);
    if constexpr (ARE_CODES<Number>) weigh_units<Number, QUERIES>(tokens, weights);
    long at = 0;
    for (; at + ABREAST * LANES <= tokens.size; at += ABREAST * LANES)
        mix<Number, QUERIES, ABREAST>(tokens, at, LANES, weights, shrinking, seen.mixed + at, line);
    for (; at < tokens.size; at += LANES)
        mix<Number, QUERIES, 1>(tokens, at, tokens.size - at, weights, shrinking, seen.mixed + at, line);
}

// Any number of queries.
template <class Number>
void attend(Tokens<Number> tokens, long count, const float* queries, Scoring scoring, Seen seen) {
    using Function = void (*)(const Tokens<Number>&, const float*, Scoring, Seen);
    constexpr Function some[] = {attend<Number, 1>, attend<Number, 2>, attend<Number, 3>,
                                 attend<Number, 4>, attend<Number, 5>, attend<Number, 6>};
    long line = seen.padded + 2 * LANES;
    for (long first = 0; first < count; first += MOST_QUERIES) {
        long these = count - first < MOST_QUERIES ? count - first : MOST_QUERIES;
        some[these - 1](tokens, queries + first * seen.padded, scoring, {seen.mixed + first * line, seen.padded});
        tokens.next_keys = tokens.next_values = {};
    }
}

}  // namespace weft
