#include "cpu/mover.hpp"

#include <algorithm>
#include <cstring>

namespace ep_comm {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr double kLookForDead = 0.05;
constexpr auto kShortest = std::chrono::microseconds(20);  // naps between looks at a ring where nothing moves
constexpr auto kLongest = std::chrono::microseconds(2000);
constexpr char kStopped[] = "this rank closed the communicator";

}  // namespace

uint64_t Mover::start(int64_t tag, int source, int target, uint8_t* data, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t number = ++numbers_;
  if (source == target || stop_) {
    ended_[number] = stop_ ? Verdict{Verdict::broken, {me_}, kStopped} : Verdict{};
    return number;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  under_way_.push_back({number, tag, source, target, data, bytes});
  changed_.notify_all();
  return number;
}

Verdict Mover::state(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ended_.find(number);
  return found == ended_.end() ? Verdict{Verdict::later, {}, ""} : found->second;
}

void Mover::wait(uint64_t number, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, Seconds(seconds), [&] { return stop_ || ended_.count(number) != 0; });
}

void Mover::forget(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_.erase(number);
  const auto found = std::find_if(under_way_.begin(), under_way_.end(),
                                  [number](const Transfer& transfer) { return transfer.number == number; });
  if (found == under_way_.end()) return;
  if (found->slot >= 0 && found->target == me_) {
    want_of(*found).store(want_state(found->nonce, Wanted::free));
  } else if (found->slot >= 0) {
    uint64_t wanted = want_state(found->nonce, Wanted::wanted);
    want_of(*found).compare_exchange_strong(wanted, want_state(found->nonce, Wanted::dropped));
    serving_.erase(found->target);
  }
  under_way_.erase(found);
}

void Mover::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Transfer& transfer : under_way_) end(transfer, {Verdict::broken, {me_}, kStopped});
  under_way_.clear();
}

void Mover::run() {
  auto nap = kShortest;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (under_way_.empty()) {
      changed_.wait(lock);
      nap = kShortest;
      continue;
    }
    pass();
    nap = moved_ ? kShortest : std::min(nap * 2, kLongest);
    if (moved_) {
      lock.unlock();  // others take it between two passes
      std::this_thread::yield();
      lock.lock();
    } else {
      changed_.wait_for(lock, nap);
    }
  }
}

// One round over everything under way.
void Mover::pass() {
  const bool thorough = Seconds(Clock::now() - looked_).count() > kLookForDead;
  if (thorough) looked_ = Clock::now();
  moved_ = false;
  for (const Transfer& transfer : under_way_)
    if (transfer.target == me_) drain(transfer.source);
  for (auto it = under_way_.begin(); it != under_way_.end();) {
    const bool over = it->source == me_ ? serve(*it) : ask(*it);
    if (over || (!moved_ && fail_if_gone(*it, thorough))) {
      it = under_way_.erase(it);
      moved_ = true;
      changed_.notify_all();
    } else {
      ++it;
    }
  }
}

// The target's side. Whether the transfer has ended.
bool Mover::ask(Transfer& transfer) {
  if (transfer.slot < 0) {
    Pair& pair = region_.pair(transfer.source, me_);
    for (int slot = 0; slot < kWants && transfer.slot < 0; ++slot)
      if ((pair.wants[slot].state.load() & kWantedMask) == 0) transfer.slot = slot;
    if (transfer.slot < 0) return false;  // others come first
    transfer.nonce = ++nonces_;
    transfer.moved = 0;
    pair.wants[transfer.slot].tag.store(transfer.tag, std::memory_order_relaxed);
    pair.wants[transfer.slot].bytes.store(transfer.bytes, std::memory_order_relaxed);
    want_of(transfer).store(want_state(transfer.nonce, Wanted::wanted));
    return false;
  }
  const uint64_t seen = want_of(transfer).load();
  if (seen == want_state(transfer.nonce, Wanted::wanted)) return false;
  if (seen == want_state(transfer.nonce, Wanted::served)) {
    if (transfer.moved < transfer.bytes) return false;  // the rest is in the ring
    end(transfer, Verdict{});
  } else if (seen == want_state(transfer.nonce, Wanted::refused)) {
    const std::string source = std::to_string(transfer.source);
    end(transfer, {Verdict::mismatch,
                   {transfer.source},
                   "transfer " + std::to_string(transfer.tag) + ": rank " + std::to_string(me_) + " expects " +
                       std::to_string(transfer.bytes) + " bytes, rank " + source + " has another number"});
  }
  want_of(transfer).store(want_state(transfer.nonce, Wanted::free));
  if (seen != want_state(transfer.nonce, Wanted::dropped)) return true;
  transfer.slot = -1;  // the source gave up; it may come again
  return false;
}

