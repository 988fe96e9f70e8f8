#include "transport/peer_exchange.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "os/deadline.hpp"
#include "os/process.hpp"
#include "os/shared_memory.hpp"
#include "os/socket.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"
#include "support/free_port.hpp"
#include "support/threads.hpp"
#include "transport/introduction.hpp"

namespace deep_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_from;
using testing::ForkedProcess;
using testing::is_error;
using testing::run_threads;

constexpr seconds kLong{60};
constexpr std::int64_t kPageBytes = 4096;

struct Memory {
  UniqueFd fd = create_shared_memory("test", kPageBytes);
  Mapping mapping{fd.get(), kPageBytes};
};

/// What a rank does in the tests below: shares a page that holds its number, checks the peers'.
void exchange_and_check(Bootstrap& bootstrap, int num_ranks_per_process) {
  const auto own = std::make_shared<Memory>();
  own->mapping.data()[0] = static_cast<std::byte>(bootstrap.rank_idx());
  const std::vector<PeerLink> links = exchange_peers(bootstrap, own->fd.get(), own, kLong);
  ASSERT_EQ(links.size(), static_cast<std::size_t>(bootstrap.num_ranks()));
  for (int rank = 0; rank < bootstrap.num_ranks(); ++rank) {
    const PeerLink& link = links[static_cast<std::size_t>(rank)];
    const bool is_same_process =
        rank / num_ranks_per_process == bootstrap.rank_idx() / num_ranks_per_process;
    ASSERT_EQ(link.is_same_process(), is_same_process);
    EXPECT_TRUE(link.is_alive());
    if (is_same_process) {
      EXPECT_FALSE(link.descriptor());
      EXPECT_EQ(static_cast<Memory*>(link.object().get())->mapping.data()[0],
                static_cast<std::byte>(rank));
    } else {
      EXPECT_FALSE(link.object());
      EXPECT_EQ(Mapping(link.descriptor().get(), kPageBytes).data()[0],
                static_cast<std::byte>(rank));
    }
  }
  bootstrap.all_gather({});  // so that nobody's link ends while another still checks it
}

/// Runs `rank_body` for each rank, `num_threads` of them in each of `num_processes` processes.
void run_processes(int num_processes, int num_threads,
                   const std::function<void(Bootstrap&)>& rank_body) {
  const int port = testing::free_port();
  std::vector<ForkedProcess> children;
  for (int process = 0; process < num_processes; ++process) {
    children.emplace_back([&, process] {
      run_threads(num_threads, [&](int thread) {
        const auto bootstrap = make_tcp_bootstrap(
            process * num_threads + thread, num_processes * num_threads, "127.0.0.1", port, kLong);
        rank_body(*bootstrap);
      });
    });
  }
  for (ForkedProcess& child : children) EXPECT_EQ(child.wait(), 0);
}

struct Shape {
  int num_processes, num_threads;
};

class PeerExchangeShapeTest : public ::testing::TestWithParam<Shape> {};

TEST_P(PeerExchangeShapeTest, LinksEveryRankToEveryOther) {
  const auto [num_processes, num_threads] = GetParam();
  run_processes(num_processes, num_threads, [num_threads = num_threads](Bootstrap& bootstrap) {
    for (int round = 0; round < 2; ++round) exchange_and_check(bootstrap, num_threads);
  });
}

INSTANTIATE_TEST_SUITE_P(ProcessesAndThreads, PeerExchangeShapeTest,
                         ::testing::Values(Shape{1, 1}, Shape{2, 1}, Shape{3, 1}, Shape{8, 1},
                                           Shape{64, 1}, Shape{1, 8}, Shape{2, 3}, Shape{8, 8}),
                         [](const auto& shape) {
                           return "processes" + std::to_string(shape.param.num_processes) +
                                  "_threads" + std::to_string(shape.param.num_threads);
                         });

