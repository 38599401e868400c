// One instruction of an engine.
#pragma once

#include "state.hpp"

namespace asc_host {

/// Begins the instruction; behind it scalar code goes on.
class Instruction {
 public:
  Instruction(pipe_t pipe, const char* what, int line) : core_(running()) { begin(pipe, what, line); }
  ~Instruction() { core_.now = PIPE_S; }
  Instruction(const Instruction&) = delete;
  Instruction& operator=(const Instruction&) = delete;

 private:
  Core& core_;
};

void need_range(const char* what, const char* name, int64_t value, int64_t low, int64_t high);

/// `n` numbers as floats, or floats as numbers.
float number_value(Number number, const uint8_t* p);
void number_bits(Number number, float value, uint8_t* p);
int number_bytes(Number number);

/// Stores to global memory, combined with what is there where an atomic mode is set.
void store_global(void* gm, size_t bytes, const uint8_t* in, const uint8_t* defined);

inline const void* at(uintptr_t offset) { return reinterpret_cast<const void*>(offset); }

}  // namespace asc_host
