// Memory for one call to work with. The caller allocates it, because there an error can be raised: a kernel could only
// end the process.
#pragma once

namespace weft {

class Work {
   public:
    explicit Work(void* begin) : next_(static_cast<char*>(begin)) {}

    // Room for `count` values, up to the next boundary of BOUNDARY bytes.
    template <class Value>
    Value* take(long count) {
        auto found = reinterpret_cast<Value*>(next_);
        next_ += (count * long(sizeof(Value)) + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
        return found;
    }

   private:
    static constexpr long BOUNDARY = 64;
    char* next_;
};

}  // namespace weft
