// Checks products in C++ without Python, so that they can be compiled for another processor and run in an emulator.
// Prints the number of products compared; exits with 1 at the first wrong one.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

// As in linear.cpp.
struct Product {
    const void *x, *panels, *bias;
    void *y, *room;
    int64_t rows, stride, inputs, outputs, y_stride, activation, parts, kind, weight_kind, result_kind, threads;
    int64_t panel_bytes, columns, are_rounded;
};

extern "C" void weft_linear(const Product*);

static uint32_t seed = 1;

static float drawn() {
    seed = seed * 1664525u + 1013904223u;
    return float(int32_t(seed)) / 2147483648.0f;
}

static uint16_t shortened(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float widened(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// Float inputs with bfloat16 or float weights; every row also alone, which must give the same bits.
static bool check(long rows, long inputs, long outputs, bool is_short) {
    long panels = (outputs + 31) / 32;
    std::vector<float> x(rows * inputs), weight(outputs * inputs), floats(panels * inputs * 32);
    std::vector<uint16_t> halves(panels * inputs * 32);
    for (float& value : x) value = drawn();
    for (float& value : weight) value = is_short ? widened(shortened(drawn())) : drawn();
    for (long o = 0; o < outputs; o++)
        for (long i = 0; i < inputs; i++) {
            long at = (o / 32 * inputs + i) * 32, place = o % 32;
            floats[at + place] = weight[o * inputs + i];
            halves[at + place % 16 * 2 + place / 16] = shortened(weight[o * inputs + i]);
        }
    const void* packed = is_short ? (const void*)halves.data() : (const void*)floats.data();
    std::vector<float> y(rows * outputs), alone(outputs), room(rows * inputs);
    // Many threads get pieces of fewer rows.
    long threads = rows > 200 ? 6 : 2;
    Product all{x.data(), packed, nullptr, y.data(), room.data(), rows, inputs, inputs, outputs,
                outputs,  0,      1,       0,        is_short,    0,    threads, 0,     0,      0};
    weft_linear(&all);
    for (long row = 0; row < rows; row++) {
        Product one = all;
        one.x = x.data() + row * inputs;
        one.y = alone.data();
        one.rows = one.threads = 1;
        weft_linear(&one);
        if (std::memcmp(alone.data(), y.data() + row * outputs, outputs * 4)) return false;
        for (long o = 0; o < outputs; o++) {
            double exact = 0;
            for (long i = 0; i < inputs; i++) exact += double(x[row * inputs + i]) * weight[o * inputs + i];
            if (std::fabs(exact - y[row * outputs + o]) > 1e-4) return false;
        }
    }
    return true;
}

// A format of blocks, by its number in stored.h: bytes of an output's shared and own scales, bits of a code, blocks of a
// unit, and how many of the shared scales are 16-bit floats.
struct Format {
    int kind, shared, own, bits, blocks, halves;
};

// Random panels with inputs that are integers already: rounding them changes nothing, so the sums of integers and those of
// widened weights agree; and every row alone must give the same bits.
static bool check_stored(Format format, long rows, long inputs, long outputs) {
    long panels = (outputs + 31) / 32, units = inputs / 32 / format.blocks;
    long unit = 32 * (format.shared + format.blocks * (format.own + 4 * format.bits));
    std::vector<uint8_t> bytes(panels * units * unit);
    for (uint8_t& byte : bytes) byte = uint8_t(drawn() * 127 + 128);
    for (long at = 0; at < panels * units; at++) {
        uint8_t* header = bytes.data() + at * unit;
        for (long i = 0; i < 32 * format.halves; i++) {
            header[2 * i + 1] = uint8_t(0x28 | (header[2 * i + 1] & 0x83));
        }
        if (!format.halves)
            for (long i = 0; i < 32; i++) header[i] = uint8_t(header[i] % 8);
    }
    std::vector<float> x(rows * inputs), y(rows * outputs), wide(rows * outputs), alone(outputs), room(rows * inputs);
    for (long i = 0; i < rows * inputs; i++) x[i] = i % 32 ? std::rint(drawn() * 126) : 127.0f;
    Product rounded{x.data(), bytes.data(), nullptr, y.data(), room.data(), rows, inputs, inputs, outputs, outputs,
                    0, 1, 0, format.kind, 0, 3, units * unit, 0, 1};
    weft_linear(&rounded);
    Product widened = rounded;
    widened.y = wide.data();
    widened.are_rounded = 0;
    weft_linear(&widened);
    float largest = 0;
    for (float value : wide) largest = std::fmax(largest, std::fabs(value));
    for (long row = 0; row < rows; row++) {
        for (const Product& all : {rounded, widened}) {
            Product one = all;
            one.x = x.data() + row * inputs;
            one.y = alone.data();
            one.rows = one.threads = 1;
            weft_linear(&one);
            if (std::memcmp(alone.data(), static_cast<float*>(all.y) + row * outputs, outputs * 4)) return false;
        }
        for (long o = 0; o < outputs; o++)
            if (!(std::fabs(y[row * outputs + o] - wide[row * outputs + o]) <= 1e-5f * largest)) return false;
    }
    return largest > 0;
}

int main() {
    int compared = 0;
    for (long rows : {1, 2, 3, 4, 6, 7, 13, 200, 400})
        for (long inputs : {1, 37, 300})
            for (long outputs : {1, 31, 64, 70})
                for (bool is_short : {false, true}) {
                    if (!check(rows, inputs, outputs, is_short)) {
                        std::printf("wrong: %ld rows, %ld inputs, %ld outputs, short %d\n", rows, inputs, outputs, is_short);
                        return 1;
                    }
                    compared++;
                }
    for (Format format : {Format{2, 2, 0, 8, 1, 1}, {3, 2, 0, 4, 1, 1}, {4, 4, 0, 4, 1, 2}, {5, 2, 0, 5, 1, 1},
                          {6, 4, 0, 5, 1, 2}, {7, 4, 2, 4, 8, 2}, {8, 4, 2, 5, 8, 2}, {9, 2, 2, 6, 8, 1},
                          {10, 2, 0, 4, 1, 1}, {11, 2, 1, 4, 8, 1}, {12, 1, 0, 4, 1, 0}})
        for (long rows : {1, 2, 3, 5, 9, 23})
            for (long outputs : {1, 40}) {
                if (!check_stored(format, rows, 512, outputs)) {
                    std::printf("wrong: kind %d, %ld rows, %ld outputs\n", format.kind, rows, outputs);
                    return 1;
                }
                compared++;
            }
    std::printf("%d\n", compared);
}
