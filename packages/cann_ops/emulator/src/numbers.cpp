// Numbers of all formats as bytes, and atomic stores of engines.
#include <algorithm>
#include <cstring>

#include "instruction.hpp"

namespace asc_host {

void need_range(const char* what, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    fail("value", "%s: %s: got %lld, allowed are %lld to %lld", what, name, static_cast<long long>(value),
         static_cast<long long>(low), static_cast<long long>(high));
  }
}

int number_bytes(Number number) {
  switch (number) {
    case Number::kFloat:
    case Number::kInt32:
      return 4;
    case Number::kHalf:
    case Number::kBfloat16:
    case Number::kInt16:
      return 2;
    default:
      return 1;
  }
}

namespace {

template <class T>
T read_as(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void write_as(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

template <class T>
T combine(Atomic op, T a, T b) {
  if (op == Atomic::kMax) return a > b ? a : b;
  if (op == Atomic::kMin) return a < b ? a : b;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return a + b;
}

}  // namespace

float number_value(Number number, const uint8_t* p) {
  switch (number) {
    case Number::kFloat:
      return read_as<float>(p);
    case Number::kHalf:
      return static_cast<float>(read_as<half>(p));
    case Number::kBfloat16:
      return read_as<bfloat16_t>(p);
    case Number::kInt32:
      return static_cast<float>(read_as<int32_t>(p));
    case Number::kInt16:
      return read_as<int16_t>(p);
    case Number::kInt8:
      return read_as<int8_t>(p);
    case Number::kE4m3:
      return e4m3_value(*p);
    case Number::kE5m2:
      return e5m2_value(*p);
    default:
      return e2m1_value(*p & 15);
  }
}

void number_bits(Number number, float value, uint8_t* p) {
  switch (number) {
    case Number::kFloat:
      return write_as(p, value);
    case Number::kHalf:
      return write_as(p, static_cast<half>(value));
    case Number::kBfloat16:
      return write_as(p, bfloat16_t(value));
    default:
      fail("unsupported", "a result of this type is not emulated");
  }
}

void store_global(void* gm, size_t bytes, const uint8_t* in, const uint8_t* defined) {
  Core& core = running();
  if (core.atomic == Atomic::kNone) return store(Space::kGm, gm, bytes, in, defined);
  int64_t offset = 0;
  bool near = false;
  Memory* m = memory_at(gm, offset, near);
  const char* what = core.pipes[core.now].sites.back().what;
  if (!m || !m->global) fail("bounds", "%s: the address of global memory belongs to no tensor", what);
  check_write(*m, offset, bytes, what, true);
  need_no_doubt(defined, bytes);
  int size = number_bytes(core.atomic_number);
  if (bytes % size_t(size)) fail("value", "%s: an atomic store of %zu bytes of %d-byte numbers", what, bytes, size);
  std::vector<uint8_t> old(bytes), shadow(bytes);
  copy_in(*m, offset, bytes, old.data(), shadow.data());
  for (size_t i = 0; i < bytes; i += size_t(size)) {
    for (int k = 0; k < size; ++k) {
      if (shadow[i + size_t(k)] != 0xff) {
        fail("undefined", "%s: an atomic store to %s byte %lld, which nothing has written", what, m->name.c_str(),
             static_cast<long long>(offset + int64_t(i)));
      }
      if (defined) shadow[i + size_t(k)] = defined[i + size_t(k)];
    }
    uint8_t* to = old.data() + i;
    switch (core.atomic_number) {
      case Number::kInt8:
        write_as(to, combine(core.atomic, read_as<int8_t>(to), read_as<int8_t>(in + i)));
        break;
      case Number::kInt16:
        write_as(to, combine(core.atomic, read_as<int16_t>(to), read_as<int16_t>(in + i)));
        break;
      case Number::kInt32:
        write_as(to, combine(core.atomic, read_as<int32_t>(to), read_as<int32_t>(in + i)));
        break;
      default:
        number_bits(
            core.atomic_number,
            combine(core.atomic, number_value(core.atomic_number, to), number_value(core.atomic_number, in + i)), to);
    }
  }
  machine->options->copied_bytes[1] += bytes;
  copy_out(*m, offset, bytes, old.data(), shadow.data());
}

}  // namespace asc_host
