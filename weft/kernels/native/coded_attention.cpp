// Attention over pages of codes.

#include "attention.h"
#include "pages.h"

extern "C" void weft_coded_attention(const weft::Layer* call) {
    using namespace weft;
    call->code_kind == 0 ? attend_layer<Eight>(*call) : attend_layer<Whole>(*call);
}
