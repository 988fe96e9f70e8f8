// What EPBuffer promises besides the data: refused calls, ranks that leave, handles and lent
// memory.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/ep_problem.hpp"
#include "conformance/ep_rank.hpp"
#include "support/errors.hpp"
#include "support/rank_group.hpp"

namespace deep_ep::testing {
namespace {

ProblemShape two_ranks() {
  return {.num_scaleup_ranks = 2, .hidden = 16, .num_topk = 2, .num_local_experts = 2};
}

EPBufferOptions contract_options(const ProblemShape& shape, double timeout_secs = 20) {
  return {.num_max_tokens_per_rank = shape.num_max_tokens_per_rank,
          .hidden = static_cast<int>(shape.hidden),
          .num_topk = shape.num_topk,
          .timeout_secs = timeout_secs};
}

using Body = std::function<void(EpRank&, EPBuffer&)>;

void run_problem(const Problem& problem, const EPBufferOptions& options, const Body& body) {
  const auto failures =
      run_ranks(make_rank_group(problem.shape.num_scaleout_ranks, problem.shape.num_scaleup_ranks),
                [&](std::shared_ptr<Bootstrap> bootstrap) {
                  EPBuffer buffer(std::move(bootstrap), options);
                  EpRank rank(problem, buffer);
                  body(rank, buffer);
                });
  for (const RankFailure& failure : failures) ADD_FAILURE() << failure;
}

/// A dispatch of one token of two lanes, which owns its data.
struct OneToken {
  std::array<std::uint16_t, 16> x = {};
  std::array<std::int64_t, 2> topk_idx = {0, 3};
  std::array<float, 2> topk_weights = {};

  DispatchArgs args() {
    DispatchArgs args;
    args.x = TensorView::matrix(x.data(), DType::kBFloat16, 1, 16);
    args.topk_idx = TensorView::matrix(topk_idx.data(), DType::kInt64, 1, 2);
    args.num_experts = 4;
    return args;
  }
};

TEST(EpContractTest, ARefusedCallThrowsOnAllRanksAndTheBufferStaysUsable) {
  for (const int num_domains : {1, 2}) {
    ProblemShape shape = two_ranks();
    shape.num_scaleout_ranks = num_domains;
    const Problem problem(shape);
    run_problem(problem, contract_options(shape), [&](EpRank& rank, EPBuffer& buffer) {
      const int rank_idx = buffer.logical_topology().rank_idx;
      OneToken token;
      DispatchArgs args = token.args();
      args.num_experts = shape.num_experts();
      if (rank_idx == 1) token.topk_idx[1] = shape.num_experts();
      const Error error = error_from([&] { buffer.dispatch(args); });
      EXPECT_TRUE(is_error(error, rank_idx == 1 ? ErrorCode::kInvalidArgument : ErrorCode::kPeer,
                           "topk_idx must be below num_experts"));

      const auto handle = rank.dispatch({});
      CombineArgs combine_args;
      combine_args.handle = rank_idx == 1 ? nullptr : handle;
      combine_args.x = TensorView::matrix(nullptr, DType::kBFloat16, handle->num_recv_tokens, 16);
      std::vector<std::uint16_t> x(static_cast<std::size_t>(handle->num_recv_tokens) * 16);
      combine_args.x.data = x.data();
      EXPECT_TRUE(is_error(error_from([&] { buffer.combine(combine_args); }),
                           rank_idx == 1 ? ErrorCode::kInvalidArgument : ErrorCode::kPeer,
                           "handle"));
      rank.dispatch({.do_expand = true});
    });
  }
}

TEST(EpContractTest, ARefusedAsyncCallThrowsWhereItIsWaitedFor) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    OneToken token;
    DispatchArgs args = token.args();
    args.is_async = true;
    if (buffer.logical_topology().rank_idx == 1) {
      args.expert_alignment = -1;
      EXPECT_TRUE(is_error(error_from([&] { buffer.dispatch(args); }), ErrorCode::kInvalidArgument,
                           "expert_alignment"));
    } else {
      const PendingDispatch pending = buffer.dispatch(args);
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(is_error(error_from([&] { pending.event().wait(); }), ErrorCode::kPeer,
                             "expert_alignment"));
        EXPECT_TRUE(
            is_error(error_from([&] { pending.outputs(); }), ErrorCode::kPeer, "expert_alignment"));
      }
      EXPECT_TRUE(pending.event().is_done());
    }
    rank.dispatch({});
  });
}

