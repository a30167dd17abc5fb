// Scratch memory of an operator.
#pragma once

#include <cstdint>
#include <new>

namespace ds_cpu {

// Numbers that no register's load divides over two lines of the cache.
class AlignedFloats {
  public:
    explicit AlignedFloats(int64_t count) : data_(static_cast<float*>(::operator new(count * sizeof(float), kLine))) {}
    ~AlignedFloats() { ::operator delete(data_, kLine); }
    AlignedFloats(const AlignedFloats&) = delete;
    AlignedFloats& operator=(const AlignedFloats&) = delete;
    float* data() const { return data_; }

  private:
    static constexpr std::align_val_t kLine{64};
    float* data_;
};

}  // namespace ds_cpu
