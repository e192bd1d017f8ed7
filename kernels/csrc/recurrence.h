// Walks contiguous [outer, steps, inner] arrays along `steps` for any kernel that is a first-order linear recurrence.
//
// A kernel P derives from Shape<T> and has
//   static constexpr bool reverse            whether x[t] follows from x[t + 1] (true) or from x[t - 1]
//   fill<PerStep>(at, n, d, c) const         writes d and c of x = d + c * x_neighbour for elements at .. at + n
//   finish<PerStep>(at, n, x) const          reads the n scanned x and writes the kernel's outputs
// The n elements lie in one outer row and n <= kWindow. Three ways through the arrays, by shape:
//   rows     inner < 8: W outer rows side by side in SIMD lanes, in tiles that stay in the L1 cache
//   one row  inner == 1 and few rows: W segments of one tile side by side
//   columns  inner >= 8: time is not the fastest dimension, so lanes run along memory
#pragma once
#include <algorithm>

#include "abi.h"
#include "parallel.h"
#include "scan.h"

namespace grl {

constexpr int64_t kTile = 512;     // elements of one row in L1: 2 * W * kTile * sizeof(T) = 32 KiB; 256 was 15 % slower
constexpr int64_t kSegment = 64;   // of one row, per lane: W * kSegment elements, and W is 8 at most
constexpr int64_t kMaxLag = 8;     // inner below this goes by rows
constexpr int64_t kColumns = 256;  // most columns of one task
constexpr int64_t kWindow = kTile;
static_assert(kWindow >= 8 * kSegment && kWindow >= kColumns, "fill and finish see at most kWindow elements");

template <class T>
struct Shape {
    int64_t outer, steps, inner;
    bool per_step;  // coefficients are one per element, not one for all
    int64_t tasks = 0, block = 0;  // block: rows (by rows, one row) or columns of one task
    bool columns = false, one_row = false;

    // Elements of the window at .. at + n that lie before the last step.
    GRL_INLINE int64_t before_last(int64_t at, int64_t n) const {
        return std::min(n, std::max<int64_t>(0, (steps - 1) * inner - at % (steps * inner)));
    }
    // Elements of the window at .. at + n that lie in the first step.
    GRL_INLINE int64_t in_first(int64_t at, int64_t n) const {
        return std::min(n, std::max<int64_t>(0, inner - at % (steps * inner)));
    }
};

// The flags of a window: those at `at`, or zeros for a kernel that was given none.
GRL_INLINE const uint8_t* flags_at(const uint8_t* flags, int64_t at) {
    static const uint8_t none[kWindow] = {};
    return flags ? flags + at : none;
}

template <class T, int W, bool PerStep, bool Lag1, class P>
GRL_INLINE void run_rows(const P& p, int64_t task) {
    constexpr bool R = P::reverse;
    alignas(64) T d[W * kTile], c[W * kTile];
    typename Vec<T, W>::type carry[Lag1 ? 1 : kMaxLag] = {};
    const int64_t lag = Lag1 ? 1 : p.inner, length = p.steps * lag, row0 = task * W;
    const int64_t rows = std::min<int64_t>(W, p.outer - row0), tiles = (length + kTile - 1) / kTile;
    if (rows < W) std::memset(d, 0, sizeof d), std::memset(c, 0, sizeof c);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t at = (R ? tiles - 1 - i : i) * kTile, n = std::min(kTile, length - at);
        const int64_t padded = (n + W - 1) / W * W;
        for (int64_t row = 0; row < rows; ++row) {
            T *dr = d + row * kTile, *cr = c + row * kTile;
            p.template fill<PerStep>((row0 + row) * length + at, n, dr, cr);
            for (int64_t k = n; k < padded; ++k) dr[k] = cr[k] = T(0);
        }
        scan_rows<T, W, R, false, Lag1>(d, c, kTile, padded, carry, lag, (at + (R ? padded - 1 : 0)) % lag);
        for (int64_t row = 0; row < rows; ++row)
            p.template finish<PerStep>((row0 + row) * length + at, n, d + row * kTile);
    }
}