TEST(PeerExchangeTest, ThreadsShareTheObjectItself) {
  constexpr int kNumRanks = 4;
  const auto ends = make_thread_bootstraps(kNumRanks, kLong);
  std::vector<std::shared_ptr<int>> objects;
  for (int rank = 0; rank < kNumRanks; ++rank) objects.push_back(std::make_shared<int>(rank));
  run_threads(kNumRanks, [&](int thread) {
    const auto rank = static_cast<std::size_t>(thread);
    // no descriptor: within one process none is needed
    const auto links = exchange_peers(*ends[rank], -1, objects[rank], kLong);
    for (std::size_t other = 0; other < kNumRanks; ++other) {
      EXPECT_EQ(links[other].object(), objects[other]);
      EXPECT_TRUE(links[other].is_alive());
    }
  });
  for (const auto& object : objects) EXPECT_EQ(object.use_count(), 1);  // no offer was kept
}

TEST(PeerExchangeTest, RanksOfSeveralProcessesNeedADescriptor) {
  run_processes(2, 1, [](Bootstrap& bootstrap) {
    EXPECT_TRUE(is_error(error_from([&] { exchange_peers(bootstrap, -1, nullptr, kLong); }),
                         ErrorCode::kInvalidArgument, "ranks 0 and 1 gave none"));
  });
}

TEST(PeerExchangeTest, SeesAKilledProcessThatLeftAChildHoldingItsSockets) {
  const int port = testing::free_port();
  const UniqueFd shared = create_shared_memory("test", kPageBytes);
  const Mapping mapping(shared.get(), kPageBytes);
  auto& grandchild = *reinterpret_cast<pid_t*>(mapping.data());
  ForkedProcess child([&] {
    const auto bootstrap = make_tcp_bootstrap(1, 2, "127.0.0.1", port, kLong);
    const Memory own;
    const auto links = exchange_peers(*bootstrap, own.fd.get(), nullptr, kLong);
    const pid_t pid = ::fork();
    if (pid > 0) {
      grandchild = pid;
      bootstrap->all_gather({});
    }
    ::sleep(120);  // not for ever, in case the test ends before it can kill the grandchild
  });
  const auto bootstrap = make_tcp_bootstrap(0, 2, "127.0.0.1", port, kLong);
  const Memory own;
  const auto links = exchange_peers(*bootstrap, own.fd.get(), nullptr, kLong);
  bootstrap->all_gather({});
  EXPECT_TRUE(links[1].is_alive());
  child.kill();
  const Deadline deadline(seconds(1));
  while (links[1].is_alive() && !deadline.has_passed())
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(links[1].is_alive());
  EXPECT_TRUE(links[0].is_alive());
  ASSERT_GT(grandchild, 0);
  EXPECT_EQ(::kill(grandchild, SIGKILL), 0);  // it did hold the sockets until now
}

TEST(PeerExchangeTest, SeesThatAPeerDroppedItsLink) {
  run_processes(2, 1, [](Bootstrap& bootstrap) {
    const Memory own;
    auto links = exchange_peers(bootstrap, own.fd.get(), nullptr, kLong);
    if (bootstrap.rank_idx() == 1) links.clear();
    bootstrap.all_gather({});
    if (bootstrap.rank_idx() == 0) {
      EXPECT_FALSE(links[1].is_alive());
    }
    bootstrap.all_gather({});
  });
}

/// A bootstrap that changes what this rank says in its `index`-th all_gather.
class TamperingBootstrap final : public Bootstrap {
 public:
  using Tamper = std::function<void(int round, Bytes& own)>;
  TamperingBootstrap(std::shared_ptr<Bootstrap> inner, Tamper tamper)
      : inner_(std::move(inner)), tamper_(std::move(tamper)) {}
  int rank_idx() const noexcept override { return inner_->rank_idx(); }
  int num_ranks() const noexcept override { return inner_->num_ranks(); }
  std::string host_id() const override { return inner_->host_id(); }
  std::vector<Bytes> all_gather(std::span<const std::byte> message) override {
    Bytes own(message.begin(), message.end());
    tamper_(num_rounds_++, own);
    return inner_->all_gather(own);
  }

 private:
  std::shared_ptr<Bootstrap> inner_;
  Tamper tamper_;
  int num_rounds_ = 0;
};

