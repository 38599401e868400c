// One rank's end of a region: coming and going, epochs, and waits that say who is missing.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/memory.hpp"
#include "cpu/region.hpp"

namespace ep_comm {

// How a wait went on. `ranks` are those that are missing, in another collective, or gone.
struct Verdict {
  enum Code { ready = 0, later = 1, timeout = 2, mismatch = 3, broken = 4 };
  Code code = ready;
  std::vector<int> ranks;
  std::string text;
};

// What peers may still be reading of an earlier collective.
enum class Buffer : int { records = 0, results = 1, gathered = 2 };

class Endpoint {
 public:
  Endpoint(std::shared_ptr<Memory> memory, const Shape& shape, int rank);
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Takes the rank's place; whether it was the last one missing. Throws std::invalid_argument if it is taken.
  bool claim();
  // Lets peers see it there.
  void enter(double timeout);
  Verdict wait_joined(double slice);

  // One collective: begin, wait_free, write, post, wait_posted, read, finish. Waits return `later` after `slice`
  // seconds, so that the caller can look at signals.
  void begin(Kind kind, uint32_t detail, double timeout);
  Verdict wait_free(Buffer buffer, double slice);
  void post();
  Verdict wait_posted(double slice);
  void finish();

  void abort(const std::string& reason);  // from any thread
  void close();                           // likewise
  std::string own_end() const;            // why this rank has ended, empty while it lives
  // Why a peer will not come any more, empty if it may; `thorough` looks for its process too.
  std::string gone(int peer, bool thorough) const;

  const Region& region() const { return region_; }
  const Shape& shape() const { return region_.shape(); }
  int rank() const { return rank_; }
  uint64_t epoch() const { return epoch_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Test = std::function<bool(int peer, Verdict& verdict)>;  // whether it has come; may set another verdict

  Verdict wait(const Test& come, double slice);
  bool scan(const Test& come, Verdict& verdict);
  void set_deadline(double timeout);
  void ring(int peer) const;
  void ring_sleepers() const;
  void leave(State state, const std::string& reason);

  std::shared_ptr<Memory> memory_;
  Region region_;
  int rank_;
  uint64_t pid_space_;
  bool joined_ = false;
  uint64_t epoch_ = 0;
  uint64_t stamp_ = 0;
  uint64_t used_[3] = {0, 0, 0};  // epoch in which each buffer was written last
  std::vector<int> missing_;
  Clock::time_point deadline_{};
  Clock::time_point looked_{};  // for processes
  std::mutex leaving_;
};

std::string name_of(uint64_t flag);

}  // namespace ep_comm
