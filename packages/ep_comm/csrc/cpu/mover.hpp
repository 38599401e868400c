// Transfers of bytes between two ranks beside collectives: the target asks, the source serves through a ring.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "cpu/endpoint.hpp"

namespace ep_comm {

// A rank's transfers. One thread serves them, made at the first; so a peer's progress needs no call of this rank.
class Mover {
 public:
  explicit Mover(const Endpoint& end) : end_(end), region_(end.region()), me_(end.rank()) {}
  ~Mover() { stop(); }
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // `bytes` at `data` are read or written until the transfer has ended; the number of the transfer.
  uint64_t start(int64_t tag, int source, int target, uint8_t* data, int64_t bytes);
  // `later` while it is under way; `mismatch` and `broken` say why it failed. Ended ones are remembered until `forget`.
  Verdict state(uint64_t number);
  // Until the transfer has ended, `seconds` at most.
  void wait(uint64_t number, double seconds);
  // Ends it, if it is under way, and no longer knows it.
  void forget(uint64_t number);
  void stop();  // ends all

 private:
  struct Transfer {
    uint64_t number;
    int64_t tag;
    int source, target;
    uint8_t* data;
    int64_t bytes;
    int64_t moved = 0;
    int slot = -1;       // of its want, -1 without one
    uint64_t nonce = 0;  // of its want
  };
  using Clock = std::chrono::steady_clock;

  void run();
  void pass();
  bool ask(Transfer& transfer);
  bool serve(Transfer& transfer);
  bool find_want(Transfer& transfer);
  void drain(int source);
  bool fail_if_gone(const Transfer& transfer, bool thorough);
  void end(const Transfer& transfer, Verdict verdict) { ended_[transfer.number] = std::move(verdict); }
  std::atomic<uint64_t>& want_of(const Transfer& transfer) const {
    return region_.pair(transfer.source, transfer.target).wants[transfer.slot].state;
  }
  int peer_of(const Transfer& transfer) const { return transfer.source == me_ ? transfer.target : transfer.source; }

  const Endpoint& end_;
  const Region& region_;
  int me_;
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::list<Transfer> under_way_;
  std::unordered_map<uint64_t, Verdict> ended_;
  std::unordered_map<int, uint64_t> serving_;  // target: number of the transfer that fills its ring
  uint64_t numbers_ = 0, nonces_ = 0;
  Clock::time_point looked_{};
  bool moved_ = false;  // in this pass
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ep_comm
