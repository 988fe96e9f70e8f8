#pragma once
// Text that names ranks, the same in every message.
#include <string>
#include <vector>

#include "base/check.hpp"

namespace deep_ep {

/// "rank 3", "ranks 1, 3 and 4".
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += concat(ranks[i]);
  }
  return text;
}

}  // namespace deep_ep
