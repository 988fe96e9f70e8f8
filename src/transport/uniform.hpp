#pragma once
// The check that all ranks were created alike.
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Collective. Compares named values across ranks. Throws the same kInvalidArgument on every rank,
/// which lists each name whose values differ with the value of every rank.
void require_uniform(Bootstrap& bootstrap,
                     const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace deep_ep
