#include "jit/ptxas_log.hpp"

#include <regex>

namespace deep_ep::jit {

std::vector<FunctionUse> parse_ptxas_log(std::string_view log) {
  // "ptxas info    : Function properties for NAME", and on the next line, which some versions begin
  // with "ptxas         .",
  // "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads"
  static const std::regex pattern(
      R"(Function properties for (\S+)\s[^\n]*?)"
      R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  std::vector<FunctionUse> functions;
  const std::string text(log);
  for (std::sregex_iterator found(text.begin(), text.end(), pattern), end; found != end; ++found) {
    functions.push_back({.name = (*found)[1],
                         .stack_bytes = std::stoll((*found)[2]),
                         .spill_store_bytes = std::stoll((*found)[3]),
                         .spill_load_bytes = std::stoll((*found)[4])});
  }
  return functions;
}

}  // namespace deep_ep::jit
