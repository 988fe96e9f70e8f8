#pragma once
// A child process for tests, which ends with its owner.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <utility>

namespace deep_ep::testing {

class ForkedProcess {
 public:
  /// Runs `body` in a forked child. Its expectations report from there and make wait() non-zero.
  template <typename Body>
  explicit ForkedProcess(Body body) : pid_(::fork()) {
    if (pid_ != 0) return;
    int status = 0;
    try {
      body();
      status = ::testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      status = 2;
    }
    std::fflush(nullptr);
    ::_exit(status);  // not exit: what the parent set up is the parent's to tear down
  }
  ForkedProcess(ForkedProcess&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ForkedProcess(const ForkedProcess&) = delete;
  ForkedProcess& operator=(const ForkedProcess&) = delete;
  ForkedProcess& operator=(ForkedProcess&&) = delete;
  ~ForkedProcess() {
    if (pid_ <= 0) return;
    kill();
    wait();
  }

  pid_t pid() const noexcept { return pid_; }

  /// As kill -9 does.
  void kill() const { ::kill(pid_, SIGKILL); }

  /// Exit status; the negative signal if one ended it.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

}  // namespace deep_ep::testing
