#include "jit/digest.hpp"

#include <gtest/gtest.h>

namespace deep_ep::jit {
namespace {

// Values that the authors of FNV publish.
TEST(DigestTest, IsFnv1aOf128Bits) {
  EXPECT_EQ(Digest().hex(), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(Digest().add_bytes("a").hex(), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(Digest().add_bytes("foobar").hex(), "343e1662793c64bf6f0d3597ba446f18");
}

TEST(DigestTest, TellsComponentsApartThatJoinToTheSameText) {
  EXPECT_NE(Digest().add("ab").add("c").hex(), Digest().add("a").add("bc").hex());
  EXPECT_NE(Digest().add("a").add("").hex(), Digest().add("a").hex());
  EXPECT_EQ(Digest().add("ab").add("c").hex(), Digest().add("ab").add("c").hex());
}

}  // namespace
}  // namespace deep_ep::jit