TEST(PeerExchangeTest, RefusesRanksOfAnotherMachineByName) {
  const auto ends = make_thread_bootstraps(4, kLong);
  run_threads(4, [&](int rank) {
    TamperingBootstrap bootstrap(ends[static_cast<std::size_t>(rank)], [&](int, Bytes& own) {
      constexpr std::size_t kBootIdOffset =
          4 + 16 + 8;  // after status, process identity and length
      if (rank >= 2) own[kBootIdOffset] = std::byte{'?'};
    });
    EXPECT_TRUE(is_error(error_from([&] { exchange_peers(bootstrap, -1, nullptr, kLong); }),
                         ErrorCode::kUnsupported, "ranks 2 and 3 and rank 0 do not"));
  });
}

TEST(PeerExchangeTest, ARankThatFailsIsNamedByAll) {
  run_processes(3, 1, [](Bootstrap& bootstrap) {
    const Memory own;
    constexpr int kNotOpen = 999'999;
    const int descriptor = bootstrap.rank_idx() == 1 ? kNotOpen : own.fd.get();
    EXPECT_TRUE(
        is_error(error_from([&] { exchange_peers(bootstrap, descriptor, nullptr, seconds(5)); }),
                 ErrorCode::kSystem, "rank 1/3: link to rank 0: sendmsg SCM_RIGHTS on socket"));
  });
}

TEST(PeerExchangeTest, ARankThatDoesNotConnectIsNamedByAllAfterTheTimeout) {
  run_processes(2, 1, [](Bootstrap& bootstrap) {
    if (bootstrap.rank_idx() == 1) {
      // says what a rank says, but does not connect
      const Introduction own{.process = process_identity(),
                             .boot_id = boot_id(),
                             .socket_name = "none",
                             .object_key = {},
                             .token = {},
                             .has_descriptor = true};
      introduce(bootstrap, own, std::nullopt);
      bootstrap.all_gather(Bytes(4));
      return;
    }
    const Memory memory;
    EXPECT_TRUE(is_error(
        error_from([&] { exchange_peers(bootstrap, memory.fd.get(), nullptr, milliseconds(200)); }),
        ErrorCode::kTimeout, "rank 0/2: rank 1 did not connect within 0.2 s"));
  });
}

TEST(PeerExchangeTest, StrangersAtTheSocketAreRefusedAndStopNobody) {
  run_processes(2, 1, [](Bootstrap& bootstrap) {
    const Memory own;
    if (bootstrap.rank_idx() == 0) {
      exchange_peers(bootstrap, own.fd.get(), nullptr, kLong);
      return;
    }
    // rank 1 learns the address as a rank does, and sends strangers there before it goes on
    class Intruder final : public Bootstrap {
     public:
      explicit Intruder(Bootstrap& inner) : inner_(inner) {}
      int rank_idx() const noexcept override { return inner_.rank_idx(); }
      int num_ranks() const noexcept override { return inner_.num_ranks(); }
      std::string host_id() const override { return inner_.host_id(); }
      std::vector<Bytes> all_gather(std::span<const std::byte> message) override {
        std::vector<Bytes> messages = inner_.all_gather(message);
        const std::string text(reinterpret_cast<const char*>(messages[0].data()),
                               messages[0].size());
        const std::size_t start = text.find("deep_ep.");
        if (start == std::string::npos) return messages;
        const std::string name = text.substr(start, 8 + 32);
        silent_ = connect_unix(name, Deadline(kLong));
        const UniqueFd brief = connect_unix(name, Deadline(kLong));
        const UniqueFd rubbish = connect_unix(name, Deadline(kLong));
        send_bytes(rubbish.get(), Bytes(1000, std::byte{'x'}), Deadline(kLong));
        return messages;
      }

     private:
      Bootstrap& inner_;
      UniqueFd silent_;
    };
    Intruder intruder(bootstrap);
    exchange_peers(intruder, own.fd.get(), nullptr, kLong);
  });
}

TEST(PeerExchangeTest, ABootstrapThatFailsLeavesNoOffer) {
  auto ends = make_thread_bootstraps(2, milliseconds(50));
  const auto object = std::make_shared<int>(1);
  EXPECT_TRUE(is_error(error_from([&] { exchange_peers(*ends[0], -1, object, kLong); }),
                       ErrorCode::kTimeout, "rank 1 did not come"));
  EXPECT_EQ(object.use_count(), 1);
}

}  // namespace
}  // namespace deep_ep
