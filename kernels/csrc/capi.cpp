// The C ABI's version: kernels/_lib.py refuses a library of another one.
extern "C" __attribute__((visibility("default"))) int grl_abi_version() { return 1; }
