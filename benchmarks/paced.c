/* Two XLA custom calls with which a computation takes a set time: see paced.py. */

#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "xla/ffi/api/c_api.h"

static const int64_t SECOND_NS = 1000000000;

/* Answers XLA's question about a handler; it asks once, when the handler is registered. */
static int described(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (extension == NULL || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int place) {
  return frame->args.args[place];
}

/* (value) -> (the same value in place, the time now in ns). */
XLA_FFI_Error* paced_begin(XLA_FFI_CallFrame* frame) {
  if (described(frame)) return NULL;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  XLA_FFI_Buffer* time = frame->rets.rets[1];
  int64_t ns = now.tv_sec * SECOND_NS + now.tv_nsec;
  memcpy(time->data, &ns, sizeof ns);
  return NULL;
}

/* (value, when it began, how long it shall take in ns) -> (the same value in place). */
XLA_FFI_Error* paced_end(XLA_FFI_CallFrame* frame) {
  if (described(frame)) return NULL;
  int64_t began, takes;
  memcpy(&began, argument(frame, 1)->data, sizeof began);
  memcpy(&takes, argument(frame, 2)->data, sizeof takes);
  int64_t end = began + takes;
  struct timespec until = {.tv_sec = end / SECOND_NS, .tv_nsec = end % SECOND_NS};
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {
  }
  return NULL;
}
