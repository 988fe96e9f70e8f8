#include "transport/uniform.hpp"

#include <algorithm>
#include <sstream>

#include "base/check.hpp"

namespace deep_ep {

void require_uniform(Bootstrap& bootstrap,
                     const std::vector<std::pair<std::string, std::string>>& values) {
  std::string own;
  for (const auto& [name, value] : values) own += value + '\n';
  std::vector<std::vector<std::string>> of_rank;
  for (const Bytes& message : bootstrap.all_gather(std::as_bytes(std::span(own)))) {
    std::istringstream lines(
        std::string(reinterpret_cast<const char*>(message.data()), message.size()));
    std::vector<std::string>& rank_values = of_rank.emplace_back(values.size());
    for (std::string& value : rank_values) std::getline(lines, value);
  }
  std::string differences;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::ranges::all_of(of_rank, [&](const auto& v) { return v[i] == of_rank[0][i]; }))
      continue;
    differences += concat(differences.empty() ? "" : "; ", values[i].first, " is");
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      differences += concat(rank == 0 ? " " : ", ", of_rank[rank][i], " on rank ", rank);
    }
  }
  require(differences.empty(), "all ranks must create the buffer alike, but ", differences);
}

}  // namespace deep_ep
