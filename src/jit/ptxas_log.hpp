#pragma once
// What ptxas -v says about the memory of each function: the one place that reads its log.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::jit {

/// Local memory of one function, which is memory of the device where registers were meant.
struct FunctionUse {
  std::string name;
  std::int64_t stack_bytes = 0;
  std::int64_t spill_store_bytes = 0;
  std::int64_t spill_load_bytes = 0;

  bool has_spills() const noexcept { return spill_store_bytes > 0 || spill_load_bytes > 0; }
  bool has_local_memory() const noexcept { return stack_bytes > 0 || has_spills(); }
};

/// One for each function that the log reports.
std::vector<FunctionUse> parse_ptxas_log(std::string_view log);

}  // namespace deep_ep::jit
