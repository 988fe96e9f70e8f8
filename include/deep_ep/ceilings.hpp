#pragma once
// What this machine can copy and sum at best: the loops of dispatch and combine with nothing around
// them.

namespace deep_ep {

/// Median seconds of copying `num_rows` rows, scattered in the source, to consecutive rows: the
/// faster of streaming stores and memcpy. In memory of its own, touched before the clock starts;
/// threads share the rows evenly. Throws kInvalidArgument unless all arguments are positive.
double copy_rows_seconds(int num_rows, int row_bytes, int num_threads, int num_iters);

/// Median seconds of writing `num_outputs` BF16 rows of `hidden` values, each the FP32 sum of
/// `num_terms` (at most 32) scattered rows of its own, rounded once. Memory and threads as above.
double sum_rows_seconds(int num_outputs, int num_terms, int hidden, int num_threads, int num_iters);

}  // namespace deep_ep
