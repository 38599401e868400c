// Memory that a thread keeps between calls: a fresh allocation of this size would cost page faults in every call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace mega_moe {
namespace KERNEL_CORE_ISA {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `bytes`, aligned to a page; what it held before is lost.
  template <typename T>
  T* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(4096, static_cast<size_t>(size_));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
