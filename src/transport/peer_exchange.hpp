#pragma once
// How the ranks of a host come to share memory: descriptors between processes, objects within one.
//
// 1. all_gather: which process and kernel each rank is of, and where it listens
// 2. within a process  take the other rank's object
//    between processes the higher rank connects to the lower; both say hello and send their
//    descriptor
// 3. all_gather: whether that worked; if not for one rank, then for none
#include <chrono>
#include <memory>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "transport/peer_link.hpp"

namespace deep_ep {

/// Gives `own_descriptor` (borrowed) to every rank of another process and `own_object` to every
/// rank of this process; gives back the links to all ranks in rank order, that to itself included.
///
/// Collective; blocks. Step 2 takes at most `timeout`, the others as long as the bootstrap allows.
/// Throws on every rank or on none, naming the ranks that failed and why: kUnsupported if the ranks
/// are of different machines, kPeer if a process ended, kTimeout, kSystem.
std::vector<PeerLink> exchange_peers(Bootstrap& bootstrap, int own_descriptor,
                                     std::shared_ptr<void> own_object,
                                     std::chrono::nanoseconds timeout);

}  // namespace deep_ep
