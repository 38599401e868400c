// Where a region lies: in this process, or in a file that processes of one host map.
#pragma once

#include <memory>
#include <string>

#include "cpu/region.hpp"

namespace ep_comm {

class Memory {
 public:
  Memory(void* base, int64_t bytes, uint64_t device, uint64_t file)
      : base_(base), bytes_(bytes), device_(device), file_(file) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* base() const { return static_cast<uint8_t*>(base_); }
  bool is_file(uint64_t device, uint64_t file) const { return file_ != 0 && device == device_ && file == file_; }

 private:
  void* base_;
  int64_t bytes_;
  uint64_t device_, file_;  // numbers of the file, 0 without one
};

std::shared_ptr<Memory> private_memory(const Shape& shape);

// Makes the file or opens the one that a peer made. Throws std::system_error; std::invalid_argument for a file that is
// something else; std::domain_error, naming both shapes, for one of another shape.
std::shared_ptr<Memory> file_memory(const std::string& path, const Shape& shape);

std::string describe(const Shape& shape);

}  // namespace ep_comm
