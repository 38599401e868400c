#include "cpu/endpoint.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "cpu/process.hpp"

namespace ep_comm {
namespace {

constexpr double kNap = 0.02;          // at most, between looks at peers that may have gone
constexpr double kLookForDead = 0.05;  // between looks at their processes
constexpr double kLongest = 1e9;       // seconds; more overflows the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Spinning pays only where every rank may have a core of its own.
int spins_for(int ranks) { return ranks <= static_cast<int>(std::thread::hardware_concurrency()) ? 400 : 20; }

}  // namespace

std::string name_of(uint64_t flag) {
  static const char* const names[] = {"none", "dispatch", "combine", "barrier", "all_gather", "join"};
  const Kind kind = stamp_kind(flag);
  const auto number = static_cast<size_t>(kind);
  if (number >= std::size(names)) return "collective " + std::to_string(number);
  std::string name = names[number];
  if (kind == Kind::combine) name += stamp_detail(flag) == 0 ? " of slots" : " of ranks";
  if (kind == Kind::all_gather) name += " of " + std::to_string(stamp_detail(flag) + 1) + " values";
  return name;
}

Endpoint::Endpoint(std::shared_ptr<Memory> memory, const Shape& shape, int rank)
    : memory_(std::move(memory)), region_(memory_->base(), shape), rank_(rank), pid_space_(pid_space()) {}

bool Endpoint::claim() {
  Member& me = region_.member(rank_);
  int32_t nobody = 0;
  if (!me.pid.compare_exchange_strong(nobody, ::getpid()))
    throw std::invalid_argument("rank: got " + std::to_string(rank_) + ", which process " + std::to_string(nobody) +
                                " has taken, allowed is one that nobody has at this path");
  me.start_time = start_time(::getpid());
  me.pid_space = pid_space_;
  return region_.header().joined.fetch_add(1) + 1 == static_cast<uint32_t>(shape().ranks);
}

void Endpoint::enter(double timeout) {
  region_.member(rank_).state.store(static_cast<uint32_t>(State::live));
  joined_ = true;
  set_deadline(timeout);
  ring_sleepers();
}

void Endpoint::set_deadline(double timeout) {
  const std::chrono::duration<double> seconds(std::min(timeout, kLongest));
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
  looked_ = Clock::now();
  missing_.resize(shape().ranks);
  std::iota(missing_.begin(), missing_.end(), 0);
}

void Endpoint::begin(Kind kind, uint32_t detail, double timeout) {
  stamp_ = stamp(++epoch_, kind, detail);
  set_deadline(timeout);
}

Verdict Endpoint::wait_joined(double slice) {
  return wait([this](int peer, Verdict&) { return region_.member(peer).state.load() != 0; }, slice);
}

Verdict Endpoint::wait_free(Buffer buffer, double slice) {
  uint64_t& used = used_[static_cast<int>(buffer)];
  Verdict verdict =
      wait([&](int peer, Verdict&) { return peer == rank_ || region_.member(peer).finished.load() >= used; }, slice);
  if (verdict.code == Verdict::ready) {
    used = epoch_;
    missing_.resize(shape().ranks);
    std::iota(missing_.begin(), missing_.end(), 0);
  }
  return verdict;
}

Verdict Endpoint::wait_posted(double slice) {
  return wait(
      [this](int peer, Verdict& verdict) {
        const uint64_t flag = region_.member(peer).posted.load();
        if (stamp_epoch(flag) < epoch_) return false;
        if (stamp_epoch(flag) == epoch_ && flag != stamp_) {
          verdict = {Verdict::mismatch,
                     {peer},
                     "rank " + std::to_string(peer) + " is in " + name_of(flag) + ", rank " + std::to_string(rank_) +
                         " in " + name_of(stamp_) + ", both at epoch " + std::to_string(epoch_)};
        }
        return true;  // a later epoch: it saw all flags of this one
      },
      slice);
}

// Peers leave `missing_` as they come. Whether there is a verdict.
bool Endpoint::scan(const Test& come, Verdict& verdict) {
  verdict.code = Verdict::later;
  const auto rest = std::remove_if(missing_.begin(), missing_.end(),
                                   [&](int peer) { return verdict.code == Verdict::later && come(peer, verdict); });
  missing_.erase(rest, missing_.end());
  if (verdict.code == Verdict::later && missing_.empty()) verdict.code = Verdict::ready;
  return verdict.code != Verdict::later;
}

Verdict Endpoint::wait(const Test& come, double slice) {
  using Seconds = std::chrono::duration<double>;
  Member& me = region_.member(rank_);
  Verdict verdict;
  for (int spin = spins_for(shape().ranks); spin > 0; --spin) {
    if (scan(come, verdict)) return verdict;
    pause();
  }
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(slice));
  while (true) {
    const uint32_t bell = me.bell.load();
    me.awaited.store(1 + missing_.front());
    bool over = scan(come, verdict);  // again, now that those who come would ring
    const auto now = Clock::now();
    if (!over) {
      const bool thorough = Seconds(now - looked_).count() > kLookForDead;
      if (thorough) looked_ = now;
      std::string reason = own_end();
      int who = rank_;
      for (int peer = 0; reason.empty() && peer < shape().ranks; ++peer) {
        const bool missing = std::find(missing_.begin(), missing_.end(), peer) != missing_.end();
        const auto state = static_cast<State>(region_.member(peer).state.load());
        // One that has come may close; its abort ends all waits.
        if (missing || state == State::aborted) reason = gone(peer, thorough && missing);
        who = peer;
      }
      // Whoever ended because of what a peer did has seen that peer's flag, so now it is seen here too.
      over = !reason.empty() && scan(come, verdict);
      if (!reason.empty() && !over) {
        verdict = {Verdict::broken, {who}, reason};
        over = true;
      }
    }
    if (!over && now >= deadline_) {
      verdict = {Verdict::timeout, missing_, ""};
      over = true;
    }
    if (over || now >= until) {
      me.awaited.store(0);
      return verdict;
    }
    const double left = Seconds(std::min(until, deadline_) - now).count();
    futex_wait(me.bell, bell, std::clamp(left, 0.0, kNap));
  }
}