TEST(EpContractTest, WhatFollowsARefusedAsyncCallIsRefusedToo) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    const bool refuses = buffer.logical_topology().rank_idx == 1;
    OneToken token;
    DispatchArgs args = token.args();
    args.is_async = true;
    args.do_cpu_sync = false;
    if (refuses) token.topk_idx[1] = 4;  // num_experts
    DispatchOutputs outputs;
    Event failed;
    const auto start = [&] {
      const PendingDispatch pending = buffer.dispatch(args);
      failed = pending.event();
      outputs = pending.outputs();
    };
    if (refuses) {
      EXPECT_TRUE(is_error(error_from(start), ErrorCode::kInvalidArgument, "below num_experts"));
    } else {
      start();
    }

    // The handle of that dispatch, on one rank only: the other makes a call that would be right.
    const auto handle = rank.dispatch({});
    const Tensor x = buffer.empty(
        refuses ? handle->num_recv_tokens : outputs.handle->num_recv_tokens, 16, DType::kBFloat16);
    CombineArgs combine;
    combine.x = x.view;
    combine.handle = refuses ? handle : outputs.handle;
    EXPECT_TRUE(is_error(error_from([&] { buffer.combine(combine); }),
                         refuses ? ErrorCode::kPeer : ErrorCode::kInvalidArgument, "failed"));

    // Its event before another call, on one rank only.
    OneToken other;
    DispatchArgs after = other.args();
    if (!refuses) after.previous_event = failed;
    EXPECT_TRUE(is_error(error_from([&] { buffer.dispatch(after); }), ErrorCode::kPeer, "refused"));
    rank.dispatch({.do_expand = true});
  });
}

TEST(EpContractTest, RanksThatDisagreeAboutACallAllLearnInWhat) {
  struct Difference {
    const char* text;
    std::function<void(DispatchArgs&, OneToken&)> change;
  };
  const std::vector<Difference> differences = {
      {"num_experts", [](DispatchArgs& args, OneToken&) { args.num_experts = 8; }},
      {"expert_alignment", [](DispatchArgs& args, OneToken&) { args.expert_alignment = 4; }},
      {"num_max_tokens_per_rank",
       [](DispatchArgs& args, OneToken&) { args.num_max_tokens_per_rank = 5; }},
      {"do_expand", [](DispatchArgs& args, OneToken&) { args.do_expand = true; }},
      {"num_topk", [](DispatchArgs& args, OneToken&) { args.topk_idx.shape[1] = 1; }},
      {"row of x", [](DispatchArgs& args, OneToken&) { args.x.shape[1] = 8; }},
      {"dtype of x", [](DispatchArgs& args, OneToken&) { args.x.dtype = DType::kFloat8E4M3; }},
      {"topk_weights",
       [](DispatchArgs& args, OneToken& token) {
         args.topk_weights = TensorView::matrix(token.topk_weights.data(), DType::kFloat32, 1, 2);
       }},
  };
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    for (const Difference& difference : differences) {
      SCOPED_TRACE(difference.text);
      OneToken token;
      DispatchArgs args = token.args();
      if (buffer.logical_topology().rank_idx == 1) {
        difference.change(args, token);
        args.x.strides[0] = args.x.shape[1];
        args.topk_idx.strides[0] = args.topk_idx.shape[1];
      }
      EXPECT_TRUE(is_error(error_from([&] { buffer.dispatch(args); }), ErrorCode::kInvalidArgument,
                           difference.text));
      rank.dispatch({});
    }
  });
}

TEST(EpContractTest, CachedCallsAreRefusedUnlessTheyFitTheHandle) {
  const Problem problem(two_ranks());
  struct Misfit {
    const char* text;
    std::function<void(DispatchArgs&)> change;
  };
  const std::vector<Misfit> misfits = {
      {"do_expand", [](DispatchArgs& args) { args.do_expand = true; }},
      {"num_experts", [](DispatchArgs& args) { args.num_experts = 8; }},
      {"expert_alignment", [](DispatchArgs& args) { args.expert_alignment = 2; }},
      {"num_max_tokens_per_rank", [](DispatchArgs& args) { args.num_max_tokens_per_rank = 3; }},
      {"tokens", [](DispatchArgs& args) { args.x.shape[0] += 1; }},
  };
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    const auto handle = rank.dispatch({});
    std::vector<std::uint16_t> x(static_cast<std::size_t>(handle->num_tokens + 1) * 16);
    for (const Misfit& misfit : misfits) {
      DispatchArgs args;
      args.x = TensorView::matrix(x.data(), DType::kBFloat16, handle->num_tokens, 16);
      args.handle = handle;
      misfit.change(args);
      // Either rank may hear of the other's refusal first only if it did not refuse itself.
      EXPECT_TRUE(is_error(error_from([&] { buffer.dispatch(args); }), ErrorCode::kInvalidArgument,
                           misfit.text));
    }
    rank.dispatch_cached(handle, problem.data, {});
  });
}

