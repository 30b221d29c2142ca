/* report.h - errors of a launch: messages with source lines, and the state of every waiting warp. */
#ifndef EMULATOR_REPORT_H
#define EMULATOR_REPORT_H

#include <string>

namespace emu {

struct Failure {}; /* thrown in the scheduler's own context only: a thread's stack is abandoned instead */

bool failure_pending();
std::string take_failure();
[[noreturn]] void abandon_thread(); /* runtime.cpp: leaves the running thread for good */

/* "csrc/cuda/sm90_gemm_wide.cu:120 in consume_span" for a return address, with the callers it was inlined into. */
std::string source_of(const void *site);

} // namespace emu

#endif
