#include "cpu/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

namespace ep_comm {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

class File {
 public:
  explicit File(int number) : number_(number) {}
  ~File() {
    if (number_ >= 0) ::close(number_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

std::shared_ptr<Memory> map(int file, int64_t bytes, const std::string& what) {
  const int flags = MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (base == MAP_FAILED) fail(errno, "map " + std::to_string(bytes) + " bytes of " + what);
  struct stat status{};
  if (file >= 0 && ::fstat(file, &status) != 0) status = {};
  return std::make_shared<Memory>(base, bytes, status.st_dev, status.st_ino);
}

void begin(Memory& memory, const Shape& shape, int64_t bytes) {
  auto* header = new (memory.base()) Header{};
  header->bytes = bytes;
  header->shape = shape;
  header->magic = kMagic;
}

bool same(const Shape& a, const Shape& b) {
  return a.ranks == b.ranks && a.max_tokens == b.max_tokens && a.hidden == b.hidden && a.top_k == b.top_k &&
         a.experts == b.experts && a.dispatch == b.dispatch && a.combine == b.combine;
}

// Complete under another name first, then linked to its own: nobody opens half a file, and only one maker wins.
bool make(const std::string& path, const Shape& shape, int64_t bytes) {
  std::string draft = path + ".XXXXXX";
  const File file(::mkostemp(draft.data(), O_CLOEXEC));
  if (file.number() < 0) fail(errno, "make " + draft);
  // A full disk now rather than a bus error later; asked first, so as not to fill it for others on the way.
  struct statvfs room{};
  const bool known = ::fstatvfs(file.number(), &room) == 0;
  const bool fits = !known || static_cast<double>(room.f_bavail) * room.f_frsize >= static_cast<double>(bytes);
  const int error = fits ? ::posix_fallocate(file.number(), 0, bytes) : ENOSPC;
  bool won = false;
  int link_error = 0;
  if (error == 0) {
    try {
      begin(*map(file.number(), bytes, draft), shape, bytes);
    } catch (...) {
      ::unlink(draft.c_str());
      throw;
    }
    won = ::link(draft.c_str(), path.c_str()) == 0;
    link_error = won ? 0 : errno;
  }
  ::unlink(draft.c_str());
  if (error != 0) fail(error, "reserve " + std::to_string(bytes) + " bytes in " + path);
  if (!won && link_error != EEXIST) fail(link_error, "make " + path);
  return won;
}

}  // namespace

Memory::~Memory() { ::munmap(base_, bytes_); }

std::string describe(const Shape& shape) {
  static const char* const names[] = {"float32", "bfloat16", "fp8"};
  return "ranks=" + std::to_string(shape.ranks) + " max_tokens=" + std::to_string(shape.max_tokens) +
         " hidden=" + std::to_string(shape.hidden) + " top_k=" + std::to_string(shape.top_k) +
         " experts=" + std::to_string(shape.experts) + " dispatch=" + names[static_cast<int>(shape.dispatch)] +
         " combine=" + names[static_cast<int>(shape.combine)];
}

std::shared_ptr<Memory> private_memory(const Shape& shape) {
  const int64_t bytes = offsets_of(shape).bytes;
  auto memory = map(-1, bytes, "memory");
  begin(*memory, shape, bytes);
  return memory;
}

std::shared_ptr<Memory> file_memory(const std::string& path, const Shape& shape) {
  const int64_t bytes = offsets_of(shape).bytes;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const File file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.number() < 0) {
      if (errno != ENOENT) fail(errno, "open " + path);
      make(path, shape, bytes);
      continue;
    }
    struct stat status{};
    if (::fstat(file.number(), &status) != 0) fail(errno, "look at " + path);
    if (status.st_size < static_cast<int64_t>(sizeof(Header)))
      throw std::invalid_argument("path: got a file of " + std::to_string(status.st_size) +
                                  " bytes, allowed is a new path or one that a peer has made");
    const auto head = map(file.number(), sizeof(Header), path);
    const auto& header = *reinterpret_cast<const Header*>(head->base());
    if (header.magic != kMagic)
      throw std::invalid_argument(
          "path: got a file of something else, allowed is a new path or one that a peer has made");
    if (!same(header.shape, shape))
      throw std::domain_error("peers at this path have " + describe(header.shape) + ", this rank " + describe(shape));
    if (header.bytes != bytes || status.st_size != bytes)
      throw std::invalid_argument("path: got a region of " + std::to_string(status.st_size) + " bytes, allowed is " +
                                  std::to_string(bytes) + ": peers run another version");
    return map(file.number(), bytes, path);
  }
  throw std::invalid_argument("path: got one that comes and goes, allowed is one that nobody else removes");
}

}  // namespace ep_comm
