#pragma once
// What a program may tell the compiler of kernels; all else is in environment variables.
#include <string>
#include <vector>

namespace deep_ep {

/// Folders in which to look for NVRTC after all other places: where wheels put it. Counts until
/// NVRTC is found.
void set_nvrtc_folders(std::vector<std::string> folders);

}  // namespace deep_ep
