// Errors end the run. On a fiber the main context goes on and all fibers are dropped where they stand; before the first
// and after the last core an exception does it.
#include <cstdarg>
#include <cstdio>

#include "state.hpp"

namespace asc_host {

Machine* machine = nullptr;

void fail(const char* kind, const char* format, ...) {
  char text[1536];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  machine->error = std::string(kind) + ": " + text;
  if (machine->core && running().doubtful && std::string(kind) == "undefined") {
    machine->error = "race: " + std::string(text) + ", perhaps by this: " + machine->doubt;
  }
  if (!machine->core) throw Stopped();
  Core& core = running();
  std::string where = " [block " + std::to_string(core.block);
  if (machine->kernel->blocks == 3) {
    where += core.kind == CoreKind::kCube ? ", cube core" : ", vector core " + std::to_string(core.sub);
  }
  const Actor& actor = core.pipes[core.now];
  if (!actor.sites.empty() && actor.sites.back().line > 0) where += ", line " + std::to_string(actor.sites.back().line);
  machine->error += where + "]";
  setcontext(&machine->main);
  __builtin_unreachable();
}

}  // namespace asc_host
