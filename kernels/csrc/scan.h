// First-order linear recurrences x[k] = d[k] + c[k] * x[k +- lag], several rows at once, one row per SIMD lane.
//
// Rows lie contiguous in memory, so blocks of W x W elements are transposed in registers, scanned, and transposed
// back. A coefficient of exactly zero lets nothing through, not even NaN.
#pragma once
#include <cstdint>
#include <cstring>

#include "abi.h"

namespace grl {

template <int Bytes>
struct Unsigned;
template <>
struct Unsigned<4> {
    typedef uint32_t type;
};
template <>
struct Unsigned<8> {
    typedef uint64_t type;
};

template <class T, int W>
struct Vec;
template <>
struct Vec<float, 8> {
    typedef float type __attribute__((vector_size(32)));
    typedef int32_t mask __attribute__((vector_size(32)));
};
template <>
struct Vec<float, 4> {
    typedef float type __attribute__((vector_size(16)));
    typedef int32_t mask __attribute__((vector_size(16)));
};
template <>
struct Vec<double, 4> {
    typedef double type __attribute__((vector_size(32)));
    typedef int64_t mask __attribute__((vector_size(32)));
};
template <>
struct Vec<double, 2> {
    typedef double type __attribute__((vector_size(16)));
    typedef int64_t mask __attribute__((vector_size(16)));
};

// x, or zero where `stop` is set: by its bits, because compilers sink the load under a branch and give up on SIMD.
template <class T>
GRL_INLINE T zero_where(bool stop, T x) {
    using Bits = typename Unsigned<sizeof(T)>::type;
    Bits bits;
    std::memcpy(&bits, &x, sizeof x);
    bits &= Bits(stop) - Bits(1);
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GRL_SHUFFLE(M, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef GRL_SHUFFLE  // gcc before 12
#define GRL_SHUFFLE(M, a, b, ...) __builtin_shuffle(a, b, M{__VA_ARGS__})
#endif

GRL_INLINE void transpose(Vec<float, 8>::type (&x)[8]) {
    using M [[maybe_unused]] = Vec<float, 8>::mask;
    Vec<float, 8>::type y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = GRL_SHUFFLE(M, x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[i + 1] = GRL_SHUFFLE(M, x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i] = GRL_SHUFFLE(M, y[i], y[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        x[i + 1] = GRL_SHUFFLE(M, y[i], y[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        x[i + 2] = GRL_SHUFFLE(M, y[i + 1], y[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        x[i + 3] = GRL_SHUFFLE(M, y[i + 1], y[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = GRL_SHUFFLE(M, x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = GRL_SHUFFLE(M, x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; ++i) x[i] = y[i];
}

GRL_INLINE void transpose(Vec<float, 4>::type (&x)[4]) {
    using M [[maybe_unused]] = Vec<float, 4>::mask;
    Vec<float, 4>::type y[4];
    for (int i = 0; i < 4; i += 2) {
        y[i] = GRL_SHUFFLE(M, x[i], x[i + 1], 0, 4, 1, 5);
        y[i + 1] = GRL_SHUFFLE(M, x[i], x[i + 1], 2, 6, 3, 7);
    }
    x[0] = GRL_SHUFFLE(M, y[0], y[2], 0, 1, 4, 5);
    x[1] = GRL_SHUFFLE(M, y[0], y[2], 2, 3, 6, 7);
    x[2] = GRL_SHUFFLE(M, y[1], y[3], 0, 1, 4, 5);
    x[3] = GRL_SHUFFLE(M, y[1], y[3], 2, 3, 6, 7);
}

GRL_INLINE void transpose(Vec<double, 4>::type (&x)[4]) {
    using M [[maybe_unused]] = Vec<double, 4>::mask;
    Vec<double, 4>::type y[4];
    for (int i = 0; i < 4; i += 2) {
        y[i] = GRL_SHUFFLE(M, x[i], x[i + 1], 0, 4, 2, 6);
        y[i + 1] = GRL_SHUFFLE(M, x[i], x[i + 1], 1, 5, 3, 7);
    }
    for (int i = 0; i < 2; ++i) {
        x[i] = GRL_SHUFFLE(M, y[i], y[i + 2], 0, 1, 4, 5);
        x[i + 2] = GRL_SHUFFLE(M, y[i], y[i + 2], 2, 3, 6, 7);
    }
}

GRL_INLINE void transpose(Vec<double, 2>::type (&x)[2]) {
    using M [[maybe_unused]] = Vec<double, 2>::mask;
    const Vec<double, 2>::type y = GRL_SHUFFLE(M, x[0], x[1], 0, 2);
    x[1] = GRL_SHUFFLE(M, x[0], x[1], 1, 3);
    x[0] = y;
}

// Scans W rows of n elements (n a multiple of W; row i starts at i * stride) in place: d becomes x.
// Backwards in k when Reverse. `carry` holds lag vectors, the x of the neighbouring steps; `slot` is the one that the
// first element scanned reads (a ring, because k and k +- lag share a slot). With Product, c becomes the running
// product of coefficients: what a carry that enters later must be multiplied with.
template <class T, int W, bool Reverse, bool Product, bool Lag1>
GRL_INLINE void scan_rows(T* d, T* c, int64_t stride, int64_t n, typename Vec<T, W>::type* carry, int64_t lag,
                          int64_t slot) {
    using V = typename Vec<T, W>::type;
    using M = typename Vec<T, W>::mask;
    V x = carry[slot], p = V{} + T(1);
    for (int64_t block = 0; block < n; block += W) {
        const int64_t k = Reverse ? n - W - block : block;
        V dv[W], cv[W];
        for (int i = 0; i < W; ++i) {
            std::memcpy(&dv[i], d + i * stride + k, sizeof(V));
            std::memcpy(&cv[i], c + i * stride + k, sizeof(V));
        }
        transpose(dv);
        transpose(cv);
        for (int s = 0; s < W; ++s) {
            const int i = Reverse ? W - 1 - s : s;
            if (!Lag1) x = carry[slot];
            x = dv[i] + cv[i] * (V)((M)x & (M)(cv[i] != T(0)));
            dv[i] = x;
            if (Product) cv[i] = p = (V)((M)(p * cv[i]) & (M)(cv[i] != T(0)));  // also where p is NaN
            if (!Lag1) {
                carry[slot] = x;
                slot = Reverse ? (slot == 0 ? lag - 1 : slot - 1) : (slot == lag - 1 ? 0 : slot + 1);
            }
        }
        transpose(dv);
        if (Product) transpose(cv);
        for (int i = 0; i < W; ++i) {
            std::memcpy(d + i * stride + k, &dv[i], sizeof(V));
            if (Product) std::memcpy(c + i * stride + k, &cv[i], sizeof(V));
        }
    }
    if (Lag1) carry[slot] = x;
}

// One row of W * n elements: its W segments are scanned side by side, then each takes the carry of its neighbour, times
// a product of coefficients. Returns false, with d of no use, where a product overflows or a carry is not finite: the
// product may be zero, or infinite, where the steps one after the other are not.
template <class T, int W, bool Reverse>
GRL_INLINE bool scan_one_row(T* d, T* c, int64_t n, T& carry) {
    using Bits = typename Unsigned<sizeof(T)>::type;
    typename Vec<T, W>::type zero = {};
    scan_rows<T, W, Reverse, true, true>(d, c, n, n, &zero, 1, 0);
    Bits strange = 0;
    for (int s = 0; s < W; ++s) {
        T* ds = d + (Reverse ? W - 1 - s : s) * n;
        const T* cs = c + (Reverse ? W - 1 - s : s) * n;
        strange |= Bits(carry - carry != T(0));
        for (int64_t k = 0; k < n; ++k) {
            strange |= Bits(cs[k] - cs[k] != T(0));
            ds[k] += zero_where(cs[k] == T(0), cs[k] * carry);
        }
        carry = Reverse ? ds[0] : ds[n - 1];
    }
    return !strange;
}

}  // namespace grl
