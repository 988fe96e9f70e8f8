#include "jit/kernel_sources.hpp"

namespace deep_ep::jit {

std::vector<std::string> kernel_names() {
  constexpr std::string_view kFolder = "deep_ep/";
  constexpr std::string_view kSuffix = ".cuh";
  std::vector<std::string> names;
  for (const EmbeddedFile& file : kernel_headers()) {
    const std::string_view name = file.name;
    const bool is_in_folder = name.find('/', kFolder.size()) == std::string_view::npos;
    if (is_in_folder && name.ends_with(kSuffix)) names.emplace_back(name);
  }
  return names;
}

}  // namespace deep_ep::jit
