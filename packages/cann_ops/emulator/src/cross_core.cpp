// Flags between cores: of one block, and barriers of all cores of a kind.
#include "asc_host/sync.hpp"

#include "state.hpp"

namespace asc_host {

namespace {

constexpr size_t kMostPending = 15;  // a flag counts in four bits

const char* scope_name(Scope scope) {
  static const char* const kNames[] = {"inter", "block", "subblock", "intra"};
  return kNames[int(scope)];
}

Clock release(Core& core, pipe_t pipe, int line) {
  Clock clock = core.pipes[pipe].clock;
  Clock scalar = core.pipes[PIPE_S].clock;
  if (pipe != PIPE_S) scalar[actor_of(core, PIPE_S)] = 0;
  join(clock, scalar);
  clock[actor_of(core, pipe)] = core.pipes[pipe].issued;
  if (pipe == PIPE_S) {
    core.pipes[PIPE_S].issued++;
    core.pipes[PIPE_S].sites.push_back({"scalar code", line});
    core.pipes[PIPE_S].clock[actor_of(core, PIPE_S)] = core.pipes[PIPE_S].issued;
  }
  return clock;
}

void push(int scope, int target, int id, Clock clock, int line) {
  CrossFlag& flag = machine->cross[{scope, target, id}];
  flag.arrivals.push_back(std::move(clock));
  machine->progress++;
  if (flag.arrivals.size() > kMostPending) {
    fail("flag", "a flag between cores (%d), line %d, is set more than %zu times without a wait", id, line,
         kMostPending);
  }
}

/// Barriers: arrival i holds the clocks of arrivals 0 to i.
void push_barrier(int scope, int target, int id, Clock clock) {
  CrossFlag& flag = machine->cross[{scope, target, id}];
  if (!flag.arrivals.empty()) join(clock, flag.arrivals.back());
  flag.arrivals.push_back(std::move(clock));
  machine->progress++;
}

int barrier_size(const Core& core, Scope scope) {
  if (scope == Scope::kSubblock) return 2;
  int n = 0;
  for (const Core& other : machine->cores) n += other.kind == core.kind;
  return n;
}

int barrier_target(const Core& core, Scope scope) { return scope == Scope::kSubblock ? core.block : int(core.kind); }

Core& core_of_block(const Core& core, int kind_index) { return machine->cores[size_t(core.block * 3 + kind_index)]; }

void need_mixed(Scope scope) {
  if (machine->kernel->blocks != 3 && scope != Scope::kInter) {
    fail("value", "asc_sync_%s needs a mixed kernel: this one has one core a block", scope_name(scope));
  }
}

void need_id(Scope scope, const Core& core, int id, int line) {
  int most = scope == Scope::kIntra && core.kind == CoreKind::kCube ? 31 : 15;
  if (id < 0 || id > most) {
    fail("value", "asc_sync_%s: got flag %d (line %d), allowed are 0 to %d", scope_name(scope), id, line, most);
  }
}

void block_until(const std::string& why, const std::function<bool()>& ready) {
  while (!ready()) block_core(why);
}

}  // namespace

void arrive(Scope scope, pipe_t pipe, int id, int line) {
  Core& core = running();
  need_mixed(scope);
  need_id(scope, core, id, line);
  Clock clock = release(core, pipe, line);
  bool cube = core.kind == CoreKind::kCube;
  switch (scope) {
    case Scope::kIntra: {
      int target = cube ? core_of_block(core, 1 + id / 16).index : core_of_block(core, 0).index;
      push(int(scope), target, cube ? id % 16 : id + 16 * core.sub, std::move(clock), line);
      break;
    }
    case Scope::kBlock:
      if (cube) {
        for (int sub = 0; sub < 2; ++sub) push(int(scope), core_of_block(core, 1 + sub).index, id, clock, line);
      } else {
        push(int(scope), core_of_block(core, 0).index, id + 16 * core.sub, std::move(clock), line);
      }
      break;
    default:
      push_barrier(int(scope), barrier_target(core, scope), id, std::move(clock));
  }
}

void await(Scope scope, pipe_t pipe, int id, int line) {
  Core& core = running();
  need_mixed(scope);
  need_id(scope, core, id, line);
  std::string why = std::string("asc_sync_") + scope_name(scope) + "_wait(" + pipe_name(pipe) + ", " +
                    std::to_string(id) + "), line " + std::to_string(line);
  auto take = [&](int flag_id) {
    CrossFlag& flag = machine->cross[{int(scope), core.index, flag_id}];
    block_until(why, [&] { return !flag.arrivals.empty(); });
    join(core.pipes[pipe].clock, flag.arrivals.front());
    flag.arrivals.pop_front();
    machine->progress++;
  };
  if (scope == Scope::kIntra) {
    take(id);
  } else if (scope == Scope::kBlock) {
    take(id);
    if (core.kind == CoreKind::kCube) take(id + 16);
  } else {
    CrossFlag& flag = machine->cross[{int(scope), barrier_target(core, scope), id}];
    uint64_t wanted = ++core.barriers[{int(scope), id}] * uint64_t(barrier_size(core, scope));
    block_until(why, [&] { return flag.arrivals.size() >= wanted; });
    join(core.pipes[pipe].clock, flag.arrivals[wanted - 1]);
  }
}

void check_cross_flags() {
  for (const auto& [key, flag] : machine->cross) {
    auto [scope, target, id] = key;
    bool counted = scope == int(Scope::kIntra) || scope == int(Scope::kBlock);
    if (counted && !flag.arrivals.empty()) {
      fail("flag", "at the end %zu settings of flag %d between cores of block %d were not waited for",
           flag.arrivals.size(), id, machine->cores[size_t(target)].block);
    }
  }
}

}  // namespace asc_host
