#include "jit/ptxas_log.hpp"

#include <charconv>

namespace deep_ep::jit {
namespace {

/// Moves `text` behind `mark`; false if there is none.
bool skip_behind(std::string_view& text, std::string_view mark) {
  const std::size_t found = text.find(mark);
  if (found == std::string_view::npos) return false;
  text.remove_prefix(found + mark.size());
  return true;
}

/// The number that ends where " bytes `what`" begins; 0 if there is none.
std::int64_t bytes_of(std::string_view line, std::string_view what) {
  const std::size_t end = line.find(what);
  if (end == std::string_view::npos) return 0;
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  std::int64_t value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

}  // namespace

std::vector<FunctionUse> parse_ptxas_log(std::string_view log) {
  // "ptxas info    : Function properties for NAME", and on the next line, which some versions begin
  // with "ptxas         .",
  // "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads"
  std::vector<FunctionUse> functions;
  while (skip_behind(log, "Function properties for ")) {
    const std::string_view name = log.substr(0, log.find_first_of(" \n"));
    if (!skip_behind(log, "\n")) break;
    const std::string_view line = log.substr(0, log.find('\n'));
    if (line.find(" bytes stack frame") == std::string_view::npos) continue;
    functions.push_back({.name = std::string(name),
                         .stack_bytes = bytes_of(line, " bytes stack frame"),
                         .spill_store_bytes = bytes_of(line, " bytes spill stores"),
                         .spill_load_bytes = bytes_of(line, " bytes spill loads")});
  }
  return functions;
}

}  // namespace deep_ep::jit