TEST(EpContractTest, RepeatedExpertsWithoutRoomInTheWorstCaseAreRefused) {
  ProblemShape shape = two_ranks();
  shape.num_local_experts = 1;
  const Problem problem(shape);
  run_problem(problem, contract_options(shape), [&](EpRank&, EPBuffer& buffer) {
    OneToken token;
    token.topk_idx = {1, 1};
    DispatchArgs args = token.args();
    args.num_experts = 2;
    args.do_expand = true;
    args.do_cpu_sync = false;
    EXPECT_TRUE(is_error(error_from([&] { buffer.dispatch(args); }), ErrorCode::kInvalidArgument,
                         "do_cpu_sync"));
    args.do_cpu_sync = true;
    EXPECT_NO_THROW(buffer.dispatch(args));
  });
}

TEST(EpContractTest, OptionsMustBeEqualOnAllRanks) {
  const auto failures = run_ranks(make_rank_group(1, 3), [](std::shared_ptr<Bootstrap> bootstrap) {
    EPBufferOptions options = contract_options(two_ranks());
    options.allow_multiple_reduction = bootstrap->rank_idx() != 2;
    const EPBuffer buffer(std::move(bootstrap), options);
  });
  ASSERT_EQ(failures.size(), 3u);
  for (const RankFailure& failure : failures) {
    EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument) << failure;
    EXPECT_NE(failure.what.find("allow_multiple_reduction"), std::string::npos) << failure;
  }
}

TEST(EpContractTest, ACallThatARankMissesTimesOutAndEndsTheUseOfTheBuffer) {
  for (const int num_domains : {1, 2}) {
    ProblemShape shape = two_ranks();
    shape.num_scaleout_ranks = num_domains;
    const Problem problem(shape);
    // Only rank 0 calls; the others keep their buffers until it is through with all checks.
    std::vector<std::shared_ptr<EPBuffer>> buffers(static_cast<std::size_t>(shape.num_ranks()));
    const auto failures =
        run_ranks(make_rank_group(num_domains, 2), [&](std::shared_ptr<Bootstrap> bootstrap) {
          const int rank_idx = bootstrap->rank_idx();
          auto& buffer = buffers[static_cast<std::size_t>(rank_idx)];
          buffer = std::make_shared<EPBuffer>(std::move(bootstrap), contract_options(shape, 0.3));
          if (rank_idx != 0) return;
          OneToken token;
          DispatchArgs args = token.args();
          args.num_experts = shape.num_experts();
          for (int i = 0; i < 2; ++i) {
            EXPECT_TRUE(
                is_error(error_from([&] { buffer->dispatch(args); }), ErrorCode::kTimeout, "rank"));
          }
        });
    for (const RankFailure& failure : failures) ADD_FAILURE() << failure;
  }
}

TEST(EpContractTest, PeersOfADestroyedBufferLearnThatItsRankIsGone) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    rank.dispatch({});
    if (buffer.logical_topology().rank_idx == 1) {
      buffer.destroy();
      buffer.destroy();
      return;
    }
    OneToken token;
    EXPECT_TRUE(
        is_error(error_from([&] { buffer.dispatch(token.args()); }), ErrorCode::kPeer, "rank 1"));
  });
}

TEST(EpContractTest, LentMemoryOutlivesTheBuffer) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    const Tensor lent = buffer.empty(3, 5, DType::kFloat32);
    EXPECT_TRUE(lent.view.is_contiguous());
    EXPECT_EQ(lent.view.shape, (std::array<std::int64_t, 2>{3, 5}));
    const PendingDispatch pending = rank.start(problem.data, {});
    buffer.destroy();
    for (int i = 0; i < 15; ++i) lent.as<float>()[i] = 1.0f;
    rank.check(problem.data, {}, pending);
  });
}

TEST(EpContractTest, AHandleWorksInOtherBuffersOfTheSameRanksAndOutlivesItsOwn) {
  const Problem problem(two_ranks());
  const CombineCase compact(problem, 7, 16, false, 1, true);
  const auto failures = run_ranks(make_rank_group(1, 2), [&](std::shared_ptr<Bootstrap> bootstrap) {
    EPBuffer second(bootstrap, contract_options(problem.shape));
    std::shared_ptr<const EPHandle> handle;
    {
      EPBuffer first(bootstrap, contract_options(problem.shape));
      handle = EpRank(problem, first).dispatch({});
    }
    EpRank rank(problem, second);
    rank.combine(handle, compact, {});
    rank.dispatch_cached(handle, problem.data, {});
  });
  for (const RankFailure& failure : failures) ADD_FAILURE() << failure;
}

