// Pipes, their instructions, flags, locks and barriers within a core.
#include "state.hpp"

#include <algorithm>

namespace asc_host {

namespace {

/// S, V and M finish one instruction before the next; the engines do not.
bool in_order(int pipe) { return pipe == PIPE_S || pipe == PIPE_V || pipe == PIPE_M; }

void need_pipe(pipe_t pipe, const char* what) {
  if (pipe < 0 || pipe >= kPipes) fail("value", "%s: got pipe %d, allowed are 0 to %d", what, int(pipe), kPipes - 1);
}

/// The scalar unit issues in order: a pipe starts an instruction after whatever S waited for, but the accesses of S
/// itself are not complete by that.
Actor& issue(Core& core, int pipe) {
  Actor& actor = core.pipes[pipe];
  const Actor& scalar = core.pipes[PIPE_S];
  if (pipe != PIPE_S) {
    uint32_t s = actor_of(core, PIPE_S), own = actor.clock[s];
    join(actor.clock, scalar.clock);
    actor.clock[s] = own;
  }
  return actor;
}

/// What is complete when everything so far of the pipe is.
Clock completed(Core& core, int pipe) {
  Clock clock = issue(core, pipe).clock;
  clock[actor_of(core, pipe)] = core.pipes[pipe].issued;
  return clock;
}

/// Later accesses of S must not look complete: they get a new number.
void next_scalar(Core& core, const char* what, int line) {
  Actor& s = core.pipes[PIPE_S];
  s.issued++;
  s.sites.push_back({what, line});
  s.clock[actor_of(core, PIPE_S)] = s.issued;
}

void note(Core& core, pipe_t pipe, const char* what, int line) {
  core.now = pipe;
  core.pipes[pipe].issued++;
  core.pipes[pipe].sites.push_back({what, line});
  if (in_order(pipe)) core.pipes[pipe].clock[actor_of(core, pipe)] = core.pipes[pipe].issued;
}

}  // namespace

const char* pipe_name(int pipe) {
  static const char* const kNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};
  return kNames[pipe];
}

void join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

uint32_t actor_of(const Core& core, int pipe) { return uint32_t(core.index * kPipes + pipe); }

std::string describe(uint32_t actor) {
  const Core& core = machine->cores[actor / kPipes];
  std::string text = std::string("pipe ") + pipe_name(int(actor % kPipes));
  if (&core != machine->core) {
    text += " of block " + std::to_string(core.block);
    if (machine->kernel->blocks == 3) {
      text += core.kind == CoreKind::kCube ? ", cube core" : ", vector core " + std::to_string(core.sub);
    }
  }
  return text;
}

Site site_of(Epoch e) {
  const Actor& actor = machine->cores[epoch_actor(e) / kPipes].pipes[epoch_actor(e) % kPipes];
  uint32_t n = epoch_number(e);
  return n >= 1 && n <= actor.sites.size() ? actor.sites[n - 1] : Site{"an instruction", 0};
}

CoreKind core_kind() { return running().kind; }
int sub_block() { return running().sub; }
uint8_t* ub_base() { return running().ub; }

void begin(pipe_t pipe, const char* what, int line) {
  count_step();
  Core& core = running();
  bool cube_pipe = pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX;
  bool vector_pipe = pipe == PIPE_V || pipe == PIPE_MTE3;
  if ((core.kind == CoreKind::kVector && cube_pipe) || (core.kind == CoreKind::kCube && vector_pipe)) {
    fail("value", "%s runs on pipe %s, which this kind of core does not have", what, pipe_name(pipe));
  }
  core.in_simd = false;
  issue(core, pipe);
  note(core, pipe, what, line);
  machine->options->copied_bytes[3]++;
}

void begin_simd(const char* name, int line) {
  begin(PIPE_V, name, line);
  running().in_simd = true;
  running().doubtful = false;
  running().phase = machine->next_phase++;
}

void end_simd() {
  running().in_simd = false;
  running().now = PIPE_S;
}

void vector_begin(const char* what) {
  Core& core = running();
  if (core.in_simd) {
    core.pipes[PIPE_V].sites.back().what = what;
  } else {
    begin(PIPE_V, what, 0);
  }
}

void memory_barrier(bool store_to_load) {
  if (store_to_load) running().phase = machine->next_phase++;
}

void notify(pipe_t from, pipe_t to, int id, int line) {
  Core& core = running();
  need_pipe(from, "asc_sync_notify");
  need_pipe(to, "asc_sync_notify");
  core.now = from;
  if (id < 0 || id > 7) fail("value", "asc_sync_notify: got event %d (line %d), allowed are 0 to 7", id, line);
  Flag& flag = core.flags[{from, to, id}];
  if (flag.set) {
    fail("flag", "asc_sync_notify(%s, %s, %d), line %d: the flag is set already", pipe_name(from), pipe_name(to), id,
         line);
  }
  flag.set = true;
  flag.clock = completed(core, from);
  if (from == PIPE_S) next_scalar(core, "scalar code", line);
  core.now = PIPE_S;
}

void wait(pipe_t from, pipe_t to, int id, int line) {
  Core& core = running();
  need_pipe(from, "asc_sync_wait");
  need_pipe(to, "asc_sync_wait");
  core.now = to;
  if (id < 0 || id > 7) fail("value", "asc_sync_wait: got event %d (line %d), allowed are 0 to 7", id, line);
  Flag& flag = core.flags[{from, to, id}];
  if (!flag.set) {
    fail("flag", "asc_sync_wait(%s, %s, %d), line %d: nothing notified it, the device would hang", pipe_name(from),
         pipe_name(to), id, line);
  }
  flag.set = false;
  join(issue(core, to).clock, flag.clock);
  core.now = PIPE_S;
}

void lock(pipe_t pipe, int id, int line) {
  Core& core = running();
  need_pipe(pipe, "asc_lock");
  core.now = pipe;
  if (id < 0 || id > 31) fail("value", "asc_lock: got buffer %d (line %d), allowed are 0 to 31", id, line);
  Lock& held = core.locks[id];
  if (held.holder >= 0) {
    fail("flag", "asc_lock(%s, %d), line %d: pipe %s holds it, the device would hang", pipe_name(pipe), id, line,
         pipe_name(held.holder));
  }
  held.holder = pipe;
  Actor& actor = issue(core, pipe);
  if (!held.clock.empty()) join(actor.clock, held.clock);
  core.now = PIPE_S;
}

void unlock(pipe_t pipe, int id, int line) {
  Core& core = running();
  need_pipe(pipe, "asc_unlock");
  core.now = pipe;
  Lock& held = core.locks[id];
  if (held.holder != pipe) {
    fail("flag", "asc_unlock(%s, %d), line %d: this pipe does not hold it", pipe_name(pipe), id, line);
  }
  held.holder = -1;
  held.clock = completed(core, pipe);
  if (pipe == PIPE_S) next_scalar(core, "scalar code", line);
  core.now = PIPE_S;
}

void pipe_barrier(pipe_t pipe, int line) {
  Core& core = running();
  if (pipe == PIPE_ALL) {
    Clock all(core.pipes[0].clock.size(), 0);
    for (int p = 0; p < kPipes; ++p) join(all, completed(core, p));
    for (Actor& actor : core.pipes) actor.clock = all;
    next_scalar(core, "scalar code", line);
    return;
  }
  need_pipe(pipe, "asc_sync_pipe");
  Clock clock = completed(core, pipe);
  core.pipes[pipe].clock = clock;
  if (machine->options->barrier_blocks_scalar) join(core.pipes[PIPE_S].clock, clock);
}

}  // namespace asc_host
