#pragma once
// Calls without rows, by one block: a barrier; the part of a rank that can't make a call in that
// call of the others; the last deed of a rank.
#include "deep_ep/device/call.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
    ep_meet(const __grid_constant__ deep_ep::abi::MeetParams params) {
  using deep_ep::abi::Site;
  using deep_ep::device::Stage;
  const deep_ep::device::Call call(params.context);
  if (params.leaves != 0) {
    if (threadIdx.x == 0) call.leave();  // replays of graphs do nothing from now on
    return;
  }
  if (call.has_fault()) return;
  call.announce_to_all(&params.announcement, nullptr, Stage::kDone);
  if (!call.block_wait(Stage::kAnnounced, Site::kAnnounced)) return;
  if (call.block_agrees()) {
    call.block_end(true);
  } else {
    call.block_end_on_problem(true);
  }
}