// Whether the target asks for this transfer, or asks for another size: then `slot` stays -1 and it has ended.
bool Mover::find_want(Transfer& transfer) {
  Pair& pair = region_.pair(me_, transfer.target);
  for (int slot = 0; slot < kWants; ++slot) {
    Want& want = pair.wants[slot];
    uint64_t seen = want.state.load();
    if ((seen & kWantedMask) != static_cast<uint64_t>(Wanted::wanted)) continue;
    const int64_t tag = want.tag.load(std::memory_order_relaxed), bytes = want.bytes.load(std::memory_order_relaxed);
    if (want.state.load() != seen || tag != transfer.tag) continue;
    if (bytes == transfer.bytes) {
      transfer.slot = slot;
      transfer.nonce = seen >> kWantedBits;
      transfer.moved = 0;
      serving_[transfer.target] = transfer.number;
    } else {
      want.state.compare_exchange_strong(seen, want_state(seen >> kWantedBits, Wanted::refused));
      end(transfer, {Verdict::mismatch,
                     {transfer.target},
                     "transfer " + std::to_string(tag) + ": rank " + std::to_string(transfer.target) + " expects " +
                         std::to_string(bytes) + " bytes, rank " + std::to_string(me_) + " has " +
                         std::to_string(transfer.bytes)});
    }
    return true;
  }
  return false;
}

// The source's side. Whether the transfer has ended: then all its bytes are in the ring.
bool Mover::serve(Transfer& transfer) {
  const int target = transfer.target;
  if (transfer.slot < 0) {
    if (serving_.count(target) != 0) return false;  // a ring holds one transfer after the other
    if (!find_want(transfer)) return false;
    if (transfer.slot < 0) return true;
  }
  Pair& pair = region_.pair(me_, target);
  uint64_t wanted = want_state(transfer.nonce, Wanted::wanted);
  // At most one ring's worth, so that others have their turn.
  for (int i = 0; i < kPieces && transfer.moved < transfer.bytes && want_of(transfer).load() == wanted; ++i) {
    const uint64_t number = pair.written.load(std::memory_order_relaxed);
    if (number - pair.read.load() >= kPieces) return false;
    const int64_t bytes = std::min(region_.at().piece_bytes, transfer.bytes - transfer.moved);
    std::memcpy(region_.piece(me_, target, number), transfer.data + transfer.moved, bytes);
    pair.pieces[number % kPieces] = {transfer.nonce, transfer.moved, bytes};
    pair.written.store(number + 1);
    transfer.moved += bytes;
    moved_ = true;
  }
  if (transfer.moved < transfer.bytes && want_of(transfer).load() == wanted) return false;
  serving_.erase(target);
  if (transfer.moved == transfer.bytes &&
      want_of(transfer).compare_exchange_strong(wanted, want_state(transfer.nonce, Wanted::served))) {
    end(transfer, Verdict{});
    return true;
  }
  transfer.slot = -1;  // the target gave up; it may ask again
  return false;
}

// Pieces that a source has put into the ring go to their transfers; those of given-up ones go nowhere.
void Mover::drain(int source) {
  Pair& pair = region_.pair(source, me_);
  for (uint64_t number = pair.read.load(std::memory_order_relaxed); number < pair.written.load(); ++number) {
    const Piece piece = pair.pieces[number % kPieces];
    for (Transfer& transfer : under_way_) {
      if (transfer.target != me_ || transfer.source != source || transfer.slot < 0 || transfer.nonce != piece.nonce)
        continue;
      if (piece.offset != transfer.moved || piece.bytes < 0 || piece.bytes > transfer.bytes - transfer.moved) break;
      std::memcpy(transfer.data + piece.offset, region_.piece(source, me_, number), piece.bytes);
      transfer.moved += piece.bytes;
      break;
    }
    pair.read.store(number + 1);
    moved_ = true;
  }
}

bool Mover::fail_if_gone(const Transfer& transfer, bool thorough) {
  const int peer = peer_of(transfer);
  std::string reason = end_.own_end();
  if (reason.empty()) reason = end_.gone(peer, thorough);
  if (reason.empty()) return false;
  if (transfer.target == me_) {
    drain(peer);  // what it had put into the ring before it went is still good
    if (moved_) return false;
    const bool served = transfer.slot >= 0 && want_of(transfer).load() == want_state(transfer.nonce, Wanted::served);
    if (served && transfer.moved == transfer.bytes) return false;  // the next pass ends it
  } else {
    const auto serving = serving_.find(transfer.target);
    if (serving != serving_.end() && serving->second == transfer.number) serving_.erase(serving);
  }
  end(transfer, {Verdict::broken, {peer}, "transfer " + std::to_string(transfer.tag) + ": " + reason});
  return true;
}

}  // namespace ep_comm
