#pragma once
// Runs another program and takes what it prints. No shell: an argument may hold any character.
#include <string>
#include <vector>

namespace deep_ep {

struct ProgramResult {
  int exit_status = 0;  ///< the negative signal if one ended it
  std::string output;   ///< of stdout and stderr together
};

/// Runs `arguments[0]`, looked up in PATH if it has no slash, and waits for its end and for the
/// close of its output. Its input is empty. Throws kSystem if it cannot be started.
ProgramResult run_program(const std::vector<std::string>& arguments);

/// The arguments as one line that a shell would read as they are.
std::string command_line(const std::vector<std::string>& arguments);

}  // namespace deep_ep
