#include "jit/ptxas_log.hpp"

#include <gtest/gtest.h>

namespace deep_ep::jit {
namespace {

TEST(PtxasLogTest, ReadsTheFormOfNvrtc) {
  const auto functions = parse_ptxas_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'ep_move' for 'sm_90a'\n"
      "ptxas info    : Function properties for ep_move\n"
      "ptxas         .     8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
      "ptxas info    : Used 32 registers, used 0 barriers\n");
  ASSERT_EQ(functions.size(), 1U);
  EXPECT_EQ(functions[0].name, "ep_move");
  EXPECT_EQ(functions[0].stack_bytes, 8);
  EXPECT_EQ(functions[0].spill_store_bytes, 16);
  EXPECT_EQ(functions[0].spill_load_bytes, 24);
}

TEST(PtxasLogTest, ReadsTheFormOfNvccAndEveryFunction) {
  const auto functions = parse_ptxas_log(
      "ptxas info    : Function properties for first\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 8 registers\n"
      "ptxas info    : Function properties for second\n"
      "    400 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n");
  ASSERT_EQ(functions.size(), 2U);
  EXPECT_FALSE(functions[0].has_local_memory());
  EXPECT_EQ(functions[1].name, "second");
  EXPECT_TRUE(functions[1].has_local_memory());
  EXPECT_FALSE(functions[1].has_spills());
}

TEST(PtxasLogTest, TakesASpillOfEitherKindAsLocalMemory) {
  EXPECT_TRUE((FunctionUse{.name = "", .spill_store_bytes = 4}.has_local_memory()));
  EXPECT_TRUE((FunctionUse{.name = "", .spill_load_bytes = 4}.has_spills()));
  EXPECT_FALSE((FunctionUse{.name = "", .stack_bytes = 4}.has_spills()));
}

TEST(PtxasLogTest, FindsNothingInOtherText) {
  EXPECT_TRUE(parse_ptxas_log("").empty());
  EXPECT_TRUE(parse_ptxas_log("ptxas info    : Function properties for k").empty());
  EXPECT_TRUE(parse_ptxas_log("ptxas info    : Function properties for k\nother\n").empty());
  EXPECT_TRUE(parse_ptxas_log("kernel.cu(1): warning: a variable was not used\n").empty());
}

}  // namespace
}  // namespace deep_ep::jit
