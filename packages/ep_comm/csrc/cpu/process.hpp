// Whether another process still lives, and sleeping until a peer rings.
#pragma once

#include <linux/futex.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace ep_comm {

// When a process began, in ticks since the host did; 0 if there is none or it is a zombie. Needs /proc.
inline uint64_t start_time(int pid) {
  char name[48];
  std::snprintf(name, sizeof name, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(name, "r");
  if (file == nullptr) return 0;
  char text[1024];
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = 0;
  const char* after = std::strrchr(text, ')');  // the name before it may hold anything
  if (after == nullptr) return 0;
  char state = 0;
  unsigned long long begun = 0;
  // Fields 3 (state) and 22 (starttime) of proc(5).
  if (std::sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                  &begun) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : begun;
}

// Which space of process numbers this process is in; 0 if unknown.
inline uint64_t pid_space() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

inline bool alive(int pid, uint64_t begun) {
  if (::kill(pid, 0) != 0 && errno == ESRCH) return false;
  return start_time(pid) == begun;
}

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec limit{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace ep_comm