void Endpoint::post() {
  region_.member(rank_).posted.store(stamp_);
  ring_sleepers();
}

void Endpoint::finish() {
  region_.member(rank_).finished.store(epoch_);
  ring_sleepers();
}

void Endpoint::ring(int peer) const {
  region_.member(peer).bell.fetch_add(1);
  futex_wake(region_.member(peer).bell);
}

void Endpoint::ring_sleepers() const {
  for (int peer = 0; peer < shape().ranks; ++peer)
    if (region_.member(peer).awaited.load() == static_cast<uint32_t>(rank_) + 1) ring(peer);
}

void Endpoint::leave(State state, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(leaving_);
  Member& me = region_.member(rank_);
  if (!joined_ || me.state.load() != static_cast<uint32_t>(State::live)) return;
  const size_t size = std::min(reason.size(), static_cast<size_t>(kReason - 1));
  std::memcpy(me.reason, reason.data(), size);
  me.reason[size] = 0;
  me.state.store(static_cast<uint32_t>(state));
  for (int peer = 0; peer < shape().ranks; ++peer) ring(peer);
}

void Endpoint::abort(const std::string& reason) { leave(State::aborted, reason); }
void Endpoint::close() { leave(State::closed, ""); }

std::string Endpoint::own_end() const { return gone(rank_, false); }

std::string Endpoint::gone(int peer, bool thorough) const {
  const Member& member = region_.member(peer);
  const std::string name = "rank " + std::to_string(peer);
  switch (static_cast<State>(member.state.load())) {
    case State::closed:
      return name + " closed the communicator";
    case State::aborted: {
      char reason[kReason];
      std::memcpy(reason, member.reason, sizeof reason);
      reason[kReason - 1] = 0;
      return name + " aborted: " + reason;
    }
    case State::absent:
      return "";
    case State::live:
      break;
  }
  const int pid = member.pid.load();
  const bool known = member.start_time != 0 && member.pid_space == pid_space_ && pid != ::getpid();
  if (thorough && known && !alive(pid, member.start_time))
    return name + " is gone: its process " + std::to_string(pid) + " has ended";
  return "";
}

}  // namespace ep_comm
