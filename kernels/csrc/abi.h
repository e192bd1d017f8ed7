// What every kernel's C++ shares: export, inlining and instruction-set macros.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define GRL_EXPORT extern "C" __attribute__((visibility("default")))
// Bodies are written once and inlined into one wrapper per instruction set, hence "always".
#define GRL_INLINE inline __attribute__((always_inline))

// Wheels are generic x86-64 or aarch64, so the instruction set is chosen at run time. Manual wrappers instead of
// target_clones: that needs ifunc, which musl lacks, and cannot ask for FMA together with AVX2.
#if defined(__x86_64__)
#define GRL_X86 1
#define GRL_TARGET_AVX2 __attribute__((target("avx2,fma,bmi2")))
#define GRL_TARGET_AVX512 \
    __attribute__((target("avx2,fma,bmi2,avx512f,avx512vl,avx512bw,avx512dq")))
#else
#define GRL_X86 0
#endif

namespace grl {

enum class Isa { base, avx2, avx512 };

// GRAPHRL_ISA=base or avx2 asks for less than the machine has, so that one machine can test every version.
inline Isa detect_isa() {
#if GRL_X86
    const char* asked = std::getenv("GRAPHRL_ISA");
    if (asked && !std::strcmp(asked, "base")) return Isa::base;
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (v3 && asked && !std::strcmp(asked, "avx2")) return Isa::avx2;
    if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return Isa::avx512;
    if (v3) return Isa::avx2;
#endif
    return Isa::base;
}

}  // namespace grl
