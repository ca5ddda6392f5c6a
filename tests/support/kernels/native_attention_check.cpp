// Checks attention over codes in C++ without Python, so that it can be compiled for another processor and run in an
// emulator: it must have the bits of attention over pages of the same numbers. Prints the number of cases compared; exits
// with 1 at the first wrong one.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

// As in attention.h.
struct Step {
    const int32_t *start, *write_page, *first_position, *bounds, *pages;
    float* scratch;
    long rows, heads, kv_heads, head_dim, cell, window, first_stretch, stretches, stretch_cells, blocks, threads;
};

struct Layer {
    const Step* step;
    const void *projected, *weight, *cosine, *sine;
    void *keys, *values;
    uint8_t *key_exponents, *value_exponents;
    const void* sinks;
    void* out;
    int64_t projected_row, half, page_stride, exponent_page_stride, out_row, gated, kind, weight_kind, code_kind;
    float eps, scale, softcap;
};

extern "C" void weft_attention(const Layer*);
extern "C" void weft_coded_attention(const Layer*);

static uint32_t seed = 1;

static uint32_t drawn(uint32_t limit) {
    seed = seed * 1664525u + 1013904223u;
    return uint32_t(uint64_t(seed) * limit >> 32);
}

// The number that a code stands for, times a power of two.
static float number(bool is_integer, uint8_t code, int power) {
    if (is_integer) return std::ldexp(float(int8_t(code)), power);
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    return std::ldexp(code & 128 ? -magnitude : magnitude, power);
}

static const long CELL = 16, ROWS = 3, PAGES = 32;
static const int32_t STARTS[ROWS] = {160, 5, 47};

// Keys or values of all pages, as codes and as the numbers that they stand for, and those of the new tokens.
struct Part {
    std::vector<uint8_t> codes, exponents;
    std::vector<float> numbers;

    Part(bool is_integer, long heads, long size) : codes(heads * size), exponents(heads), numbers(heads * size) {
        for (long head = 0; head < heads; head++) {
            int power = int(drawn(9)) - 12;
            exponents[head] = uint8_t(power + 127);
            for (long i = 0; i < size; i++) {
                uint8_t& code = codes[head * size + i];
                // No NaN, no integer that has no opposite; the first is in the upper half, as a head's largest is.
                code = uint8_t(is_integer ? drawn(255) - 127 : drawn(127) | drawn(2) << 7);
                if (i == 0) code = is_integer ? 127 : 0x7e;
                numbers[head * size + i] = number(is_integer, code, power);
            }
        }
    }
};

static bool check(bool is_integer, long kv_heads, long group, long size, long window) {
    long heads = kv_heads * group, padded = (size + 15) / 16 * 16, stretches = 3, token = kv_heads * size;
    int32_t pages[PAGES], bounds[ROWS], write_page[ROWS], first_position[ROWS] = {};
    long used = 0;
    for (long row = 0; row < ROWS; row++) {
        bounds[row] = int32_t(used);
        for (long cell = 0; cell <= STARTS[row] / CELL; cell++, used++) pages[used] = int32_t((used * 7) % PAGES);
        write_page[row] = pages[used - 1];
    }
    Part keys(is_integer, PAGES * CELL * kv_heads, size), values(is_integer, PAGES * CELL * kv_heads, size);
    Part new_keys(is_integer, ROWS * kv_heads, size), new_values(is_integer, ROWS * kv_heads, size);
    std::vector<float> projected(ROWS * (heads + 2 * kv_heads) * size), out(ROWS * heads * size), coded(out.size());
    for (long row = 0; row < ROWS; row++) {
        float* to = projected.data() + row * (heads + 2 * kv_heads) * size;
        for (long i = 0; i < heads * size; i++) to[i] = float(int(drawn(2001)) - 1000) / 1000;
        std::memcpy(to + heads * size, new_keys.numbers.data() + row * token, token * 4);
        std::memcpy(to + (heads + kv_heads) * size, new_values.numbers.data() + row * token, token * 4);
    }
    std::vector<float> scratch(ROWS * heads * (padded + stretches * (padded + 32)));
    Step step{STARTS, write_page, first_position, bounds, pages, scratch.data(), ROWS, heads, kv_heads, size, CELL, window,
              0, stretches, 4, 1, 1};
    Layer layer{&step, projected.data(), nullptr, nullptr, nullptr, keys.numbers.data(), values.numbers.data(), nullptr,
                nullptr, nullptr, out.data(), (heads + 2 * kv_heads) * size, 0, CELL * token, CELL * kv_heads,
                heads * size, 0, 0, 0, is_integer, 1e-5f, 0.3f, 0.0f};
    weft_attention(&layer);
    layer.keys = keys.codes.data(), layer.values = values.codes.data(), layer.out = coded.data();
    layer.key_exponents = keys.exponents.data(), layer.value_exponents = values.exponents.data();
    weft_coded_attention(&layer);
    for (const Part* part : {&keys, &values})
        for (size_t i = 0; i < part->codes.size(); i++)
            if (number(is_integer, part->codes[i], part->exponents[i / size] - 127) != part->numbers[i]) return false;
    for (float value : out)
        if (!std::isfinite(value)) return false;
    return !std::memcmp(out.data(), coded.data(), out.size() * 4);
}

int main() {
    int compared = 0;
    for (bool is_integer : {false, true})
        for (long kv_heads : {1, 3})
            for (long group : {1, 2, 3, 5})
                for (long size : {2, 16, 40, 64})
                    for (long window : {0, 30}) {
                        if (!check(is_integer, kv_heads, group, size, window)) {
                            std::printf("wrong: integers %d, %ld heads of %ld, %ld queries, window %ld\n", is_integer,
                                        kv_heads, size, group, window);
                            return 1;
                        }
                        compared++;
                    }
    std::printf("%d\n", compared);
}