template <class T, int W, bool PerStep, class P>
GRL_INLINE void run_one_row(const P& p, int64_t row) {
    constexpr bool R = P::reverse;
    constexpr int64_t kLong = W * kSegment;
    alignas(64) T d[kLong], c[kLong];
    T carry = T(0);
    const int64_t tiles = (p.steps + kLong - 1) / kLong;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t at = (R ? tiles - 1 - i : i) * kLong, n = std::min(kLong, p.steps - at);
        const int64_t segment = (n + W * W - 1) / (W * W) * W;
        p.template fill<PerStep>(row * p.steps + at, n, d, c);
        for (int64_t k = n; k < segment * W; ++k) d[k] = c[k] = T(0);
        const T entering = carry;
        if (!scan_one_row<T, W, R>(d, c, segment, carry)) {
            alignas(64) T kept[kLong];  // what is finite in both stays, to the bit what it is beside a finite neighbour
            std::memcpy(kept, d, sizeof d);
            p.template fill<PerStep>(row * p.steps + at, n, d, c);
            carry = entering;
            for (int64_t j = 0; j < n; ++j) {
                const int64_t k = R ? n - 1 - j : j;
                const T x = d[k] + zero_where(c[k] == T(0), c[k] * carry);
                carry = d[k] = x - x == T(0) && kept[k] - kept[k] == T(0) ? kept[k] : x;
            }
        }
        p.template finish<PerStep>(row * p.steps + at, n, d);
    }
}

template <class T, bool PerStep, class P>
GRL_INLINE void run_columns(const P& p, int64_t task) {
    alignas(64) T x[kColumns] = {}, d[kColumns], c[kColumns];
    const int64_t per_outer = (p.inner + p.block - 1) / p.block, first = task % per_outer * p.block;
    const int64_t n = std::min(p.block, p.inner - first);
    for (int64_t s = 0; s < p.steps; ++s) {
        const int64_t t = P::reverse ? p.steps - 1 - s : s;
        const int64_t at = (task / per_outer * p.steps + t) * p.inner + first;
        p.template fill<PerStep>(at, n, d, c);
        for (int64_t k = 0; k < n; ++k) x[k] = d[k] + zero_where(c[k] == T(0), c[k] * x[k]);
        p.template finish<PerStep>(at, n, x);
    }
}

template <class T, int W, bool PerStep, class P>
GRL_INLINE void run_shape(const P& p, int64_t task) {
    if (p.columns)
        run_columns<T, PerStep>(p, task);
    else if (p.one_row)
        run_one_row<T, W, PerStep>(p, task);
    else if (p.inner == 1)
        run_rows<T, W, PerStep, true>(p, task);
    else
        run_rows<T, W, PerStep, false>(p, task);
}

template <class T, int Bytes, class P>
GRL_INLINE void run_task(const void* context, int64_t task) {
    const P& p = *static_cast<const P*>(context);
    if (p.per_step)
        run_shape<T, Bytes / int(sizeof(T)), true>(p, task);
    else
        run_shape<T, Bytes / int(sizeof(T)), false>(p, task);
}

template <class T, class P>
void task_base(const void* context, int64_t task) {
    run_task<T, 16, P>(context, task);
}
#if GRL_X86
template <class T, class P>
GRL_TARGET_AVX2 void task_avx2(const void* context, int64_t task) {
    run_task<T, 32, P>(context, task);
}
template <class T, class P>
GRL_TARGET_AVX512 void task_avx512(const void* context, int64_t task) {
    run_task<T, 32, P>(context, task);
}
#endif

template <class T, class P>
void run(P& p, int64_t threads) {
    static const Isa isa = detect_isa();
    const int64_t lanes = (isa == Isa::base ? 16 : 32) / int64_t(sizeof(T));
    p.columns = p.inner >= kMaxLag;
    p.one_row = p.inner == 1 && 2 * p.outer < lanes && p.steps >= 4 * lanes;
    if (p.columns) {
        const int64_t share = (p.outer * p.inner + threads - 1) / threads;
        p.block = std::min({kColumns, std::max<int64_t>(16, (share + 15) / 16 * 16), p.inner});
        p.tasks = p.outer * ((p.inner + p.block - 1) / p.block);
    } else {
        p.block = p.one_row ? 1 : lanes;
        p.tasks = (p.outer + p.block - 1) / p.block;
    }
    Task task = task_base<T, P>;
#if GRL_X86
    if (isa == Isa::avx512) task = task_avx512<T, P>;
    if (isa == Isa::avx2) task = task_avx2<T, P>;
#endif
    parallel_for(p.tasks, threads, task, &p);
}

}  // namespace grl
