#include "os/program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/check.hpp"
#include "os/fd.hpp"
#include "os/system_error.hpp"

namespace deep_ep {
namespace {

std::pair<UniqueFd, UniqueFd> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_system_error(errno, "pipe2");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

/// What the child does to its descriptors before it becomes the program.
class SpawnActions {
 public:
  explicit SpawnActions(int output) {
    check(::posix_spawn_file_actions_init(&actions_));
    try {
      check(::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0));
      check(::posix_spawn_file_actions_adddup2(&actions_, output, STDOUT_FILENO));
      check(::posix_spawn_file_actions_adddup2(&actions_, output, STDERR_FILENO));
    } catch (...) {
      ::posix_spawn_file_actions_destroy(&actions_);
      throw;
    }
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;
  ~SpawnActions() { ::posix_spawn_file_actions_destroy(&actions_); }

  const posix_spawn_file_actions_t* get() const noexcept { return &actions_; }

 private:
  static void check(int error) {
    if (error != 0) throw_system_error(error, "posix_spawn_file_actions");
  }

  posix_spawn_file_actions_t actions_;
};

std::string read_to_end(const UniqueFd& fd) {
  std::string text;
  std::array<char, 4096> block;
  while (true) {
    const ssize_t num_read = ::read(fd.get(), block.data(), block.size());
    if (num_read > 0) text.append(block.data(), static_cast<std::size_t>(num_read));
    if (num_read == 0 || (num_read < 0 && errno != EINTR)) return text;
  }
}

int wait_for(pid_t pid, const std::string& program) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) throw_system_error(errno, "waitpid for ", program);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& arguments) {
  internal_check(!arguments.empty(), "a program to run has a name");
  std::vector<char*> raw_arguments;
  raw_arguments.reserve(arguments.size() + 1);
  for (const std::string& argument : arguments) {
    raw_arguments.push_back(const_cast<char*>(argument.c_str()));  // posix_spawn does not write
  }
  raw_arguments.push_back(nullptr);

  auto [reader, writer] = make_pipe();
  const SpawnActions actions(writer.get());
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, raw_arguments[0], actions.get(), nullptr,
                                   raw_arguments.data(), ::environ);
  if (error != 0) throw_system_error(error, "posix_spawn ", arguments[0]);
  writer.reset();  // the child's copies are the only ones left, so its end ends the output
  std::string output = read_to_end(reader);
  return {.exit_status = wait_for(pid, arguments[0]), .output = std::move(output)};
}

std::string command_line(const std::vector<std::string>& arguments) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  std::string line;
  for (const std::string& argument : arguments) {
    if (!line.empty()) line += ' ';
    if (!argument.empty() && argument.find_first_not_of(kPlain) == std::string::npos) {
      line += argument;
      continue;
    }
    line += '\'';
    for (const char character : argument) {
      if (character == '\'') {
        line += "'\\''";
      } else {
        line += character;
      }
    }
    line += '\'';
  }
  return line;
}

}  // namespace deep_ep
