// Tile loaders: a format is how its codes lie (`at`), what their scales are (`factor`, `least`), and both of them.
//
// A panel is units of one or eight blocks. A unit has a header with the scales of all its blocks, and each block scales of
// its own and the codes of two strips of sixteen outputs. Quads are four inputs. `number = factor * (code - ZERO) + least`.
#pragma once

#include "integers.h"

namespace weft {

constexpr long STRIP = 16, QUADS = BLOCK / 4;
// Bytes of one plane of a strip: four for every output.
constexpr long PLANE = STRIP * 4;

// Codes -----------------------------------------------------------------------------------------------------------------

template <int ZERO_CODE>
struct Eights {
    static constexpr int TOP = 255, ZERO = ZERO_CODE;
    static constexpr long BYTES = QUADS * PLANE;
    Codes at(const char* strip, int quad, int vector) const {
        return load_as<Codes>(strip + quad * PLANE + vector * WIDTH * 4);
    }
};

// Two quads in a plane: the first in the low halves of its bytes.
inline Codes nibbles(const char* strip, int quad, int vector) {
    Codes both = load_as<Codes>(strip + quad / 2 * PLANE + vector * WIDTH * 4);
    return (quad % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
}

template <int ZERO_CODE>
struct Fours {
    static constexpr int TOP = 15, ZERO = ZERO_CODE;
    static constexpr long BYTES = QUADS / 2 * PLANE;
    Codes at(const char* strip, int quad, int vector) const { return nibbles(strip, quad, vector); }
};

// The plane behind the halves has a bit for every quad.
template <int ZERO_CODE>
struct Fives {
    static constexpr int TOP = 31, ZERO = ZERO_CODE;
    static constexpr long HALVES = QUADS / 2 * PLANE, BYTES = HALVES + PLANE;
    Codes at(const char* strip, int quad, int vector) const {
        Codes bits = load_as<Codes>(strip + HALVES + vector * WIDTH * 4);
        bits = quad < 4 ? bits << (4 - quad) : bits >> (quad - 4);
        return nibbles(strip, quad, vector) | (bits & 0x10101010u);
    }
};

// The two planes behind the halves have two bits for every quad.
template <int ZERO_CODE>
struct Sixes {
    static constexpr int TOP = 63, ZERO = ZERO_CODE;
    static constexpr long HALVES = QUADS / 2 * PLANE, BYTES = HALVES + 2 * PLANE;
    Codes at(const char* strip, int quad, int vector) const {
        Codes bits = load_as<Codes>(strip + HALVES + quad / 4 * PLANE + vector * WIDTH * 4);
        int place = 2 * (quad % 4);
        bits = place < 4 ? bits << (4 - place) : bits >> (place - 4);
        return nibbles(strip, quad, vector) | (bits & 0x30303030u);
    }
};

// Halves are places in a table.
template <class Table>
struct Places {
    static constexpr int TOP = Table::TOP, ZERO = Table::ZERO;
    static constexpr long BYTES = QUADS / 2 * PLANE;
    Codes table = repeated(Table::codes);
    Codes at(const char* strip, int quad, int vector) const { return look_up(table, nibbles(strip, quad, vector)); }
};

// Numbers plus ZERO.
struct Uneven {
    static constexpr int TOP = 240, ZERO = 127;
    static constexpr uint8_t codes[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                          128, 140, 152, 165, 180, 196, 216, 240};
};

// Twice the four-bit floats, plus ZERO.
struct Doubled {
    static constexpr int TOP = 24, ZERO = 12;
    static constexpr uint8_t codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

// Scales ----------------------------------------------------------------------------------------------------------------

// A place in a panel: a unit's header, and a block's own scales. `output`: the first of a vector, in its panel.
struct Place {
    const char *unit, *block;
    int output;
    template <int SIZE>
    const char* in_header(int row) const {
        return unit + SIZE * (row * PANEL + output);
    }
    const char* in_block(int row) const { return block + row * PANEL + output; }
};

// One for a block.
struct Scale {
    static constexpr long UNIT = 1, HEADER = 2 * PANEL, OWN = 0;
    static constexpr int RUNS = 1;
    static constexpr bool HAS_LEAST = false;
    Floats factor(const Place& at, int) const { return from_halves(at.in_header<2>(0)); }
    Floats least(const Place&) const { return Floats{}; }
};

struct ScaleAndLeast : Scale {
    static constexpr long HEADER = 4 * PANEL;
    static constexpr bool HAS_LEAST = true;
    Floats least(const Place& at) const { return from_halves(at.in_header<2>(1)); }
};

// Half of a power of two; the least two have no exponent of their own.
struct Power : Scale {
    static constexpr long HEADER = PANEL;
    Floats factor(const Place& at, int) const {
        Counts exponent = widened(load_as<Bytes>(at.in_header<1>(0))), small = (exponent + 1) << 21;
        return (Floats)(exponent < 2 ? small : (exponent - 1) << 23);
    }
};

// Eight blocks share a scale and one of the least numbers, which each has times an integer.
struct TwoLevels {
    static constexpr long UNIT = 8, HEADER = 4 * PANEL, OWN = 2 * PANEL;
    static constexpr int RUNS = 1;
    static constexpr bool HAS_LEAST = true;
    Floats factor(const Place& at, int) const {
        return from_halves(at.in_header<2>(0)) * byte_floats<Bytes>(at.in_block(0));
    }
    Floats least(const Place& at) const {
        return -(from_halves(at.in_header<2>(1)) * byte_floats<Bytes>(at.in_block(1)));
    }
};

// Eight blocks share a scale, which each of their runs has times an integer.
template <int EACH>
struct Levels {
    static constexpr long UNIT = 8, HEADER = 2 * PANEL, OWN = EACH * PANEL;
    static constexpr int RUNS = EACH;
    static constexpr bool HAS_LEAST = false;
    Floats factor(const Place& at, int run) const {
        return from_halves(at.in_header<2>(0)) * byte_floats<SignedBytes>(at.in_block(run));
    }
    Floats least(const Place&) const { return Floats{}; }
};

// One for each output and group of blocks, in float32.
struct OfGroup {
    static constexpr long HEADER = 4 * PANEL, OWN = 0;
    static constexpr int RUNS = 1;
    static constexpr bool HAS_LEAST = false;
    Floats factor(const Place& at, int) const { return load_as<Floats>(at.in_header<4>(0)); }
    Floats least(const Place&) const { return Floats{}; }
};

struct OfGroupAndLeast : OfGroup {
    static constexpr long HEADER = 8 * PANEL;
    static constexpr bool HAS_LEAST = true;
    Floats least(const Place& at) const { return load_as<Floats>(at.in_header<4>(1)); }
};

// A factor of each output, times a float of eight bits for each run.
struct OfRuns {
    static constexpr long HEADER = 4 * PANEL, OWN = 2 * PANEL;
    static constexpr int RUNS = 2;
    static constexpr bool HAS_LEAST = false;
    Floats factor(const Place& at, int run) const {
        return load_as<Floats>(at.in_header<4>(0)) * from_eights(at.in_block(run));
    }
    Floats least(const Place&) const { return Floats{}; }
};

// Formats ---------------------------------------------------------------------------------------------------------------

template <class OwnCodes, class OwnScales>
struct Loader {
    using Code = OwnCodes;
    using Scales = OwnScales;
    static constexpr long BLOCK_BYTES = Scales::OWN + 2 * Code::BYTES;
    static constexpr long UNIT_BYTES = Scales::HEADER + Scales::UNIT * BLOCK_BYTES;
    Code code;
    Scales scales;

    Place place(const char* panel, long block) const {
        const char* unit = panel + block / Scales::UNIT * UNIT_BYTES;
        return {unit, unit + Scales::HEADER + block % Scales::UNIT * BLOCK_BYTES, 0};
    }
    static const char* strip(const Place& at, int number) { return at.block + Scales::OWN + number * Code::BYTES; }
};

// Units of any power of two of blocks, the last of which may be shorter.
template <class OwnCodes, class OwnScales>
struct GroupLoader {
    using Code = OwnCodes;
    using Scales = OwnScales;
    static constexpr long BLOCK_BYTES = Scales::OWN + 2 * Code::BYTES;
    // Of a unit's blocks, the logarithm.
    int shift;
    Code code;
    Scales scales;

    explicit GroupLoader(long inputs) : shift(__builtin_ctzl(inputs / BLOCK)) {}
    Place place(const char* panel, long block) const {
        long unit = block >> shift;
        const char* header = panel + unit * Scales::HEADER + (unit << shift) * BLOCK_BYTES;
        return {header, panel + (unit + 1) * Scales::HEADER + block * BLOCK_BYTES, 0};
    }
    static const char* strip(const Place& at, int number) { return at.block + Scales::OWN + number * Code::BYTES; }
};

// body(loader) for the kind of some weights, which are integers.
template <class Body>
inline void with_loader(const StoredPanels& weights, const Body& body) {
    switch (weights.kind) {
        case Q8_0: return body(Loader<Eights<128>, Scale>{});
        case Q4_0: return body(Loader<Fours<8>, Scale>{});
        case Q4_1: return body(Loader<Fours<0>, ScaleAndLeast>{});
        case Q5_0: return body(Loader<Fives<16>, Scale>{});
        case Q5_1: return body(Loader<Fives<0>, ScaleAndLeast>{});
        case Q4_K: return body(Loader<Fours<0>, TwoLevels>{});
        case Q5_K: return body(Loader<Fives<0>, TwoLevels>{});
        case Q6_K: return body(Loader<Sixes<32>, Levels<2>>{});
        case IQ4_NL: return body(Loader<Places<Uneven>, Scale>{});
        case IQ4_XS: return body(Loader<Places<Uneven>, Levels<1>>{});
        case MXFP4: return body(Loader<Places<Doubled>, Power>{});
        case INT4: return body(GroupLoader<Fours<8>, OfGroup>(weights.columns));
        case INT4_ZEROS: return body(GroupLoader<Fours<8>, OfGroupAndLeast>(weights.columns));
        case INT8: return body(GroupLoader<Eights<128>, OfGroup>(weights.columns));
        case INT8_ZEROS: return body(GroupLoader<Eights<128>, OfGroupAndLeast>(weights.columns));
        case NVFP4: return body(GroupLoader<Places<Doubled>, OfRuns>(weights.columns));
    }
}

}  // namespace weft
