// Puts matrices into the panels that matmuls read: plain numbers as in panels.h, codes as in codes.h.
//
// A piece of work is a panel, read from where the matrix lies, which may be a mapped file.
#include <algorithm>

#include "pool.h"
#include "stored.h"

namespace weft {
namespace {

// Bytes of a line of the cache, and by which each row is asked for ahead: there are more rows than processors follow.
constexpr long LINE = 64, DISTANCE = 512;

// packing.py packs the same fields. `shared` and `own`: the scales of units and of blocks, one output after another,
// where they do not lie between the codes. `row` and `matrix`: bytes from one to the next.
struct Packing {
    const uint8_t *from, *shared, *own;
    uint8_t* to;
    // Set where a code is no number.
    int64_t* odd;
    int64_t kind, matrices, outputs, inputs, row, matrix, columns, panel_bytes, threads;
};

// The rows of a panel; those after the last output are missing.
struct Part {
    const Packing& given;
    const uint8_t* from;
    long first, count;  // of all outputs of all matrices
    uint8_t* to;

    const uint8_t* row(long output) const { return from + output * given.row; }
    // Some bytes of a row, and asks for those that are read after the next ones.
    const uint8_t* at(long output, long place, long size) const {
        const uint8_t* found = row(output) + place;
        for (long ahead = 0; ahead < size; ahead += LINE) __builtin_prefetch(found + DISTANCE + ahead);
        return found;
    }
};

// Codes ---------------------------------------------------------------------------------------------------------------

using Codes32 = uint8_t[PANEL][BLOCK];

constexpr long bytes_of(int bits) { return PANEL * BLOCK * bits / 8; }

// Turns rows of words into columns.
template <long ROWS, long COLUMNS>
inline void turn_words(const uint32_t (&from)[ROWS][COLUMNS], uint32_t (&to)[COLUMNS][ROWS]) {
#if defined(__SSE2__)
    // Words are moved as floats, which changes no bit.
    for (long row = 0; row < ROWS; row += 4) {
        const float* four[4];
        for (long i = 0; i < 4; i++) four[i] = reinterpret_cast<const float*>(from[row + i]);
        pack_four(four, COLUMNS, reinterpret_cast<float*>(to[0] + row), ROWS);
    }
#else
    for (long column = 0; column < COLUMNS; column++)
        for (long row = 0; row < ROWS; row++) to[column][row] = from[row][column];
#endif
}

// Lays out the codes of a block of all outputs in strips, each with halves of two quads and planes of what is above.
template <int BITS>
void lay_out(const Codes32& codes, uint8_t* to) {
    for (long strip = 0; strip < 2; strip++, to += bytes_of(BITS) / 2) {
        uint32_t words[HALF][8], quads[8][HALF], found[BITS][HALF] = {};
        std::memcpy(words, codes + strip * HALF, sizeof(words));
        turn_words(words, quads);
        for (int quad = 0; quad < 8; quad++)
            for (long output = 0; output < HALF; output++) {
                uint32_t word = quads[quad][output];
                if constexpr (BITS == 8) {
                    found[quad][output] = word;
                } else {
                    found[quad / 2][output] |= (word & 0x0f0f0f0fu) << (quad % 2 * 4);
                    if constexpr (BITS == 5) found[4][output] |= (word >> 4 & 0x01010101u) << quad;
                    if constexpr (BITS == 6) found[4 + quad / 4][output] |= (word >> 4 & 0x03030303u) << (quad % 4 * 2);
                }
            }
        std::memcpy(to, found, sizeof(found));
    }
}

inline uint8_t half_of(const uint8_t* codes, long at, int high) { return codes[at] >> (4 * high) & 15; }

// The low halves of adjacent bytes, then the high ones.
inline void halves_after_each_other(const uint8_t* codes, uint8_t* to) {
    for (long i = 0; i < BLOCK / 2; i++) to[i] = codes[i] & 15;
    for (long i = 0; i < BLOCK / 2; i++) to[BLOCK / 2 + i] = codes[i] >> 4;
}

inline void pairs(const uint8_t* codes, uint8_t* to) {
    for (long i = 0; i < BLOCK / 2; i++) {
        to[2 * i] = codes[i] & 15;
        to[2 * i + 1] = codes[i] >> 4;
    }
}

inline void add_fifth(const uint8_t* bits, uint8_t* to) {
    for (long i = 0; i < BLOCK; i++) to[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
}

// Types of blocks in GGUF: `BYTES` of a unit of `BLOCKS`, the scales of a unit, of `SIZE` bytes each from its byte
// `SCALES` on, and those of block j.

template <int OWN_BITS, long OWN_BYTES, int OWN_SHARED, long OWN_BLOCKS = 1, int OWN_SCALES = 0, int OWN_SIZE = 2>
struct Type {
    static constexpr int BITS = OWN_BITS, SHARED = OWN_SHARED, SIZE = OWN_SIZE, OWN = OWN_SCALES;
    static constexpr long BYTES = OWN_BYTES, BLOCKS = OWN_BLOCKS, SCALES = 0;
    static uint8_t scale(const uint8_t*, long, int) { return 0; }
};

struct TypeQ8_0 : Type<8, 34, 1> {
    static void codes(const uint8_t* unit, long, uint8_t* to) {
        for (long i = 0; i < BLOCK; i++) to[i] = unit[2 + i] ^ 0x80;
    }
};

template <long BYTES, int SHARED, int SIZE = 2>
struct TypeFours : Type<4, BYTES, SHARED, 1, 0, SIZE> {
    static void codes(const uint8_t* unit, long, uint8_t* to) { halves_after_each_other(unit + SHARED * SIZE, to); }
};

template <long BYTES, int SHARED>
struct TypeFives : Type<5, BYTES, SHARED> {
    static void codes(const uint8_t* unit, long, uint8_t* to) {
        halves_after_each_other(unit + SHARED * 2 + 4, to);
        add_fifth(unit + SHARED * 2, to);
    }
};

template <int BITS, long BYTES>
struct TypeLevels : Type<BITS, BYTES, 2, 8, 2> {
    // Six bits of the scale of block j, or of its least number.
    static uint8_t scale(const uint8_t* unit, long j, int which) {
        const uint8_t *low = unit + 4 + 4 * which, *rest = unit + 12;
        return j < 4 ? low[j] & 63 : half_of(rest, j - 4, which) | low[j - 4] >> 6 << 4;
    }
};

struct TypeQ4_K : TypeLevels<4, 144> {
    static void codes(const uint8_t* unit, long j, uint8_t* to) {
        for (long i = 0; i < BLOCK; i++) to[i] = half_of(unit + 16 + j / 2 * BLOCK, i, j % 2);
    }
};

struct TypeQ5_K : TypeLevels<5, 176> {
    static void codes(const uint8_t* unit, long j, uint8_t* to) {
        for (long i = 0; i < BLOCK; i++)
            to[i] = half_of(unit + 48 + j / 2 * BLOCK, i, j % 2) | (unit[16 + i] >> j & 1) << 4;
    }
};

struct TypeQ6_K : Type<6, 210, 1, 8, 2> {
    static constexpr long SCALES = 208;
    static void codes(const uint8_t* unit, long j, uint8_t* to) {
        const uint8_t *low = unit + j / 4 * 64 + j % 2 * BLOCK, *high = unit + 128 + j / 4 * BLOCK;
        int place = j % 4;
        for (long i = 0; i < BLOCK; i++) to[i] = half_of(low, i, place / 2) | (high[i] >> (2 * place) & 3) << 4;
    }
    static uint8_t scale(const uint8_t* unit, long j, int which) { return unit[192 + 2 * j + which]; }
};

struct TypeIQ4_XS : Type<4, 136, 1, 8, 1> {
    static void codes(const uint8_t* unit, long j, uint8_t* to) {
        halves_after_each_other(unit + 8 + j * BLOCK / 2, to);
    }
    static uint8_t scale(const uint8_t* unit, long j, int) {
        return uint8_t((half_of(unit + 4, j / 2, j % 2) | (unit[2 + j / 4] >> (j % 4 * 2) & 3) << 4) - 32);
    }
};

template <class Own>
void pack_type(const Part& part) {
    uint8_t* to = part.to;
    for (long unit = 0; unit < part.given.inputs / (BLOCK * Own::BLOCKS); unit++) {
        std::memset(to, 0, PANEL * Own::SHARED * Own::SIZE);
        for (long output = 0; output < part.count; output++) {
            const uint8_t* from = part.at(output, unit * Own::BYTES, Own::BYTES) + Own::SCALES;
            for (int scale = 0; scale < Own::SHARED; scale++)
                std::memcpy(to + (scale * PANEL + output) * Own::SIZE, from + scale * Own::SIZE, Own::SIZE);
        }
        to += PANEL * Own::SHARED * Own::SIZE;
        for (long block = 0; block < Own::BLOCKS; block++) {
            Codes32 codes = {};
            std::memset(to, 0, PANEL * Own::OWN);
            for (long output = 0; output < part.count; output++) {
                const uint8_t* from = part.row(output) + unit * Own::BYTES;
                Own::codes(from, block, codes[output]);
                for (int scale = 0; scale < Own::OWN; scale++)
                    to[scale * PANEL + output] = Own::scale(from, block, scale);
            }
            to += PANEL * Own::OWN;
            lay_out<Own::BITS>(codes, to);
            to += bytes_of(Own::BITS);
        }
    }
}

// Groups whose scales lie apart: `SHARED` for `columns` inputs, of `SIZE` bytes each, and `OWN` bytes for each block.
template <int BITS, int SHARED, int SIZE, int OWN>
void pack_groups(const Part& part) {
    const Packing& given = part.given;
    uint8_t* to = part.to;
    long blocks = given.inputs / BLOCK, each = given.columns / BLOCK, units = (blocks + each - 1) / each;
    for (long block = 0; block < blocks; block++) {
        if (block % each == 0) {
            std::memset(to, 0, PANEL * SHARED * SIZE);
            for (long output = 0; output < part.count; output++) {
                const uint8_t* from = given.shared + ((part.first + output) * units + block / each) * SHARED * SIZE;
                for (int scale = 0; scale < SHARED; scale++)
                    std::memcpy(to + (scale * PANEL + output) * SIZE, from + scale * SIZE, SIZE);
            }
            to += PANEL * SHARED * SIZE;
        }
        Codes32 codes = {};
        std::memset(to, 0, PANEL * OWN);
        for (long output = 0; output < part.count; output++) {
            const uint8_t* from = part.at(output, block * BLOCK * BITS / 8, BLOCK * BITS / 8);
            if constexpr (BITS == 4)
                pairs(from, codes[output]);
            else
                std::memcpy(codes[output], from, BLOCK);
            for (int scale = 0; scale < OWN; scale++)
                to[scale * PANEL + output] = given.own[((part.first + output) * blocks + block) * OWN + scale];
        }
        to += PANEL * OWN;
        lay_out<BITS>(codes, to);
        to += bytes_of(BITS);
    }
}

// Numbers -------------------------------------------------------------------------------------------------------------

constexpr long TURNED = 64;

// Some inputs of all outputs, input by input. Of 16-bit numbers outputs j and j + 16 lie side by side; so do adjacent
// ones of others.
template <class Value>
void turn(const Part& part, long first, long count, uint8_t* to) {
    constexpr long EACH = 4 / sizeof(Value), WORDS = PANEL / EACH;
    for (long begin = first; begin < first + count; begin += TURNED) {
        long some = std::min(TURNED, first + count - begin);
        Value rows[PANEL][TURNED] = {};
        for (long output = 0; output < part.count; output++)
            std::memcpy(rows[output], part.at(output, begin * sizeof(Value), TURNED * sizeof(Value)), some * sizeof(Value));
        uint32_t words[WORDS][TURNED], turned[TURNED][WORDS];
        for (long word = 0; word < WORDS; word++)
            for (long i = 0; i < TURNED; i++) {
                uint32_t found = 0;
                for (long k = 0; k < EACH; k++)
                    found |= uint32_t(rows[sizeof(Value) == 2 ? word + k * HALF : word * EACH + k][i]) << (32 / EACH * k % 32);
                words[word][i] = found;
            }
        turn_words(words, turned);
        std::memcpy(to + (begin - first) * PANEL * sizeof(Value), turned, some * sizeof(turned[0]));
    }
}

// FP8: for every run of `columns` inputs the scales of all outputs, in float32, then codes.
void pack_eights(const Part& part) {
    const Packing& given = part.given;
    long runs = (given.inputs + given.columns - 1) / given.columns;
    uint8_t* to = part.to;
    for (long run = 0; run < runs; run++) {
        float scales[PANEL] = {};
        for (long output = 0; output < part.count; output++)
            std::memcpy(scales + output, given.shared + ((part.first + output) * runs + run) * 4, 4);
        std::memcpy(to, scales, sizeof(scales));
        long first = run * given.columns, count = std::min(given.columns, given.inputs - first);
        turn<uint8_t>(part, first, count, to + sizeof(scales));
        to += sizeof(scales);
        uint8_t found = 0;
        for (long i = 0; i < count * PANEL; i++) found |= (to[i] & 0x7f) == 0x7f;
        if (found) __atomic_store_n(given.odd, 1, __ATOMIC_RELAXED);
        to += count * PANEL;
    }
}

void pack_panel(const Part& part) {
    const Packing& given = part.given;
    switch (given.kind) {
        case FLOATS: return turn<uint32_t>(part, 0, given.inputs, part.to);
        case BRAINS: return turn<uint16_t>(part, 0, given.inputs, part.to);
        case Q8_0: return pack_type<TypeQ8_0>(part);
        case Q4_0: return pack_type<TypeFours<18, 1>>(part);
        case Q4_1: return pack_type<TypeFours<20, 2>>(part);
        case Q5_0: return pack_type<TypeFives<22, 1>>(part);
        case Q5_1: return pack_type<TypeFives<24, 2>>(part);
        case Q4_K: return pack_type<TypeQ4_K>(part);
        case Q5_K: return pack_type<TypeQ5_K>(part);
        case Q6_K: return pack_type<TypeQ6_K>(part);
        case IQ4_NL: return pack_type<TypeFours<18, 1>>(part);
        case IQ4_XS: return pack_type<TypeIQ4_XS>(part);
        case MXFP4: return given.shared ? pack_groups<4, 1, 1, 0>(part) : pack_type<TypeFours<17, 1, 1>>(part);
        case FP8: return pack_eights(part);
        case INT4: return pack_groups<4, 1, 4, 0>(part);
        case INT4_ZEROS: return pack_groups<4, 2, 4, 0>(part);
        case INT8: return pack_groups<8, 1, 4, 0>(part);
        case INT8_ZEROS: return pack_groups<8, 2, 4, 0>(part);
        case NVFP4: return pack_groups<4, 1, 4, 2>(part);
    }
}

}  // namespace
}  // namespace weft

extern "C" void weft_pack(const weft::Packing* call) {
    using namespace weft;
    long panels = (call->outputs + PANEL - 1) / PANEL;
    share(call->matrices * panels, call->threads, [&](long piece) {
        long matrix = piece / panels, first = piece % panels * PANEL;
        const uint8_t* from = call->from + matrix * call->matrix + first * call->row;
        long count = std::min(PANEL, call->outputs - first);
        pack_panel({*call, from, matrix * call->outputs + first, count, call->to + piece * call->panel_bytes});
    });
}
