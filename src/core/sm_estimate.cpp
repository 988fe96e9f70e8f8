// How many SMs and queue pairs keep the links of a rank busy, from the bytes that a balanced gate
// moves.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/check.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep {
namespace {

constexpr double kNvlinkGbs = 356, kRdmaGbs = 45, kSmReadGbs = 180, kSmWriteGbs = 45;
constexpr double kHeadroom = 1.3;
constexpr int kMinSms = 4, kMinSmsWithoutOverlap = 64;
constexpr double kMaxSms = 1 << 16;  // keeps what follows from absurd rates an int
constexpr int kHybridQps = 129, kDirectQps = 17;

double rate_or(double gbs, double default_gbs) {
  return std::isfinite(gbs) && gbs > 0 ? gbs : default_gbs;
}

/// f(G) = G * (1 - C(E - E/G, K) / C(E, K)). The quotient is a product of K factors below 1, so
/// that no binomial is ever formed.
double num_expected_destinations(int num_groups, int num_experts, int num_topk) {
  const int num_elsewhere = num_experts - num_experts / num_groups;
  double all_elsewhere = 1;  // probability that no lane selects a given group
  for (int i = 0; i < num_topk && all_elsewhere > 0; ++i) {
    all_elsewhere *= static_cast<double>(std::max(num_elsewhere - i, 0)) / (num_experts - i);
  }
  return num_groups * (1 - all_elsewhere);
}

/// Bytes moved for each byte that a rank's tokens bring to their destinations.
struct Traffic {
  double read, write;  ///< by SMs
  double nvlink, rdma;
};

Traffic estimate_traffic(const SmEstimateArgs& args) {
  const Topology &physical = args.physical, &logical = args.logical;
  const double token =
      1 / num_expected_destinations(logical.num_ranks, args.num_experts, args.num_topk);
  if (logical.is_hybrid()) {
    const int num_domains = logical.num_scaleout_ranks;
    const double copies =
        token * num_expected_destinations(num_domains, args.num_experts, args.num_topk);
    return {.read = token + copies,
            .write = token + copies / num_domains + 1,
            .nvlink = 1 - 1.0 / logical.num_scaleup_ranks,
            .rdma = copies * (1 - 1.0 / num_domains)};
  }
  const int num_near = physical.num_scaleup_ranks;
  const double near_part = static_cast<double>(num_near) / physical.num_ranks;
  return {.read = token,
          .write = (physical.num_scaleout_ranks > 1 ? token : 0) + near_part,
          .nvlink = near_part * (1 - 1.0 / num_near),
          .rdma = 1 - near_part};
}

/// SMs that move the traffic in the time of the slowest link; 0 without traffic on a link.
double num_busy_sms(const SmEstimateArgs& args) {
  const Traffic traffic = estimate_traffic(args);
  const double nvlink_secs = traffic.nvlink / rate_or(args.nvlink_gbs, kNvlinkGbs);
  const double rdma_secs = traffic.rdma / rate_or(args.rdma_gbs, kRdmaGbs);
  // Direct transfers over RDMA need few SMs, so NVLink decides where there is any.
  const bool is_rdma_bound =
      rdma_secs > nvlink_secs && (args.logical.is_hybrid() || traffic.nvlink <= 0);
  const double link_secs = is_rdma_bound ? rdma_secs : nvlink_secs;
  if (link_secs <= 0) return 0;
  const double read_gbs = rate_or(args.sm_read_gbs, kSmReadGbs);
  const double write_gbs = rate_or(args.sm_write_gbs, kSmWriteGbs);
  const double sm_secs = std::max({traffic.read / read_gbs, traffic.write / write_gbs,
                                   (traffic.write - traffic.nvlink) / read_gbs,    // combine
                                   (traffic.read + traffic.nvlink) / write_gbs});  // combine
  return sm_secs / link_secs;
}

void check_args(const SmEstimateArgs& args) {
  for (const Topology* topology : {&args.physical, &args.logical}) {
    require(topology->num_scaleout_ranks > 0 && topology->num_scaleup_ranks > 0 &&
                topology->num_ranks == topology->num_scaleout_ranks * topology->num_scaleup_ranks,
            "num_ranks must be num_scaleout_ranks * num_scaleup_ranks and positive, got ",
            topology->num_ranks, ", ", topology->num_scaleout_ranks, " and ",
            topology->num_scaleup_ranks);
  }
  require(args.num_experts > 0 && args.num_experts % args.logical.num_ranks == 0,
          "num_experts must be a positive multiple of num_ranks, got ", args.num_experts, " and ",
          args.logical.num_ranks);
  require(args.num_topk > 0, "num_topk must be positive, got ", args.num_topk);
}

}  // namespace

int theoretical_num_sms(const SmEstimateArgs& args) {
  check_args(args);
  const double wanted = std::min(kMaxSms, std::ceil(kHeadroom * num_busy_sms(args)));
  int num_sms = std::max(kMinSms, (static_cast<int>(wanted) + 3) / 4 * 4);
  if (!args.prefer_overlap_with_compute) num_sms = std::max(num_sms, kMinSmsWithoutOverlap);
  if (args.num_device_sms > 0) num_sms = std::min(num_sms, args.num_device_sms / 2 * 2);
  return std::max(num_sms, 2);
}

int theoretical_num_qps(int num_sms, bool allow_hybrid_mode, int num_allocated_qps) {
  require(num_sms >= 0, "num_sms must not be negative, got ", num_sms);
  const int automatic = allow_hybrid_mode ? kHybridQps : kDirectQps;
  const std::int64_t limit = num_allocated_qps > 0 ? num_allocated_qps : automatic;
  const std::int64_t usable =
      allow_hybrid_mode ? std::int64_t{num_sms} * 16 + 1 : std::min(num_sms, 9);
  return static_cast<int>(std::min(usable, limit));
}

}  // namespace deep_ep
