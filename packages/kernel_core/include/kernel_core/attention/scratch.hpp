// Working memory of a thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace kernel_core {
namespace KERNEL_CORE_ISA {

// Grows, never shrinks; cache-line aligned, so that no vector load straddles two lines. New memory is zero: readers
// that give old contents the weight 0 need them to be finite.
template <typename T>
class Scratch {
 public:
  T* reserve(int64_t n) {
    if (n > size_) {
      const size_t bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      if (!data_) throw std::bad_alloc();
      std::memset(static_cast<void*>(data_.get()), 0, bytes);
      size_ = static_cast<int64_t>(bytes / sizeof(T));
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
