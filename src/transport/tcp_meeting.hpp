#pragma once
// How the ranks of a group come to have one TCP connection each to rank 0.
//
// Rank 0 listens; every other rank connects, retrying until rank 0 is there, and sends a hello.
// Once all are there rank 0 answers each with an empty frame. Whoever does not fit gets an error
// frame, or is cut off, and holds up nobody.
#include <string>
#include <vector>

#include "os/deadline.hpp"
#include "os/fd.hpp"

namespace deep_ep {

struct MeetingPlace {
  std::string address;  ///< host name, IPv4 or IPv6 address, the latter with or without brackets
  int port = 0;
};

/// Rank 0's part. Gives the connection to each rank; that at 0 is empty.
/// Throws kTimeout naming the missing ranks, kInvalidArgument if the address is not one of this
/// host, kSystem if the port is taken.
std::vector<UniqueFd> host_meeting(int num_ranks, const MeetingPlace& place,
                                   const Deadline& deadline);

/// The part of the others: gives the connection to rank 0.
/// Throws what rank 0 answered; else, shortly after the deadline at the latest, kInvalidArgument if
/// the address is of no host or of no rank 0, kTimeout if rank 0 was not there or did not answer.
UniqueFd join_meeting(int rank_idx, int num_ranks, const MeetingPlace& place,
                      const Deadline& deadline);

/// How much longer than rank 0 another rank waits for its answer: when the time of both runs out,
/// it is rank 0's answer that can name the missing ranks.
inline constexpr std::chrono::seconds kAnswerGrace{2};

}  // namespace deep_ep
