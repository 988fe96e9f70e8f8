#include "os/program.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::ForkedProcess;
using testing::is_error;

TEST(ProgramTest, GivesStatusAndBothOutputs) {
  const ProgramResult result = run_program({"sh", "-c", "echo out; echo err >&2; exit 3"});
  EXPECT_EQ(result.exit_status, 3);
  EXPECT_EQ(result.output, "out\nerr\n");
}

TEST(ProgramTest, GivesMoreOutputThanAPipeHolds) {
  const ProgramResult result = run_program({"/bin/sh", "-c", "yes | head -c 200000"});
  EXPECT_EQ(result.exit_status, 0);
  EXPECT_EQ(result.output.size(), 200000U);
}

TEST(ProgramTest, PassesArgumentsAsTheyAre) {
  const ProgramResult result =
      run_program({"/bin/sh", "-c", R"(printf '[%s]' "$@")", "sh", "a b", "", "$HOME;'\"*", "-x"});
  EXPECT_EQ(result.output, "[a b][][$HOME;'\"*][-x]");
}

TEST(ProgramTest, GivesTheSignalThatEndedIt) {
  EXPECT_EQ(run_program({"sh", "-c", "kill -9 $$"}).exit_status, -SIGKILL);
}

TEST(ProgramTest, HasNothingOnItsInput) {
  ForkedProcess child([] {
    ::close(STDIN_FILENO);
    ASSERT_EQ(::open("/dev/zero", O_RDONLY), STDIN_FILENO);
    EXPECT_EQ(run_program({"readlink", "/proc/self/fd/0"}).output, "/dev/null\n");
  });
  EXPECT_EQ(child.wait(), 0);
}

TEST(ProgramTest, NamesAProgramThatIsNotThere) {
  for (const char* const name : {"/no/such/program", "no-such-program-in-path"}) {
    EXPECT_TRUE(is_error(error_from([&] { run_program({name}); }), ErrorCode::kSystem,
                         std::string("posix_spawn ") + name + ": ENOENT"));
  }
}

TEST(ProgramTest, WritesACommandThatAShellReadsBack) {
  const std::vector<std::string> arguments{"nvcc", "-I", "/a b", "it's", "", "-std=c++20", "$x"};
  EXPECT_EQ(command_line(arguments), R"(nvcc -I '/a b' 'it'\''s' '' -std=c++20 '$x')");
  const ProgramResult result =
      run_program({"sh", "-c", "printf '[%s]' " + command_line(arguments)});
  EXPECT_EQ(result.output, "[nvcc][-I][/a b][it's][][-std=c++20][$x]");
}

}  // namespace
}  // namespace deep_ep