TEST(EpContractTest, ManyHandlesMayBeAliveAndUsedInAnyOrder) {
  ProblemShape shape = two_ranks();
  shape.num_scaleout_ranks = 2;
  const Problem problem(shape);
  const CombineCase compact(problem, 8, 16, false, 0, true);
  const CombineCase expanded(problem, 9, 16, true, 0, true);
  run_problem(problem, contract_options(shape), [&](EpRank& rank, EPBuffer&) {
    std::vector<std::shared_ptr<const EPHandle>> handles;
    for (int i = 0; i < 8; ++i) handles.push_back(rank.dispatch({.do_expand = i % 2 == 1}));
    for (const int i : {7, 0, 5, 2, 7, 6}) {
      const auto& handle = handles[static_cast<std::size_t>(i)];
      rank.combine(handle, handle->do_expand ? expanded : compact, {.is_lent = i == 5});
    }
  });
}

TEST(EpContractTest, TheStatisticsGrowByWhatEachExpertReceives) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank&, EPBuffer& buffer) {
    OneToken token;  // expert 0 on rank 0, expert 3 on rank 1, from both ranks
    std::array<std::int32_t, 2> stats = {10, 20};
    DispatchArgs args = token.args();
    args.cumulative_local_expert_recv_stats = TensorView::vector(stats.data(), DType::kInt32, 2);
    args.expert_alignment = 8;
    buffer.dispatch(args);
    buffer.dispatch(args);
    const bool is_first = buffer.logical_topology().rank_idx == 0;
    EXPECT_EQ(stats, (is_first ? std::array<std::int32_t, 2>{14, 20}
                               : std::array<std::int32_t, 2>{10, 24}));
  });
}

TEST(EpContractTest, ACallMayUseAnotherCapacityThanTheBuffer) {
  ProblemShape shape = two_ranks();
  shape.num_max_tokens_per_rank = 40;
  const Problem problem(shape);
  EPBufferOptions options = contract_options(shape);
  options.num_max_tokens_per_rank = 3;
  options.hidden = 2;
  run_problem(problem, options, [&](EpRank&, EPBuffer& buffer) {
    for (const int num_max_tokens : {1, 64, 2}) {
      OneToken token;
      DispatchArgs args = token.args();
      args.num_max_tokens_per_rank = num_max_tokens;
      const DispatchOutputs outputs = buffer.dispatch(args).outputs();
      EXPECT_EQ(outputs.handle->num_max_tokens_per_rank, num_max_tokens);
      ASSERT_EQ(outputs.handle->num_recv_tokens, 2);
      EXPECT_EQ(outputs.handle->recv_src_metadata.as<std::int32_t>()[4], num_max_tokens);
    }
  });
}

TEST(EpContractTest, ADeferredEpilogueReadsTheBiasWhenItRuns) {
  const Problem problem(two_ranks());
  const CombineCase without_bias(problem, 10, 16, false, 0, true);
  run_problem(problem, contract_options(problem.shape), [&](EpRank& rank, EPBuffer& buffer) {
    const auto rank_idx = static_cast<std::size_t>(buffer.logical_topology().rank_idx);
    const auto handle = rank.dispatch({});
    const auto& input = without_bias.inputs[rank_idx];
    reference::BF16Row bias(static_cast<std::size_t>(handle->num_tokens) * 16, 0x7fff);
    CombineArgs args;
    args.handle = handle;
    args.x = TensorView::matrix(address_of(input.x), DType::kBFloat16, handle->num_recv_tokens, 16);
    args.bias[1] = TensorView::matrix(bias.data(), DType::kBFloat16, handle->num_tokens, 16);
    args.is_async = true;
    args.defer_epilogue = true;
    const PendingCombine pending = buffer.combine(args);
    pending.event().wait();
    bias.assign(bias.size(), 0);  // now it is known, and adds nothing
    const CombineOutputs outputs = pending.outputs();
    expect_rows({.name = "combined_x", .num_columns = 16}, outputs.combined_x.view,
                without_bias.expected[rank_idx].x);
    EXPECT_EQ(pending.outputs().combined_x.view.data, outputs.combined_x.view.data) << "runs once";
  });
}

TEST(EpContractTest, InputsAreReleasedWhenTheCallIsDone) {
  const Problem problem(two_ranks());
  run_problem(problem, contract_options(problem.shape), [&](EpRank&, EPBuffer& buffer) {
    auto token = std::make_shared<OneToken>();
    DispatchArgs args = token->args();
    args.is_async = true;
    args.keep_alive = token;
    const std::weak_ptr<OneToken> watch = std::exchange(token, nullptr);
    const PendingDispatch pending = buffer.dispatch(args);
    args.keep_alive = nullptr;
    pending.event().wait();
    EXPECT_TRUE(watch.expired());
  });
}

}  // namespace
}  // namespace deep_ep::testing
