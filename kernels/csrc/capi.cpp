#include "abi.h"

// The C ABI's version: kernels/_lib.py refuses a library of another one.
GRL_EXPORT int grl_abi_version() { return 1; }
