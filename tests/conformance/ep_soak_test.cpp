// Ten thousand rounds with ranks that drift apart: every value of every round is checked.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "core/float_formats.hpp"
#include "deep_ep/ep_buffer.hpp"
#include "support/rank_group.hpp"

namespace deep_ep {
namespace {

constexpr int kNumExperts = 8, kNumTopk = 3, kMaxTokens = 5, kHidden = 24;

// What every rank can know about the tokens of any rank in any round.
int num_tokens_of(int round, int rank) { return (round * 7 + rank * 3) % (kMaxTokens + 1); }
std::int64_t expert_of(int round, int rank, int token, int lane, bool same_routing) {
  const int turn = same_routing ? 0 : round;
  return (turn * 5 + rank * 11 + token * 3 + lane * 2) % (kNumExperts + 1) - 1;  // -1 among them
}
float value_of(int round, int rank, int token) {
  return static_cast<float>((round + rank * 17 + token * 5) % 64 + 1);
}

class Rank {
 public:
  Rank(std::shared_ptr<Bootstrap> bootstrap, bool same_routing)
      : rank_(bootstrap->rank_idx()),
        num_ranks_(bootstrap->num_ranks()),
        same_routing_(same_routing),
        random_(static_cast<unsigned>(rank_)),
        buffer_(bootstrap,
                {.num_max_tokens_per_rank = kMaxTokens, .hidden = kHidden, .num_topk = kNumTopk}) {}

  void run(int num_rounds) {
    for (int round = 0; round < num_rounds; round += 2) {
      drift();
      const DispatchOutputs first = dispatch(round);
      drift();
      const DispatchOutputs second = dispatch(round + 1);
      check_received(round, first);
      drift();
      combine_and_check(round, first);
      drift();
      check_received(round + 1, second);
      combine_and_check(round + 1, second);
    }
  }

 private:
  // Sometimes late, by a little or by several rounds of the others.
  void drift() {
    if (random_() % 64 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 1500));
  }

  DispatchOutputs dispatch(int round) {
    const int num_tokens = num_tokens_of(same_routing_ ? 0 : round, rank_);
    x_.resize(static_cast<std::size_t>(num_tokens * kHidden));
    ids_.resize(static_cast<std::size_t>(num_tokens * kNumTopk));
    for (int token = 0; token < num_tokens; ++token) {
      for (int h = 0; h < kHidden; ++h) {
        x_[static_cast<std::size_t>(token * kHidden + h)] =
            bf16_from_float(value_of(round, rank_, token));
      }
      for (int lane = 0; lane < kNumTopk; ++lane) {
        ids_[static_cast<std::size_t>(token * kNumTopk + lane)] =
            expert_of(round, rank_, token, lane, same_routing_);
      }
    }
    DispatchArgs args;
    args.x = TensorView::matrix(x_.data(), DType::kBFloat16, num_tokens, kHidden);
    args.topk_idx = TensorView::matrix(ids_.data(), DType::kInt64, num_tokens, kNumTopk);
    args.num_experts = kNumExperts;
    args.do_cpu_sync = round % 4 < 2;
    return buffer_.dispatch(args).outputs();
  }

  // The ranks that token `token` of `rank` goes to.
  std::set<int> ranks_of(int round, int rank, int token) const {
    std::set<int> ranks;
    for (int lane = 0; lane < kNumTopk; ++lane) {
      const std::int64_t expert = expert_of(round, rank, token, lane, same_routing_);
      if (expert >= 0) ranks.insert(static_cast<int>(expert) / (kNumExperts / num_ranks_));
    }
    return ranks;
  }

  void check_received(int round, const DispatchOutputs& received) const {
    std::int64_t row = 0;
    for (int source = 0; source < num_ranks_; ++source) {
      for (int token = 0; token < num_tokens_of(same_routing_ ? 0 : round, source); ++token) {
        if (!ranks_of(round, source, token).contains(rank_)) continue;
        for (int h = 0; h < kHidden; ++h) {
          ASSERT_EQ(float_from_bf16(received.recv_x.as<std::uint16_t>()[row * kHidden + h]),
                    value_of(round, source, token))
              << "round " << round << ", rank " << rank_ << ", row " << row << ", element " << h;
        }
        ++row;
      }
    }
    const auto* psum = received.handle->psum_num_recv_tokens_per_scaleup_rank.as<std::int32_t>();
    ASSERT_EQ(psum[buffer_.logical_topology().num_scaleup_ranks - 1], row)
        << "round " << round << ", rank " << rank_;
  }

  void combine_and_check(int round, const DispatchOutputs& received) {
    CombineArgs args;
    args.x = received.recv_x.view;
    args.handle = received.handle;
    const CombineOutputs combined = buffer_.combine(args).outputs();
    for (int token = 0; token < received.handle->num_tokens; ++token) {
      const auto num_terms = static_cast<float>(ranks_of(round, rank_, token).size());
      for (int h = 0; h < kHidden; ++h) {
        ASSERT_EQ(float_from_bf16(combined.combined_x.as<std::uint16_t>()[token * kHidden + h]),
                  num_terms * value_of(round, rank_, token))
            << "round " << round << ", rank " << rank_ << ", token " << token << ", element " << h;
      }
    }
  }

  const int rank_, num_ranks_;
  const bool same_routing_;
  std::minstd_rand random_;
  std::vector<std::uint16_t> x_;
  std::vector<std::int64_t> ids_;
  EPBuffer buffer_;
};

class EpSoakTest : public ::testing::TestWithParam<bool> {};

TEST_P(EpSoakTest, TenThousandRoundsOfDriftingRanksAreAllRight) {
  const auto failures =
      testing::run_ranks({.num_ranks = 4, .host_ids = {}, .timeout = std::chrono::seconds(60)},
                         [](std::shared_ptr<Bootstrap> bootstrap) {
                           Rank(std::move(bootstrap), GetParam()).run(10000);
                         });
  for (const auto& failure : failures) ADD_FAILURE() << failure;
}

INSTANTIATE_TEST_SUITE_P(Routing, EpSoakTest, ::testing::Bool(), [](const auto& param_info) {
  return param_info.param ? "the_same_every_round" : "another_every_round";
});

TEST(EpDomainSoakTest, DomainsDriftApartToo) {
  const auto failures = testing::run_ranks(
      testing::make_rank_group(2, 2),
      [](std::shared_ptr<Bootstrap> bootstrap) { Rank(std::move(bootstrap), false).run(3000); });
  for (const auto& failure : failures) ADD_FAILURE() << failure;
}

}  // namespace
}  // namespace deep_ep
